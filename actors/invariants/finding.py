"""One thing that is not as it must be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant.

    Args:
        code: which one; the same code for the same kind of damage, so that programs may count.
        key: where it shows.
        message: one line for a person.
        session_id: whose, where it is about one session.
        corrupt: the key holds what no writer of ours can have written.
    """

    code: str
    key: str
    message: str
    session_id: str | None = None
    corrupt: bool = False

    def to_dict(self) -> dict[str, object]:
        """The form that `--json` prints."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
