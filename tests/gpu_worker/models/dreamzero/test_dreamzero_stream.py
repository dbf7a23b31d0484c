"""The stream of what the cameras show: one latent frame for the first picture, one for each four after it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from gpu_worker.models.dreamzero.pictures import Picture
from gpu_worker.models.dreamzero.stream import FrameEncoder, FrameStream
from gpu_worker.models.lingbot_world.vae import wan_vae_class
from support.dreamzero_worlds import camera
from support.lingbot_checkpoint import TINY_VAE, VAE_CONFIG, tiny_vae

HEIGHT, WIDTH = 16, 24
KEEP = 2

PICTURES = [camera(seed, height=HEIGHT, width=WIDTH) for seed in range(12)]


def encoder(vae: Any = None) -> FrameEncoder:
    return FrameEncoder(tiny_vae() if vae is None else vae, height=HEIGHT, width=WIDTH, dtype=torch.float32)


def stream() -> FrameStream:
    return FrameStream(encoder(), KEEP)


def whole_clip(pictures: list[np.ndarray]) -> torch.Tensor:
    """Latents [1, 16, n, h, w] of a whole clip by the VAE's own encode, scaled by its own means and deviations."""
    vae = tiny_vae()
    clip = torch.stack(
        [torch.from_numpy(p.copy()).permute(2, 0, 1).float() / 255 * 2 - 1 for p in pictures], 1
    )
    with torch.no_grad():
        mean = vae.encode(clip[None]).latent_dist.mean
    shift, scale = (
        torch.tensor(values).view(1, 16, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (mean - shift) / scale


def test_the_first_picture_is_one_latent_frame_and_each_four_more_are_another() -> None:
    frames = stream()
    state = frames.begin(PICTURES[0])
    counts = [len(state.latents)]
    for picture in PICTURES[1:9]:
        state = frames.append(state, picture)
        counts.append(len(state.latents))

    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 2]
    expected = whole_clip(PICTURES[:9])
    assert torch.allclose(frames.newest(state, 2), expected[:, :, 1:], atol=1e-5)
    assert torch.allclose(frames.newest(state, 1), expected[:, :, 2:], atol=1e-5)


def test_where_there_are_too_few_the_last_one_stands_in_front_as_well() -> None:
    frames = stream()
    state = frames.begin(PICTURES[0])

    assert torch.equal(frames.newest(state, 2), frames.newest(state, 1).repeat(1, 1, 2, 1, 1))

    frames = FrameStream(encoder(), 3)
    state = frames.append(frames.begin(PICTURES[0]), *PICTURES[1:5])
    first, second = frames.newest(state, 2).split(1, dim=2)
    assert torch.equal(frames.newest(state, 3), torch.cat((second, first, second), dim=2))


@pytest.mark.parametrize("count", [0, -1, 3, 9])
def test_more_than_are_kept_can_not_be_asked_for(count: int) -> None:
    frames = stream()
    with pytest.raises(ValueError, match="keeps 2 latent frames") as caught:
        frames.newest(frames.begin(PICTURES[0]), count)
    assert isinstance(caught.value, InvalidArgumentError)
    assert caught.value.field == "count"


class WholeStream:
    """The same in one breath: all pictures are remembered, and encoded anew whenever somebody looks."""

    def __init__(self, first: Picture) -> None:
        self.pictures = [first]

    def append(self, *pictures: Picture) -> None:
        self.pictures += pictures

    def newest(self, count: int) -> torch.Tensor:
        used = 1 + 4 * ((len(self.pictures) - 1) // 4)
        latents = list(whole_clip(self.pictures[:used]).split(1, dim=2))[-count:]
        return torch.cat([latents[-1]] * (count - len(latents)) + latents, dim=2)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 5) | st.sampled_from(["look 1", "look 2", "fork"]), min_size=1, max_size=8))
def test_any_sequence_of_calls_is_answered_as_if_everything_were_remembered(calls: list[int | str]) -> None:
    frames, whole = stream(), WholeStream(PICTURES[0])
    state, shown = frames.begin(PICTURES[0]), 0
    for call in [*calls, "look 2"]:
        if isinstance(call, int):
            new = [PICTURES[(shown + i) % len(PICTURES)] for i in range(call)]
            shown += call
            state = frames.append(state, *new)
            whole.append(*new)
        elif call == "fork":
            frames.append(state, *PICTURES[:5])  # what is not kept changes nothing
        else:
            count = int(call[-1])
            assert torch.allclose(frames.newest(state, count), whole.newest(count), atol=1e-4)
        assert len(state.latents) <= KEEP
        assert len(state.waiting) < 4


def test_sessions_that_take_turns_do_not_change_each_other() -> None:
    frames = stream()
    one, other = frames.begin(PICTURES[0]), frames.begin(PICTURES[5])
    for step in range(1, 5):
        one, other = frames.append(one, PICTURES[step]), frames.append(other, PICTURES[5 + step])

    assert torch.allclose(frames.newest(one, 2), whole_clip(PICTURES[:5]), atol=1e-5)
    assert torch.allclose(frames.newest(other, 2), whole_clip(PICTURES[5:10]), atol=1e-5)


def test_what_is_kept_is_what_is_declared() -> None:
    frames = stream()
    state = frames.append(frames.begin(PICTURES[0]), *PICTURES[1:9])

    latents = 2 * 16 * (HEIGHT // 8) * (WIDTH // 8) * 4
    assert state.nbytes == 4 * TINY_VAE.encoder_elements(HEIGHT, WIDTH) + latents


def test_the_condition_of_a_rollout_is_the_picture_and_grey_after_it() -> None:
    condition = encoder().condition(PICTURES[3], 9)

    vae = tiny_vae()
    clip = torch.zeros(1, 3, 33, HEIGHT, WIDTH)
    clip[0, :, 0] = torch.from_numpy(PICTURES[3].copy()).permute(2, 0, 1).float() / 255 * 2 - 1
    with torch.no_grad():
        mean = vae.encode(clip).latent_dist.mean
    shift, scale = (
        torch.tensor(values).view(1, 16, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    assert condition.shape == (1, 20, 9, HEIGHT // 8, WIDTH // 8)
    assert torch.allclose(condition[:, 4:], (mean - shift) / scale, atol=1e-5)
    assert (condition[:, :4, 0] == 1).all()
    assert not condition[:, :4, 1:].any()


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH + 8), (HEIGHT - 8, WIDTH)])
def test_a_picture_of_another_size_is_refused(size: tuple[int, int]) -> None:
    wrong = camera(1, height=size[0], width=size[1])
    frames = stream()
    for call in (lambda: frames.begin(wrong), lambda: encoder().condition(wrong, 2)):
        with pytest.raises(InvalidArgumentError, match="must have shape") as caught:
            call()
        assert caught.value.field == "images"


def test_a_latent_frame_needs_one_picture_first_and_four_later() -> None:
    vae = encoder()
    _, history = vae.encode(PICTURES[:1], None)
    for pictures, known in ((PICTURES[:4], None), (PICTURES[:3], history)):
        with pytest.raises(InvalidArgumentError, match="is made of"):
            vae.encode(pictures, known)


def test_a_history_of_another_encoder_is_refused() -> None:
    vae = encoder()
    _, history = vae.encode(PICTURES[:1], None)
    with pytest.raises(InvalidArgumentError, match="does not belong") as caught:
        vae.encode(PICTURES[:4], history[:-1])
    assert caught.value.field == "history"


def test_another_vae_is_refused() -> None:
    with pytest.raises(InvalidTypeError):
        encoder(torch.nn.Linear(1, 1))


def test_a_vae_that_tiles_is_refused() -> None:
    vae = wan_vae_class().from_config(VAE_CONFIG)
    vae.enable_tiling(tile_sample_min_height=8, tile_sample_min_width=8)
    with pytest.raises(ConfigurationError, match="can't stream") as caught:
        encoder(vae)
    assert caught.value.field == "use_tiling"
