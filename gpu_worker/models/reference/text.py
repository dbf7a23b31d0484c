"""Prompts to token vectors, without a tokenizer: the bytes of words, hashed into a table of random vectors."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import torch

from gpu_worker.models.reference.spec import HEAD_SIZE, HEADS, TEXT_TOKENS

_ROWS: Final = 1024


def _row(word: str, slot: int) -> int:
    digest = blake2b(word.encode(), digest_size=8, salt=slot.to_bytes(2, "big")).digest()
    return int.from_bytes(digest, "big") % _ROWS


class HashedTextEmbedding:
    """Embeds any text, equal texts equally; upper case and spacing do not matter.

    Args:
        generator: draws the table.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._table = torch.randn(_ROWS, HEADS * HEAD_SIZE, generator=generator)

    def __call__(self, prompt: str | None) -> torch.Tensor:
        """Token vectors [1, TEXT_TOKENS, dim]. No prompt is a text of its own.

        A short prompt repeats until every slot is filled; what is longer than the slots is added up in them.
        """
        words = (prompt or "").lower().split() or [""]
        count = max(len(words), TEXT_TOKENS)
        rows = [_row(words[i % len(words)], i // len(words)) for i in range(count)]
        tokens = torch.zeros(TEXT_TOKENS, self._table.shape[1])
        slots = torch.arange(count) % TEXT_TOKENS
        tokens.index_add_(0, slots, self._table[rows])
        filled = torch.bincount(slots, minlength=TEXT_TOKENS).sqrt()
        return (tokens / filled.unsqueeze(1)).unsqueeze(0)
