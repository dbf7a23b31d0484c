"""When a close that failed is tried again, and under which name.

A retry is named after what it means (session, life, attempt), so two janitors, or one that sends it twice, send the same
command, which acts once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_JITTER: Final = 0.25
_HASH_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class CloseRetry:
    """The pause doubles from `first_ms` to `longest_ms`; each is off by up to a quarter, within these bounds.

    Args:
        first_ms: after the first failure.
        longest_ms: after many.
        uniform: draws from a range; jitter spreads out what failed together.
    """

    first_ms: int = 1_000
    longest_ms: int = 600_000
    uniform: Callable[[float, float], float] = random.uniform

    def pause_ms(self, failures: int) -> int:
        """How long to wait after that many failures (1 or more)."""
        # Beyond 2^40 every pause is the longest one; the bound keeps the number small.
        doubled = self.first_ms << min(max(failures, 1) - 1, 40)
        pause = min(self.longest_ms, doubled) * self.uniform(1 - _JITTER, 1 + _JITTER)
        return round(max(self.first_ms, min(self.longest_ms, pause)))


def close_command_id(session_id: str, life: str, attempt: int) -> str:
    """The command id of one retry. Letters, digits and dashes only, so that a job may have it as its id as well."""
    digest = hashlib.sha256(f"{session_id}\n{life}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"close-{digest}-{attempt}"
