"""The parts of the reference world, each alone."""

import math
from typing import Any

import pytest
import torch

from contracts.errors import ConfigurationError
from gpu_worker.kv.cross_attention import CrossAttentionLayer
from gpu_worker.models.reference.camera import CameraPose, held_keys, motion_of, patch_points
from gpu_worker.models.reference.decoder import ColourFieldDecoder, spread_matrix
from gpu_worker.models.reference.sampler import SIGMAS, next_latents
from gpu_worker.models.reference.spec import ReferenceConfig, kv_spec
from gpu_worker.models.reference.text import HashedTextEmbedding
from gpu_worker.models.reference.transformer import ReferenceTransformer, rotary_table, rotate
from support.kv_cache import CPU, make_state


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------- spec


def test_the_spec_is_one_branch_of_three_frames_a_tick() -> None:
    spec = kv_spec({})
    assert (spec.branch_names, spec.frames_per_block, spec.tokens_per_frame) == (("main",), 3, 16)
    assert (spec.sink_frames, spec.window_frames, spec.session_capacity) == (3, 6, 64)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_size) == (4, 4, 16)
    assert [(cache.name, cache.num_tokens) for cache in spec.cross_attention] == [("text", 16)]


def test_settings_change_the_spec() -> None:
    spec = kv_spec({"session_capacity": 2, "window_frames": 9, "sink_frames": 0})
    assert (spec.session_capacity, spec.window_frames, spec.sink_frames) == (2, 9, 0)


@pytest.mark.parametrize(
    ("config", "field"), [({"sesion": 1}, "sesion"), ({"weights_seed": "7"}, "weights_seed")]
)
def test_a_bad_setting_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field) as caught:
        ReferenceConfig.from_mapping(config)
    assert caught.value.field == field


# ---------------------------------------------------------------------------------------------------- camera


def test_keys_become_motion_and_opposite_keys_cancel() -> None:
    assert motion_of(("w", "d", "i", "l")) == (1, 1, 1, 1)
    assert motion_of(("a", "s", "j", "k")) == (-1, -1, -1, -1)
    assert motion_of(("w", "a", "s", "d", "i", "j", "k", "l")) == (0, 0, 0, 0)
    assert held_keys(()) == ((), (), ())


def test_walking_follows_the_view() -> None:
    ahead = CameraPose().moved((1, 0, 0, 0))
    assert (ahead.x, ahead.z) == (0, pytest.approx(0.15))
    turned = CameraPose(yaw=math.pi / 2)
    assert (turned.moved((1, 0, 0, 0)).x, turned.moved((0, 1, 0, 0)).z) == pytest.approx((0.15, -0.15))


def test_there_and_back_again_is_the_same_place() -> None:
    pose = CameraPose(1, 2, 3, 0.3, 0.1)
    back = pose.moved((1, -1, 0, 0)).moved((-1, 1, 0, 0))
    assert (back.x, back.y, back.z) == pytest.approx((1, 2, 3))


def test_looking_up_stops_before_the_zenith() -> None:
    pose = CameraPose()
    for _ in range(100):
        pose = pose.moved((0, 0, 0, 1))
    assert pose.pitch == pytest.approx(math.radians(80))


def test_patches_look_at_a_plane_before_the_camera() -> None:
    points = patch_points(CameraPose())
    assert tuple(points.shape) == (3, 4, 4)
    assert torch.allclose(points[0], torch.tensor([-0.75, -0.25, 0.25, 0.75]).expand(4, 4))
    assert torch.allclose(points[1, :, 0], torch.tensor([0.75, 0.25, -0.25, -0.75]))
    assert torch.allclose(points[2], torch.ones(4, 4))
    assert torch.allclose(patch_points(CameraPose(yaw=math.pi / 2))[0], torch.ones(4, 4))
    assert bool((patch_points(CameraPose(pitch=0.5))[1] > points[1] - 0.2).all())


# ---------------------------------------------------------------------------------------------------- text


def test_equal_texts_embed_equally_whatever_their_case_and_spacing() -> None:
    embed = HashedTextEmbedding(seeded())
    assert torch.equal(embed("A red  Castle"), embed("a red castle\n"))
    assert not torch.equal(embed("a red castle"), embed("a blue castle"))
    assert torch.equal(embed(None), embed("  "))
    assert tuple(embed(None).shape) == (1, 16, 64)


def test_every_word_of_a_long_text_counts() -> None:
    embed = HashedTextEmbedding(seeded())
    words = [f"word{number}" for number in range(40)]
    base = embed(" ".join(words))
    for number in (0, 17, 39):
        changed = [*words[:number], "other", *words[number + 1 :]]
        assert not torch.equal(base, embed(" ".join(changed)))


# ---------------------------------------------------------------------------------------------------- decoder


def test_spreading_is_exact_for_linear_values_up_to_the_edge() -> None:
    spread = spread_matrix(48)
    centres = (torch.arange(4) + 0.5) / 4
    pixels = (torch.arange(48) + 0.5) / 48
    torch.testing.assert_close(spread @ centres, pixels, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(spread.sum(1), torch.ones(48), atol=1e-6, rtol=1e-6)


def test_decoding_goes_on_where_the_last_chunk_ended() -> None:
    decode = ColourFieldDecoder(seeded(), CPU)
    latents = torch.randn(1, 16, 6, 4, 4, generator=seeded())
    whole = decode(latents, None)
    parts = [decode(latents[:, :, :3], None), decode(latents[:, :, 3:], latents[0, :, 2])]
    assert torch.equal(torch.cat(parts), whole)


def test_a_still_latent_is_a_still_picture() -> None:
    frames = ColourFieldDecoder(seeded(), CPU)(torch.ones(1, 16, 3, 4, 4), None)
    assert bool((frames == frames[0]).all())


# ---------------------------------------------------------------------------------------------------- sampler


def test_the_last_step_leaves_the_prediction_as_it_is_and_draws_nothing() -> None:
    generator, clean = seeded(), torch.ones(1, 16, 3, 4, 4)
    before = generator.get_state()
    assert torch.equal(next_latents(clean, 3, generator), clean)
    assert torch.equal(generator.get_state(), before)
    noise = torch.randn(1, 16, 3, 4, 4, generator=seeded())
    assert torch.equal(next_latents(clean, 0, generator), (1 - SIGMAS[1]) * clean + SIGMAS[1] * noise)


# ---------------------------------------------------------------------------------------------------- transformer


def test_rotations_depend_on_the_distance_in_time_only() -> None:
    q, k = torch.randn(2, 1, 48, 4, 16, generator=seeded()).unbind(0)

    def scores(start: int) -> torch.Tensor:
        table = rotary_table(start, 3, CPU)
        return torch.einsum("bqhd,bkhd->bhqk", rotate(q, table), rotate(k, table))

    torch.testing.assert_close(scores(0), scores(5000), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores(0), torch.einsum("bqhd,bkhd->bhqk", q, k), atol=1e-3)


def test_a_later_block_of_rotations_is_a_slice_of_a_longer_one() -> None:
    assert torch.equal(rotary_table(6, 3, CPU), rotary_table(0, 9, CPU)[96:])


class DenseLayer:
    """Keeps every K and V ever committed in plain lists, and attends to those that sink and window leave."""

    def __init__(self, sink: int, window: int) -> None:
        self.sink, self.window = sink, window
        self.frames: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.commit = False

    def write_and_attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        frames = [*self.frames, *zip(k.split(16, 1), v.split(16, 1), strict=True)]
        if self.commit:
            self.frames = frames
        if len(frames) > self.sink + self.window:
            frames = [*frames[: self.sink], *frames[-self.window :]]
        k, v = (torch.cat(parts, 1) for parts in zip(*frames, strict=True))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@torch.inference_mode()
def test_a_paged_rollout_equals_one_over_everything_ever_committed() -> None:
    spec = kv_spec({})
    model = ReferenceTransformer.seeded(seeded())
    state = make_state(spec)
    dense = [DenseLayer(spec.sink_frames, spec.window_frames) for _ in range(spec.num_layers)]
    text: list[CrossAttentionLayer] = [
        {"is_init": True, "k": k, "v": v}
        for k, v in model.text_kv(torch.randn(1, 16, 64, generator=seeded()))
    ]
    generator = seeded(3)
    for chunk in range(11):
        points = torch.randn(3, 3, 4, 4, generator=generator)
        motion = torch.randn(3, 4, generator=generator)
        for timestep, commit in ((1000.0, False), (625.0, False), (0.0, True)):
            latents = torch.randn(1, 16, 3, 4, 4, generator=generator)
            handles = state.get_kv_caches("main", seq_len=48, commit_current=commit)
            start = state.prepare_paged_context("main").start_frame
            assert start == 3 * chunk
            for layer in dense:
                layer.commit = commit
            outputs = [
                model(latents, timestep, points, motion, start_frame=start, kv=kv, text=text)
                for kv in (handles, dense)
            ]
            torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
            state.commit_paged_context("main")
