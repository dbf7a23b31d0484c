"""What goes wrong: a chunk that fails leaves the world as it was, and a deployment that can't work does not start."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.errors import ConfigurationError, InvalidArgumentError, KVStateError, ModelError
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.models.lingbot_world.spec import BRANCH, TEXT
from gpu_worker.models.lingbot_world.transformer import UnknownWeightError
from support.kv_cache import CPU, make_state
from support.lingbot_checkpoint import change_json, write_checkpoint, write_shards
from support.lingbot_model import random_weights, seeded, tiny_model
from support.lingbot_worlds import (
    FORWARD,
    TOPOLOGY,
    Worlds,
    held,
    picture,
    shared_checkpoint,
    tiny_pipeline,
    trajectory,
)

SCRIPT = [[["w"], ["w"], []]]


class Broken(Exception):
    pass


def broken(*_: Any, **__: Any) -> Any:
    raise Broken


class Bare:
    """A pipeline without a runner, which would release a session that fails."""

    def __init__(self) -> None:
        self.worlds = Worlds()
        self.pipeline = self.worlds.pipeline
        self.state = make_state(self.pipeline.ar_diffusion_kv_cache_spec(), "w")
        self.generator = seeded(1)

    def tick(self, index: int, **changes: Any) -> torch.Tensor:
        request = self.worlds.request("w", chunk_index=index, **changes)
        request = ARDiffusionRequest(
            request.prompt, request.images, request.tick, request.params, self.generator
        )
        with self.state.lend(), self.pipeline.bind_ar_diffusion_state("w", self.state):
            latents: torch.Tensor = self.pipeline.forward(request).payload["latents"]
        return latents

    def traces(self) -> tuple[Any, ...]:
        """What a failure must leave alone."""
        return (
            self.pipeline._worlds.get("w"),
            self.generator.get_state().tolist(),
            self.state.adapter(BRANCH).absolute_frames,
        )


@contextmanager
def breaking(owner: Any, name: str, after: int = 0) -> Any:
    """Calls of a method fail, the first `after` excepted."""
    with pytest.MonkeyPatch.context() as patch:
        run, calls = getattr(owner, name), []

        def sometimes(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return run(*arguments, **options) if len(calls) <= after else broken()

        patch.setattr(owner, name, sometimes)
        yield


@pytest.mark.parametrize(
    ("part", "name", "after"),
    [
        ("_text", "__call__", 0),
        ("_encoder", "_call", 1),
        ("_transformer", "prepare_chunk", 0),
        ("_transformer", "forward", 0),
        ("_transformer", "forward", 2),
    ],
)
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_chunk_that_fails_can_be_made_again(part: str, name: str, after: int, chunk: int) -> None:
    bare, untouched = Bare(), Bare()
    for index in range(chunk):
        bare.tick(index)
        untouched.tick(index)
    before = bare.traces()
    owner = type(getattr(bare.pipeline, part)) if name == "__call__" else getattr(bare.pipeline, part)

    with breaking(owner, name, after), pytest.raises(Broken):
        bare.tick(chunk, prompt="snow falls")
    assert bare.traces() == before

    assert torch.equal(bare.tick(chunk), untouched.tick(chunk))


def test_a_last_pass_that_fails_moves_nothing_but_its_pages_are_for_nobody() -> None:
    bare = Bare()
    bare.tick(0)
    before = bare.traces()

    with breaking(bare.pipeline._transformer, "forward", 4), pytest.raises(Broken):
        bare.tick(1)

    assert bare.traces() == before
    with pytest.raises(KVStateError, match="a commit that did not happen"):
        bare.tick(1)


def test_pictures_that_fail_leave_index_camera_and_generator_but_no_decoder() -> None:
    bare = Bare()
    bare.tick(0)
    world, random, _ = bare.traces()

    with breaking(bare.pipeline._decoder, "_frame", 1), pytest.raises(Broken):
        bare.tick(1)

    assert bare.traces()[:2] == (world, random)
    assert bare.pipeline._decoded == {}


def test_a_lost_decoder_history_is_told() -> None:
    bare = Bare()
    bare.tick(0)
    bare.pipeline._decoded.clear()
    with pytest.raises(ModelError, match="reset it"):
        bare.tick(1)


def test_pictures_after_a_chunk_without_them_are_refused() -> None:
    bare = Bare()
    bare.tick(0)
    bare.tick(1, params={"output_type": "latent"})
    with pytest.raises(ModelError, match="lost this world's history"):
        bare.tick(2)


def test_a_prompt_that_could_not_be_built_is_built_again() -> None:
    bare, untouched = Bare(), Bare()
    for world in (bare, untouched):
        world.tick(0)
    with breaking(bare.pipeline._transformer, "text_kv"), pytest.raises(Broken):
        bare.tick(1, prompt="snow falls")
    with bare.state.lend():
        assert not bare.state.is_cross_attention_populated(BRANCH, TEXT)

    assert torch.equal(bare.tick(1), untouched.tick(1))


@pytest.mark.parametrize("field", ["latents", "frames"])
def test_what_is_not_finite_is_no_chunk(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = Worlds()
    weight = {
        "latents": worlds.pipeline._transformer.head.head.bias,
        "frames": worlds.pipeline._decoder._vae.decoder.conv_out.bias,
    }[field]
    weight.fill_(torch.nan)

    with pytest.raises(ModelError, match="not finite") as caught:
        worlds.tick()

    assert caught.value.field == field
    assert not worlds.runner.is_resident("w")


@pytest.mark.parametrize("field", ["latents", "frames"])
def test_a_chunk_that_is_not_finite_leaves_index_camera_encoder_and_generator(field: str) -> None:
    bare = Bare()
    bare.tick(0)
    world, random, _ = bare.traces()
    owner, name = {
        "latents": (bare.pipeline._transformer, "forward"),
        "frames": (bare.pipeline._decoder, "_frame"),
    }[field]
    run = getattr(owner, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments, **options: run(*arguments, **options) * torch.nan)
        with pytest.raises(ModelError, match="not finite") as caught:
            bare.tick(1)

    assert caught.value.field == field
    assert bare.traces()[:2] == (world, random)
    assert bare.pipeline._decoded == {}


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"control": None}, "controls"),
        ({"control": held("w")}, "frames"),
        ({"control": trajectory([torch.eye(4)] * 3, [torch.ones(4)] * 3)}, "poses"),
        ({"control": trajectory([torch.eye(4)] * 9, [torch.zeros(4)] * 9)}, "intrinsics"),
        ({"prompt": None}, "prompt"),
        ({"images": ()}, "images"),
        ({"images": (b"no picture",)}, "images"),
        ({"images": ([picture()],)}, "images"),
        ({"params": {"output_type": "pil"}}, "output_type"),
        ({"params": {"num_frames": 129}}, "num_frames"),
        ({"params": {"camera_action_script": SCRIPT}}, "camera_action_script"),
        ({"params": {"flow_shift": 0}}, "flow_shift"),
    ],
)
def test_a_request_that_can_not_be_followed_fails_alone(changes: dict[str, Any], field: str) -> None:
    worlds, alone = Worlds(), Worlds()
    for world in (worlds, alone):
        world.tick("neighbour", seed=2)

    with pytest.raises(InvalidArgumentError) as caught:
        worlds.tick("bad", **changes)

    assert caught.value.field == field
    assert worlds.runner.session_ids == ("neighbour",)
    assert torch.equal(worlds.latents("neighbour"), alone.latents("neighbour"))


def test_chunks_come_in_order() -> None:
    worlds = Worlds()
    worlds.tick()
    with pytest.raises(InvalidArgumentError, match="must be contiguous") as caught:
        worlds.tick(chunk_index=2)
    assert caught.value.field == "chunk_index"


def test_ticks_need_the_state_of_their_own_session() -> None:
    worlds = Worlds()
    pipeline, spec = worlds.pipeline, worlds.runner.spec
    state: ARDiffusionKVState = make_state(spec, "w")
    request = worlds.request()
    with pytest.raises(KVStateError, match="no session is bound"):
        pipeline.forward(request)
    with (
        pytest.raises(InvalidArgumentError, match="can't be bound"),
        pipeline.bind_ar_diffusion_state("x", state),
    ):
        pass
    with pipeline.bind_ar_diffusion_state("w", state):
        with pytest.raises(KVStateError, match="still bound"), pipeline.bind_ar_diffusion_state("w", state):
            pass
        with pytest.raises(InvalidArgumentError) as caught:
            pipeline.forward(ARDiffusionRequest(prompt="rain", images=(picture(),), generator=seeded()))
        assert caught.value.field == "tick"
        other = worlds.request("other")
        with pytest.raises(InvalidArgumentError) as caught:
            pipeline.forward(ARDiffusionRequest(other.prompt, other.images, other.tick, generator=seeded()))
        assert caught.value.field == "session_id"


def test_trajectory_directories_need_a_root(tmp_path: Path) -> None:
    worlds = Worlds()
    request = ARDiffusionRequest(
        prompt="rain", images=(picture(),), generator=seeded(), extra_args={"action_path": str(tmp_path)}
    )
    state = make_state(worlds.runner.spec, "w")
    with worlds.pipeline.bind_ar_diffusion_state("w", state), pytest.raises(ConfigurationError) as caught:
        worlds.pipeline.prepare_encode(request)
    assert caught.value.field == "lingbot_action_root"


# ---------------------------------------------------------------------------------------------------- deployment


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def spoil_transformer_config(folder: Path) -> None:
    change_json(folder / "transformer" / "config.json", sink_size=3)


def spoil_vae_config(folder: Path) -> None:
    change_json(folder / "vae" / "config.json", dim_mult=[1, 2, 4, 4])


def spoil_scheduler_config(folder: Path) -> None:
    change_json(folder / "scheduler" / "scheduler_config.json", prediction_type="epsilon")


def spoil_latents_std(folder: Path) -> None:
    change_json(folder / "vae" / "config.json", latents_std=[0.0] * 16)


def rename_weight(folder: Path) -> None:
    weights = random_weights(tiny_model())
    weights["blocks.0.extra"] = weights.pop("blocks.0.modulation")
    write_shards(folder / "transformer", "diffusion_pytorch_model", weights, 2)


def drop_weight(folder: Path) -> None:
    weights = random_weights(tiny_model())
    del weights["blocks.1.modulation"]
    write_shards(folder / "transformer", "diffusion_pytorch_model", weights, 2)


def changed(file: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        change_json(folder / file, **changes)

    return spoil


def lose_tokens(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def quantise(kind: torch.dtype) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = random_weights(tiny_model())
        weights["head.head.weight"] = weights["head.head.weight"].to(kind)
        write_shards(folder / "transformer", "diffusion_pytorch_model", weights, 2)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (changed("vae/config.json", _class_name="AutoencoderKL"), "_class_name"),
        (changed("vae/config.json", latents_mean="none"), "latents_mean"),
        (changed("vae/config.json", latents_mean=None), "latents_mean"),
        (changed("vae/config.json", latents_std=["1.0"] * 16), "latents_std"),
        (changed("vae/config.json", latents_std=[1.0] * 15), "latents_std"),
        (changed("vae/config.json", latents_std=[10**400] * 16), "latents_std"),
        (changed("text_encoder/config.json", d_model=12), "d_model"),
        (changed("text_encoder/config.json", num_layers="two"), "text_encoder/config.json"),
        (changed("text_encoder/config.json", feed_forward_proj="dance"), "text_encoder/config.json"),
        (changed("text_encoder/config.json", vocab_size=-1), "text_encoder/config.json"),
        (lose_tokens, "tokenizer"),
        (quantise(torch.int8), "head.head.weight"),
        (quantise(torch.float8_e4m3fn), "head.head.weight"),
        (quantise(torch.complex64), "head.head.weight"),
        (spoil_transformer_config, "sink_size"),
        (spoil_vae_config, "dim_mult"),
        (spoil_scheduler_config, "prediction_type"),
        (spoil_latents_std, "latents_std"),
        (rename_weight, "blocks.0.extra"),
        (drop_weight, "blocks.1.modulation"),
    ],
)
def test_another_checkpoint_is_refused_by_name(
    written: Path, tmp_path: Path, spoil: Callable[[Path], None], field: str
) -> None:
    folder = shutil.copytree(written, tmp_path / "copy")
    spoil(folder)

    with pytest.raises(ConfigurationError) as caught:
        tiny_pipeline(folder)

    assert caught.value.field == field
    assert isinstance(caught.value, UnknownWeightError) == (field == "blocks.0.extra")
    assert str(tmp_path) not in caught.value.message


def test_the_published_topology_is_asked_for_unless_told_otherwise(written: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LingBotWorldPipeline(device=CPU, dtype=torch.float32, config={"checkpoint": str(written)})
    assert caught.value.field == "base_dim"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "checkpoint"),
        ({"checkpoint": "x", "flow_shift": -1}, "flow_shift"),
        ({"checkpoint": "x", "lingbot_action_root": 7}, "lingbot_action_root"),
        ({"checkpoint": "x", "lingbot_action_root": "/nowhere/at/all"}, "lingbot_action_root"),
        ({"checkpoint": "x", "ar_diffusion_height": 100}, "ar_diffusion_height"),
        ({"checkpoint": "x", "ulysses_degree": 2}, "ulysses_degree"),
        ({"checkpoint": "x", "colour": "red"}, "colour"),
    ],
)
def test_settings_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LingBotWorldPipeline(device=CPU, dtype=torch.float32, config=config)
    assert caught.value.field == field


class Shared:
    """What the pipeline looks at of several ranks before it loads anything."""

    def __init__(self, degree: int) -> None:
        self.degree, self.rank = degree, 0


@pytest.mark.parametrize(
    ("degree", "said"), [(3, "the 2 heads must be divisible"), (4, "the 2 heads must be divisible")]
)
def test_ranks_that_cannot_share_the_heads_are_refused_before_anything_is_loaded(
    degree: int, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        LingBotWorldPipeline(
            device=CPU,
            dtype=torch.float32,
            config={"checkpoint": "/nowhere/at/all", "ar_diffusion_height": 32, "ar_diffusion_width": 48},
            topology=TOPOLOGY,
            parallel=Shared(degree),  # type: ignore[arg-type]
        )
    assert caught.value.field == "ulysses_degree"


def test_a_rank_s_spec_is_that_of_the_plan() -> None:
    pipeline = LingBotWorldPipeline(
        device=CPU,
        dtype=torch.float32,
        config={
            "checkpoint": str(shared_checkpoint()),
            "ar_diffusion_height": 32,
            "ar_diffusion_width": 48,
        },
        topology=TOPOLOGY,
        parallel=Shared(2),  # type: ignore[arg-type]
    )

    spec, alone = pipeline.ar_diffusion_kv_cache_spec(), tiny_pipeline().ar_diffusion_kv_cache_spec()
    assert (spec.num_kv_heads, alone.num_kv_heads) == (1, 2)
    # 2 layers, affines of scale and shift, 18 tokens, 24 channels of float32; half of it is the other rank's.
    less = alone.model_owned_state_bytes_per_session - spec.model_owned_state_bytes_per_session
    assert less == 2 * 2 * 9 * 24 * 4


def test_half_precision_makes_finite_chunks() -> None:
    pipeline = tiny_pipeline(dtype=torch.bfloat16)
    state = make_state(pipeline.ar_diffusion_kv_cache_spec(), "w")
    worlds, generator = Worlds(), seeded()
    frames = []
    for index in range(2):
        request = worlds.request(chunk_index=index, control=FORWARD)
        request = ARDiffusionRequest(request.prompt, request.images, request.tick, generator=generator)
        with state.lend(), pipeline.bind_ar_diffusion_state("w", state):
            output = pipeline.forward(request)
        frames.append(output.frames.shape[0])
        assert output.payload["latents"].dtype == torch.float32
    assert frames == [9, 12]
