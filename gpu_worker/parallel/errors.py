"""What goes wrong between ranks."""

from __future__ import annotations

from contracts.errors import KVStateError, ModelError


class ShardError(ModelError):
    """Raised when what should be sharded together has shares of different sizes, or can't be shared equally."""


class RankMismatchError(KVStateError):
    """Raised when ranks that ran the same requests hold different pages: the group can't go on."""
