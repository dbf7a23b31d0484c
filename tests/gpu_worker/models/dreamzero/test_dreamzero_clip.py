"""The image tower: its pixels and its tokens against plain NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import InvalidArgumentError, InvalidTypeError
from gpu_worker.models.dreamzero.clip import ClipImageTower, preprocess
from gpu_worker.models.dreamzero.config import ClipGeometry
from support.dreamzero_model import TINY, arrays, fill, random_weights, shapes_of
from support.dreamzero_oracles import clip as oracle
from support.lingbot_model import seeded


def tower(geometry: ClipGeometry = TINY.clip) -> ClipImageTower:
    made = ClipImageTower(geometry)
    fill(made, random_weights(shapes_of(made)))
    return made


def picture(height: int = 32, width: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=seeded(seed)) * 2 - 1


@pytest.mark.parametrize(("height", "width"), [(352, 640), (32, 48), (28, 28), (7, 5)])
def test_pictures_of_any_shape_become_the_square_that_clip_was_shown(height: int, width: int) -> None:
    shown = picture(height, width)

    found = preprocess(shown, 28)

    np.testing.assert_allclose(found[0].numpy(), oracle.preprocess(shown[0].double().numpy(), 28), atol=2e-4)


def test_half_precision_pictures_are_resized_in_float32() -> None:
    shown = picture().bfloat16()

    assert preprocess(shown, 28).dtype == torch.float32
    assert torch.equal(preprocess(shown, 28), preprocess(shown.float(), 28))


@pytest.mark.parametrize("layers", [2, 4])
def test_tokens_are_those_of_the_last_block_but_one_without_a_norm_behind_it(layers: int) -> None:
    geometry = ClipGeometry(image_size=28, patch_size=14, width=8, heads=2, layers=layers)
    made, shown = tower(geometry), picture()

    found = made(shown)

    expected = oracle.forward(
        arrays(made), shown[0].double().numpy(), size=28, patch=14, heads=2, blocks=layers - 1
    )
    assert found.shape == (1, 5, 8)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5, rtol=1e-5)


def test_tokens_have_the_tower_s_type() -> None:
    assert tower().to(torch.bfloat16)(picture()).dtype == torch.bfloat16


def test_the_published_tower_makes_257_tokens_of_1280_in_31_blocks() -> None:
    with torch.device("meta"):
        made = ClipImageTower()

    assert (made.geometry.tokens, made.geometry.width, len(made.transformer)) == (257, 1280, 31)
    assert made.pos_embedding.shape == (1, 257, 1280)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3, 8, 8), torch.zeros(1, 4, 8, 8), torch.zeros(2, 3, 8, 8), torch.zeros(1, 3, 0, 8)],
)
def test_a_tower_sees_one_picture_of_three_colours(wrong: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tower()(wrong)
    assert caught.value.field == "picture"


def test_a_picture_is_a_tensor() -> None:
    wrong: Any = np.zeros((1, 3, 8, 8))
    with pytest.raises(InvalidTypeError, match="picture"):
        tower()(wrong)
