"""The whole pipeline over a tiny checkpoint: ticks against the offline rollout, sessions apart, stepwise."""

import socket
from typing import Any

import pytest
import torch

from contracts.errors import InvalidArgumentError
from contracts.tick import metadata_from_envelope
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest
from gpu_worker.models.lingbot_world.camera import CameraTail, PictureSize, tick_camera, trajectory_camera
from gpu_worker.models.lingbot_world.contiguous import ContiguousKV
from gpu_worker.models.lingbot_world.images import first_image
from gpu_worker.models.lingbot_world.passes import ContiguousFlow, rollout
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.models.lingbot_world.schedule import DMDSchedule
from gpu_worker.models.lingbot_world.spec import BRANCH, owned_bytes
from gpu_worker.models.lingbot_world.trajectories import load_trajectory
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot
from gpu_worker.stepwise import StepRequest, StepSchedule
from support.kv_cache import CPU
from support.lingbot_checkpoint import TINY_VAE, tiny_vae
from support.lingbot_examples import examples_root
from support.lingbot_model import HEIGHT, TINY, WIDTH, seeded
from support.lingbot_worlds import FORWARD, Worlds, held, picture, tiny_pipeline

PROMPT = "rain over the valley"
CONTROLS = [
    FORWARD,
    held("wl", "l", ""),
    held("d", "di", "i"),
    held("", "", ""),
    FORWARD,
    held("s", "j", "k"),
]
CONTROLS += [FORWARD, FORWARD]
SIZE = PictureSize(HEIGHT, WIDTH)


def camera_of_ticks(chunks: int) -> torch.Tensor:
    """[1, 384, 3 * chunks, h, w]."""
    cameras, tail = [], CameraTail()
    for control in CONTROLS[:chunks]:
        camera, tail = tick_camera([control], tail, SIZE, device=CPU, dtype=torch.float32)
        cameras.append(camera)
    return torch.cat(cameras, dim=2)


def offline(camera: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """The same world without runner, pages, streaming or sessions: [1, 16, 3 * chunks, h, w]."""
    pipeline, chunks = tiny_pipeline(), camera.shape[2] // 3
    model = pipeline._transformer
    clip = torch.zeros(1, 3, 12 * chunks - 3, HEIGHT, WIDTH)
    clip[:, :, 0] = first_image(picture(), HEIGHT, WIDTH)
    vae = tiny_vae()
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    image = (vae.encode(clip).latent_dist.mode() - mean) / std
    mask = torch.zeros(1, 4, *image.shape[2:])
    mask[:, :, 0] = 1
    kv = ContiguousKV(TINY.num_layers, 6, sink_frames=9, visible_frames=18)
    text = list(model.text_kv(pipeline._text(PROMPT)))
    return rollout(
        model,
        lambda chunk: ContiguousFlow(model, kv, chunk, text),
        camera=camera,
        condition=torch.cat((mask, image), dim=1),
        schedule=DMDSchedule.of(5.0),
        generator=seeded(seed),
    )


def test_ticks_are_the_offline_rollout() -> None:
    worlds = Worlds()

    ticked = torch.cat([worlds.latents("w", PROMPT, control) for control in CONTROLS], dim=2)

    torch.testing.assert_close(ticked, offline(camera_of_ticks(len(CONTROLS))), rtol=1e-5, atol=1e-5)


def test_a_chunk_is_latents_pictures_and_the_identity_of_its_tick() -> None:
    worlds = Worlds()

    outputs = [worlds.tick() for _ in range(2)]

    assert [tuple(output.frames.shape) for output in outputs] == [
        (9, HEIGHT, WIDTH, 3),
        (12, HEIGHT, WIDTH, 3),
    ]
    for index, output in enumerate(outputs):
        latents = output.payload["latents"]
        assert (latents.dtype, tuple(latents.shape)) == (torch.float32, (1, 16, 3, 4, 6))
        assert bool(latents.isfinite().all())
        assert output.frames.dtype == torch.uint8
        metadata = metadata_from_envelope(output.metadata)
        assert (metadata.session_id, metadata.request_id, metadata.chunk_index) == ("w", f"w-{index}", index)


def test_nothing_is_fetched_from_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody asks the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket, "create_connection", refused)

    assert Worlds().tick().frames is not None


def test_latents_alone_need_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, decoding = Worlds(), Worlds()
    monkeypatch.setattr(worlds.pipeline._decoder, "decode", None)

    latents = [worlds.tick(params={"output_type": "latent"}) for _ in range(2)]

    assert [output.frames for output in latents] == [None, None]
    assert all(torch.equal(output.payload["latents"], decoding.latents()) for output in latents)


def test_sessions_that_take_turns_are_as_if_alone() -> None:
    scripts = {"a": ("snow falls", 3, 5), "b": ("a river", 4, 6)}
    alone: dict[str, list[Any]] = {}
    for name, (prompt, seed, image) in scripts.items():
        single = Worlds()
        alone[name] = [
            single.tick(name, prompt, control, seed=seed, images=(picture(image),))
            for control in CONTROLS[:4]
        ]

    together = Worlds()
    for index, control in enumerate(CONTROLS[:4]):
        for name, (prompt, seed, image) in scripts.items():
            output = together.tick(name, prompt, control, seed=seed, images=(picture(image),))
            assert torch.equal(output.payload["latents"], alone[name][index].payload["latents"])
            assert torch.equal(output.frames, alone[name][index].frames)


def test_every_input_matters() -> None:
    def second(**changes: Any) -> torch.Tensor:
        worlds = Worlds()
        worlds.tick(**changes)
        return worlds.latents(**changes)

    plain = second()
    changes: list[dict[str, Any]] = [
        {"prompt": "snow"},
        {"control": held("s", "s", "s")},
        {"images": (picture(9),)},
        {"params": {"flow_shift": 2.5}},
        {"params": {"lingbot_reuse_last_step_kv": True}},
        {"seed": 2},
    ]
    assert torch.equal(plain, second())
    for change in changes:
        assert not torch.equal(plain, second(**change)), change


def test_the_deployment_s_shift_is_that_of_requests_that_name_none() -> None:
    deployed, asked = Worlds(flow_shift=2.5), Worlds()

    assert torch.equal(deployed.latents(), asked.latents(params={"flow_shift": 2.5}))
    assert torch.equal(deployed.latents("x", params={"flow_shift": 5}), asked.latents("x"))


# ---------------------------------------------------------------------------------------------------- passes


class Trace:
    """Calls of the transformer: timestep, start frame, committed frames behind it."""

    def __init__(self, pipeline: LingBotWorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[float, int, int]] = []
        run = pipeline._transformer.forward

        def traced(latents: torch.Tensor, timestep: float, **options: Any) -> torch.Tensor:
            assert pipeline._kv is not None
            committed = pipeline._kv.adapter(BRANCH).absolute_frames
            self.calls.append((round(timestep, 3), options["chunk"].start_frame, committed))
            return run(latents, timestep, **options)

        monkeypatch.setattr(pipeline._transformer, "forward", traced)


def test_a_chunk_is_four_probes_and_one_pass_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = Worlds()
    trace = Trace(worlds.pipeline, monkeypatch)

    for _ in range(3):
        worlds.tick()

    steps = [1000.0, 937.5, 833.333, 625.0, 0.0]
    assert trace.calls == [(step, start, start) for start in (0, 3, 6) for step in steps]


def test_the_last_probe_may_stay_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = Worlds()
    trace = Trace(worlds.pipeline, monkeypatch)

    for _ in range(2):
        worlds.tick(params={"lingbot_reuse_last_step_kv": True})

    assert [(start, committed) for _, start, committed in trace.calls] == [(0, 0)] * 4 + [(3, 3)] * 4


def test_a_prompt_is_projected_when_it_changes_and_the_past_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, same = Worlds(), Worlds()
    projected: list[int] = []
    model = worlds.pipeline._transformer
    project = model.text_kv
    monkeypatch.setattr(
        model, "text_kv", lambda text: projected.append(worlds._next.get("w", 0)) or project(text)
    )

    prompts = [PROMPT, f"  {PROMPT}\n", "snow falls", "snow falls"]
    switched = [worlds.latents("w", prompt) for prompt in prompts]
    kept = [same.latents("w", PROMPT) for _ in prompts]

    assert projected == [0, 2]
    assert [torch.equal(a, b) for a, b in zip(switched, kept, strict=True)] == [True, True, False, False]


# ---------------------------------------------------------------------------------------------------- stepwise


def test_step_by_step_is_tick_by_tick() -> None:
    ticks, stepped = Worlds(), Worlds(stepped=True)

    for control in CONTROLS[:4]:
        whole, steps = (worlds.tick("w", PROMPT, control) for worlds in (ticks, stepped))
        assert torch.equal(whole.payload["latents"], steps.payload["latents"])
        assert torch.equal(whole.frames, steps.frames)


def clip(worlds: Worlds, params: dict[str, Any] | None = None, **extra_args: Any) -> list[Any]:
    """The chunks of a request without ticks, one cycle after the other."""
    request = ARDiffusionRequest(
        prompt=PROMPT, images=(picture(),), params=params or {}, extra_args=extra_args
    )
    outputs, finished = [], False
    while not finished:
        first = StepRequest("w", request if not outputs else None, seed=1)
        result = worlds.runner.execute_stepwise(StepSchedule((first,)))
        assert result is not None
        finished = result.finished
        if result.output is not None:
            outputs.append(result.output)
    return outputs


def test_a_script_is_the_ticks_that_hold_the_same_keys() -> None:
    worlds, ticks = Worlds(), Worlds()

    chunks = clip(worlds, camera_action_script=[[["w"]] * 3] * 3)

    # One speed all the way: scaled as a whole or chunk by chunk is the same.
    expected = [ticks.tick() for _ in range(3)]
    assert len(chunks) == 3
    for made, tick in zip(chunks, expected, strict=True):
        torch.testing.assert_close(made.payload["latents"], tick.payload["latents"], rtol=1e-5, atol=1e-5)
        assert made.frames.shape == tick.frames.shape
    assert worlds.pipeline._worlds == {}, "a finished request leaves nothing"


def test_a_real_trajectory_is_embedded_as_a_whole_and_walked_chunk_by_chunk() -> None:
    root = examples_root()
    worlds = Worlds(lingbot_action_root=str(root))

    chunks = clip(worlds, {"num_frames": 45}, action_path="00")

    path = load_trajectory("00", TrustedRoot(root))
    camera = trajectory_camera(path, 45, SIZE, device=CPU, dtype=torch.float32)
    made = torch.cat([chunk.payload["latents"] for chunk in chunks], dim=2)
    torch.testing.assert_close(made, offline(camera), rtol=1e-5, atol=1e-5)
    assert [chunk.frames.shape[0] for chunk in chunks] == [9, 12, 12, 12]


# ---------------------------------------------------------------------------------------------------- owned memory


def test_a_session_owns_what_it_is_charged_for() -> None:
    worlds = Worlds()
    pipeline = worlds.pipeline
    worlds.tick()
    seen: list[dict[str, int]] = []

    def weigh(state: Any, prediction: torch.Tensor) -> None:
        step(state, prediction)
        chunk, world = state.current, pipeline._worlds["w"]
        histories = world.encoder.nbytes + sum(
            slot.nbytes for slot in chunk.encoded.history if isinstance(slot, torch.Tensor)
        )
        seen.append(
            {
                "condition": chunk.encoded.condition.nbytes,
                "camera_modulation": chunk.inputs.camera_bytes,
                "encoder_histories": histories,
                "decoder_history": pipeline._decoded["w"].nbytes,
            }
        )

    step = pipeline.step_scheduler
    pipeline.step_scheduler = weigh  # type: ignore[method-assign]
    worlds.tick()

    charged = owned_bytes(HEIGHT, WIDTH, transformer=TINY, vae=TINY_VAE, itemsize=4)
    assert seen == [{name: getattr(charged, name) for name in seen[0]}] * 4
    assert worlds.runner.spec.model_owned_state_bytes_per_session == charged.total


@pytest.mark.parametrize("end", ["reset", "close", "evict", "fail"])
def test_however_a_session_ends_it_leaves_nothing(end: str) -> None:
    worlds = Worlds(session_capacity=1)
    worlds.tick()
    kept = (worlds.pipeline._worlds, worlds.pipeline._decoded, worlds.pipeline._prompts)
    assert [list(part) for part in kept] == [["w"]] * 3

    if end == "reset":
        worlds.reset()
    elif end == "close":
        worlds.runner.close_session("w")
    elif end == "evict":
        worlds.tick("other")
        worlds.runner.close_session("other")
    else:
        with pytest.raises(InvalidArgumentError):
            worlds.tick(control=None)

    assert [list(part) for part in kept] == [[]] * 3
    worlds.runner.check_integrity()


def test_a_reset_world_starts_as_a_new_one() -> None:
    worlds = Worlds()
    first = [worlds.tick() for _ in range(2)]

    worlds.reset()
    again = [worlds.tick() for _ in range(2)]

    for old, new in zip(first, again, strict=True):
        assert torch.equal(old.payload["latents"], new.payload["latents"])
        assert torch.equal(old.frames, new.frames)


def test_warm_up_leaves_nothing() -> None:
    worlds, cold = Worlds(), Worlds()
    worlds.runner.warm_up()

    assert worlds.pipeline._worlds == {}
    assert not worlds.runner.is_resident(WARMUP_SESSION_ID)
    assert torch.equal(worlds.latents(), cold.latents())
    assert len(list(worlds.pipeline.ar_diffusion_warmup_requests())) == 2
