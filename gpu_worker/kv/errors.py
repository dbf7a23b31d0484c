"""Misuse of a session's KV, typed; these join the tree of `contracts/errors.py`.

InvalidArgumentError (ValueError)
 +-- UnknownNameError (KeyError)           a branch or cache that the spec does not have
 +-- FrameAlignmentError (AssertionError)  a length that is not whole frames
"""

from __future__ import annotations

from collections.abc import Container

from contracts.errors import InvalidArgumentError


class UnknownNameError(InvalidArgumentError, KeyError):
    """Raised for a branch or a cross-attention cache that the spec does not have; the message names those it has."""


class FrameAlignmentError(InvalidArgumentError, AssertionError):
    """Raised for a `seq_len` that is not a multiple of a frame's tokens."""


def is_known(name: object, known: Container[str]) -> bool:
    """Whether `name`, which may be anything, is one of the known names."""
    return isinstance(name, str) and name in known
