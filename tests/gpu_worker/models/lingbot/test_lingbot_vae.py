"""Streaming encoder and decoder: block-wise is whole-clip, sessions are apart, histories are the caller's."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from PIL import Image

from contracts.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from gpu_worker.models.lingbot_world.conditioning import EncodedBlock, EncoderState, StreamingConditionEncoder
from gpu_worker.models.lingbot_world.decoding import DecoderState, StreamingDecoder, to_uint8
from gpu_worker.models.lingbot_world.spec import owned_bytes
from gpu_worker.models.lingbot_world.vae import (
    Slot,
    causal_convolutions,
    check_vae_config,
    history_bytes,
)
from support.lingbot_checkpoint import TINY_VAE, VAE_CONFIG, tiny_vae
from support.lingbot_model import seeded

SIDE = 16
BLOCKS = 12
MOMENTS = ("latents_mean", "latents_std")


def image(seed: int = 5, height: int = SIDE, width: int = SIDE) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=seeded(seed)) * 2 - 1


def latents(frames: int, seed: int = 6) -> torch.Tensor:
    return torch.randn(1, 16, frames, 2, 2, generator=seeded(seed))


def encoder(vae: Any = None) -> StreamingConditionEncoder:
    return StreamingConditionEncoder(tiny_vae() if vae is None else vae, dtype=torch.float32)


def encode(streaming: StreamingConditionEncoder, blocks: int) -> list[EncodedBlock]:
    made, state = [], None
    for index in range(blocks):
        made.append(streaming.encode(3 * index, SIDE, SIDE, image=None if index else image(), state=state))
        state = made[-1].settle()
    return made


# ---------------------------------------------------------------------------------------------------- encoder


def test_block_by_block_is_the_whole_clip() -> None:
    clip = torch.zeros(1, 3, 1 + 4 * (3 * BLOCKS - 1), SIDE, SIDE)
    clip[:, :, 0] = image()
    whole = tiny_vae().encode(clip).latent_dist.mode()
    mean, std = (torch.tensor(getattr(tiny_vae().config, name)).view(1, -1, 1, 1, 1) for name in MOMENTS)

    streamed = torch.cat([block.condition for block in encode(encoder(), BLOCKS)], dim=2)

    torch.testing.assert_close(streamed[:, 4:], (whole - mean) / std, rtol=1e-6, atol=1e-6)
    mask = torch.zeros(1, 4, 3 * BLOCKS, 2, 2)
    mask[:, :, 0] = 1
    assert torch.equal(streamed[:, :4], mask)


def test_each_block_is_three_calls_of_one_or_four_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    vae = AutoencoderKLWan.from_config(VAE_CONFIG).eval()
    run = vae.encoder.forward
    monkeypatch.setattr(
        vae.encoder, "forward", lambda x, **options: calls.append(x.shape[2]) or run(x, **options)
    )

    encode(encoder(vae), 2)

    assert calls == [1] + [4] * 5


def test_histories_are_replaced_and_never_written_into() -> None:
    streaming = encoder()
    state = encode(streaming, 1)[0].settle()
    before = [slot.clone() for slot in state.history if isinstance(slot, torch.Tensor)]

    first = streaming.encode(3, SIDE, SIDE, state=state)
    again = streaming.encode(3, SIDE, SIDE, state=state)

    kept = [slot for slot in state.history if isinstance(slot, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    assert torch.equal(first.condition, again.condition)


def test_the_vae_keeps_nothing_of_a_session() -> None:
    vae = AutoencoderKLWan.from_config(VAE_CONFIG).eval()
    vae.clear_cache()

    encode(encoder(vae), 2)
    streaming = StreamingDecoder(vae)
    streaming.decode(streaming.begin("s"), latents(3))

    assert [slot for slot in (*vae._enc_feat_map, *vae._feat_map) if slot is not None] == []


def test_a_history_holds_what_a_session_is_charged_for() -> None:
    charged = owned_bytes(SIDE, SIDE, vae=TINY_VAE, itemsize=4)
    streaming = StreamingDecoder(tiny_vae())
    state = streaming.begin("s")
    sizes = []
    for _ in range(3):
        streaming.decode(state, latents(3))
        sizes.append(state.nbytes)

    encoded = [block.settle().nbytes for block in encode(encoder(), 3)]

    assert encoded == [charged.encoder_histories // 2] * 3 == [7216 * 4] * 3
    assert sizes == [charged.decoder_history] * 3 == [12_000 * 4] * 3


def test_the_published_vae_keeps_the_published_bytes() -> None:
    """At full size without memory: only shapes are computed."""
    with torch.device("meta"):
        vae = AutoencoderKLWan().to(torch.bfloat16)
        seen: list[Slot] = [None] * causal_convolutions(vae.encoder)
        made: list[Slot] = [None] * causal_convolutions(vae.decoder)
        for frames in (1, 4, 4):
            pixels = torch.empty(1, 3, frames, 480, 832, dtype=torch.bfloat16)
            latent = vae.encoder(pixels, feat_cache=seen, feat_idx=[0])
            pictures = vae.decoder(latent[:, :16], feat_cache=made, feat_idx=[0], first_chunk=frames == 1)
            assert tuple(pictures.shape) == (1, 3, frames, 480, 832)

    charged = owned_bytes(480, 832)
    assert (len(seen), len(made)) == (26, 33)
    assert sum(slot is not None for slot in seen) == 24
    assert sum(slot is not None for slot in made) == 32
    assert history_bytes(seen) == charged.encoder_histories // 2 == 1_121_402_880
    assert history_bytes(made) == charged.decoder_history == 1_888_573_440


@pytest.mark.parametrize(
    ("before", "after", "at_rest"),
    [
        (1.0, 1.0, True),
        (1.0, 1 + 2**-23, False),
        (0.0, 1e-45, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
    ],
)
def test_a_history_rests_when_no_bit_of_it_changes(
    before: float, after: float, at_rest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = encoder()
    history = list(encode(streaming, 1)[0].history)
    first = next(index for index, slot in enumerate(history) if isinstance(slot, torch.Tensor))

    def with_first(value: float) -> torch.Tensor:
        slot = history[first]
        assert isinstance(slot, torch.Tensor)
        changed = slot.clone()
        changed.view(-1)[3] = value
        return changed

    def call(_frames: torch.Tensor, seen: list[Slot]) -> torch.Tensor:
        seen[first] = with_first(after)
        return torch.zeros(1, 32, 1, 2, 2)

    monkeypatch.setattr(streaming, "_call", call)
    state = EncoderState((*history[:first], with_first(before), *history[first + 1 :]))

    assert (streaming.encode(3, SIDE, SIDE, state=state).settle().condition is not None) == at_rest


def test_the_encoder_rests_once_its_history_does_and_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = AutoencoderKLWan.from_config(VAE_CONFIG).eval()
    vae.load_state_dict(tiny_vae().state_dict())
    blocks = encode(encoder(vae), 40)
    at_rest = [block.settle().condition is not None for block in blocks]
    assert True in at_rest, "the image never passes through"
    resting = at_rest.index(True)
    assert resting > 0
    assert all(at_rest[resting:])

    state = blocks[resting].settle()
    honest = EncoderState(state.history)
    encoded = encoder(vae).encode(3 * (resting + 1), SIDE, SIDE, state=honest)
    assert torch.equal(encoded.condition, blocks[resting].condition)
    monkeypatch.setattr(vae.encoder, "forward", None)  # any further call would fail
    skipped = encoder(vae).encode(3 * (resting + 1), SIDE, SIDE, state=state)
    assert torch.equal(skipped.condition, encoded.condition)
    assert skipped.settle().nbytes == state.nbytes


@pytest.mark.parametrize(
    ("start", "options", "field"),
    [
        pytest.param(0, {"state": "fresh"}, "history", id="a history at the beginning"),
        pytest.param(3, {}, "history", id="none later"),
        pytest.param(3, {"state": EncoderState((None,))}, "history", id="of another encoder"),
        pytest.param(0, {}, "image", id="no image"),
        pytest.param(0, {"image": image(width=32)}, "image", id="an image of another size"),
    ],
)
def test_the_encoder_refuses(start: int, options: dict[str, Any], field: str) -> None:
    streaming = encoder()
    if options.get("state") == "fresh":
        options = {"state": encode(streaming, 1)[0].settle()}
    with pytest.raises(InvalidArgumentError) as caught:
        streaming.encode(start, SIDE, SIDE, **options)
    assert caught.value.field == field


def test_neither_patches_nor_tiles_can_stream() -> None:
    patched = AutoencoderKLWan.from_config(VAE_CONFIG | {"patch_size": 2, "in_channels": 12})
    with pytest.raises(ConfigurationError, match="patch_size"):
        encoder(patched)
    with pytest.raises(ConfigurationError, match="patch_size"):
        StreamingDecoder(patched)
    tiling = AutoencoderKLWan.from_config(VAE_CONFIG).eval()
    tiling.enable_tiling(tile_sample_min_height=SIDE, tile_sample_min_width=SIDE)
    encoder(tiling).encode(0, SIDE, SIDE, image=image())  # no larger than a tile
    with pytest.raises(ConfigurationError, match="tiles"):
        encoder(tiling).encode(0, SIDE, 2 * SIDE, image=image(width=2 * SIDE))


@pytest.mark.parametrize("make", [StreamingDecoder, encoder])
def test_another_vae_is_refused(make: Any) -> None:
    with pytest.raises(InvalidTypeError, match="AutoencoderKLWan"):
        make(torch.nn.Identity())


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_dim", 8), ("dim_mult", [1, 2, 4, 4]), ("is_residual", True), ("patch_size", 2), ("z_dim", 48)],
)
def test_another_layout_is_refused_by_name(name: str, value: object) -> None:
    check_vae_config(VAE_CONFIG, TINY_VAE)
    with pytest.raises(ConfigurationError) as caught:
        check_vae_config(VAE_CONFIG | {name: value}, TINY_VAE)
    assert caught.value.field == name


# ---------------------------------------------------------------------------------------------------- decoder


@pytest.mark.parametrize("cuts", [(3, 3, 3), (1, 1, 1, 1, 1), (2, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clip_in_parts_is_the_clip_bit_by_bit(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    streaming = StreamingDecoder(tiny_vae(dtype))
    clip = latents(sum(cuts))
    whole = streaming.decode(streaming.begin("whole"), clip)
    state = streaming.begin("parts")

    parts = [streaming.decode(state, part) for part in clip.split(list(cuts), dim=2)]

    assert torch.equal(torch.cat(parts, dim=2), whole)
    assert [part.shape[2] for part in parts] == [4 * n - 3 * (i == 0) for i, n in enumerate(cuts)]
    assert whole.abs().max() <= 1


def test_streaming_is_what_the_vae_decodes() -> None:
    streaming = StreamingDecoder(tiny_vae())
    clip = latents(6)
    mean, std = (torch.tensor(getattr(tiny_vae().config, name)).view(1, -1, 1, 1, 1) for name in MOMENTS)

    torch.testing.assert_close(
        streaming.decode(streaming.begin("s"), clip),
        tiny_vae().decode(clip * std + mean).sample,
        rtol=0,
        atol=1e-4,  # it projects the whole clip by another kernel
    )


def test_only_the_first_latent_frame_of_a_session_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    vae = AutoencoderKLWan.from_config(VAE_CONFIG).eval()
    run = vae.decoder.forward
    monkeypatch.setattr(
        vae.decoder, "forward", lambda x, **options: flags.append(options["first_chunk"]) or run(x, **options)
    )
    streaming = StreamingDecoder(vae)
    state = streaming.begin("s")

    shapes = [tuple(to_uint8(streaming.decode(state, latents(3))).shape) for _ in range(2)]

    assert shapes == [(9, SIDE, SIDE, 3), (12, SIDE, SIDE, 3)]
    assert flags == [True] + [False] * 5


def test_sessions_that_take_turns_decode_as_if_alone() -> None:
    streaming = StreamingDecoder(tiny_vae())
    clips = {"a": latents(6, 1), "b": latents(6, 2)}
    alone = {name: streaming.decode(streaming.begin(name), clip) for name, clip in clips.items()}
    states = {name: streaming.begin(name) for name in clips}

    turns = [
        (name, streaming.decode(states[name], clips[name][:, :, 3 * turn : 3 * turn + 3]))
        for turn in range(2)
        for name in clips
    ]

    for name in clips:
        assert torch.equal(torch.cat([part for owner, part in turns if owner == name], dim=2), alone[name])


def test_a_tiling_vae_decodes_chunks_on_their_own() -> None:
    vae = AutoencoderKLWan.from_config(VAE_CONFIG).eval()
    vae.enable_tiling(*([SIDE] * 4))
    streaming = StreamingDecoder(vae)
    state, small = streaming.begin("large"), streaming.begin("small")
    large = torch.randn(1, 16, 3, 4, 4, generator=seeded())

    assert [streaming.decode(state, large).shape[2] for _ in range(2)] == [9, 9]
    assert [streaming.decode(small, latents(3)).shape[2] for _ in range(2)] == [9, 12]


@pytest.mark.parametrize(
    ("state", "given", "text"),
    [
        (DecoderState("s", 3), latents(3), "does not belong to this decoder"),
        (None, latents(3)[:, :, :0], "must have frames"),
        (None, latents(3).repeat(2, 1, 1, 1, 1), "one sample per session state"),
    ],
)
def test_the_decoder_refuses(state: DecoderState | None, given: torch.Tensor, text: str) -> None:
    streaming = StreamingDecoder(tiny_vae())
    with pytest.raises(InvalidArgumentError, match=text):
        streaming.decode(streaming.begin("s") if state is None else state, given)
    with pytest.raises(InvalidArgumentError, match="session_id"):
        streaming.begin(" ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_have_the_bytes_of_the_image_processor(dtype: torch.dtype) -> None:
    from diffusers.image_processor import VaeImageProcessor

    pictures = (torch.rand(1, 3, 2, 40, 40, generator=seeded()) * 2.4 - 1.2).clamp(-1, 1).to(dtype)
    ours = to_uint8(pictures).numpy()

    theirs: list[Image.Image] = VaeImageProcessor().postprocess(
        pictures[0].transpose(0, 1), output_type="pil"
    )

    assert ours.dtype == np.uint8
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(ours, theirs, strict=True))
