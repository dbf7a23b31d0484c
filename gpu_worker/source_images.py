"""Images that a tick needs: URLs become bytes before the model sees them.

Those that a session was created with are read once, when a world begins; later chunks don't need them. Those that a
tick's observation names are read for that tick, in order of their views.

A URL is one of the payload store's: `redis:<key>`, or below the base that this worker writes to. Whatever else a
producer names is not fetched, so nobody makes a worker read files or call servers. Text that is no URL is left to the
model, which may know a folder that it trusts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from contracts.dreamzero import observation_images
from contracts.errors import BrokerError, ModelError, WorldlineError
from contracts.payloads import REDIS_SCHEME, PayloadStore
from contracts.tick import ARDiffusionTickRequest

FIELD: Final = "images"

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


async def with_images_of(
    tick: ARDiffusionTickRequest, params: Mapping[str, Any], store: PayloadStore
) -> Mapping[str, Any]:
    """Creation parameters as a tick needs them: `images` are those of its observation, or of a world that begins.

    Raises:
        ModelError: an image is not there, or may not be fetched; names it.
        BrokerError: the broker does not answer.
    """
    seen = observation_images(tick.controls)
    if seen:
        images = [await _fetched(url, store, f"{FIELD}.{view}") for view, url in seen.items()]
        return {**params, FIELD: images}
    return await with_images(params, store) if tick.chunk_index == 0 else params


async def with_images(params: Mapping[str, Any], store: PayloadStore) -> Mapping[str, Any]:
    """Creation parameters, with bytes in place of the URLs among `images`.

    Raises:
        ModelError: an image is not there, or may not be fetched.
        BrokerError: the broker does not answer.
    """
    images = params.get(FIELD)
    if not isinstance(images, list | tuple):
        return params  # whoever reads it says what is wrong with it
    return {**params, FIELD: [await _fetched(image, store, FIELD) for image in images]}


async def _fetched(image: object, store: PayloadStore, field: str) -> object:
    if not isinstance(image, str) or _URL.match(image) is None:
        return image
    below = store.base != REDIS_SCHEME and image.startswith(f"{store.base}/") and ".." not in image
    inside = image.startswith(REDIS_SCHEME) and not image.startswith("redis://")
    if not (below or inside) or "::" in image.removeprefix(store.base):
        raise ModelError(
            f"{field}: an image's URL must be redis:<key>, or lie below the worker's payload_url", field=field
        )
    try:
        return await store.read(image)
    except BrokerError:
        raise
    except WorldlineError:
        raise ModelError(
            f"{field}: the image is not there: it has expired or was never written", field=field
        ) from None
