"""What rank 0 tells the others: one message a request, with all that a rank needs to do the same. Torch-free.

4 bytes   length of the header
header    JSON; `images` of the parameters that are bytes stand as null there
the rest  those bytes, one after the other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from contracts.events import thaw
from contracts.tick import ARDiffusionTickRequest

IMAGES: Final = "images"

_LENGTH_BYTES: Final = 4


class Order(StrEnum):
    """What the ranks are to do. A session that makes room for another goes with the tick that needs the room."""

    START = "start"
    """Allocate memory and warm up."""
    TICK = "tick"
    RESET = "reset"
    CLOSE = "close"
    CHECK = "check"
    """Count the pages, and compare them with those of the other ranks."""
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class RankRequest:
    """One message.

    Args:
        order: what to do.
        session_id: for a reset or a close.
        tick, params, seed: for a tick; `params` hold images as bytes, not as URLs.
    """

    order: Order
    session_id: str = ""
    tick: ARDiffusionTickRequest | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def encode(self) -> bytes:
        """As bytes."""
        params, blobs = _without_blobs(self.params)
        header = orjson.dumps(
            {
                "order": self.order,
                "session_id": self.session_id,
                "tick": None if self.tick is None else self.tick.to_dict(),
                "params": params,
                "blobs": {str(index): len(blob) for index, blob in blobs.items()},
                "seed": self.seed,
            }
        )
        return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, *blobs.values()))

    @classmethod
    def decode(cls, message: bytes) -> RankRequest:
        """From bytes that `encode` made."""
        end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
        fields = orjson.loads(message[_LENGTH_BYTES:end])
        tick = fields["tick"]
        return cls(
            order=Order(fields["order"]),
            session_id=fields["session_id"],
            tick=None if tick is None else ARDiffusionTickRequest.from_dict(tick),
            params=_with_blobs(fields["params"], fields["blobs"], message[end:]),
            seed=fields["seed"],
        )


def _without_blobs(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, bytes]]:
    plain = dict(params)
    images = plain.get(IMAGES)
    blobs: dict[int, bytes] = {}
    if isinstance(images, list | tuple):
        blobs = {index: image for index, image in enumerate(images) if isinstance(image, bytes)}
        plain[IMAGES] = [None if index in blobs else image for index, image in enumerate(images)]
    return {name: thaw(value) for name, value in plain.items()}, blobs


def _with_blobs(params: dict[str, Any], lengths: Mapping[str, int], data: bytes) -> dict[str, Any]:
    start = 0
    for index, length in lengths.items():
        params[IMAGES][int(index)] = data[start : start + length]
        start += length
    return params
