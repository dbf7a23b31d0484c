"""What a request asks for, checked before anything is encoded.

A tick is one chunk, and its camera is the tick's control. A request without a tick is a whole clip, whose camera is a
script of keys (`camera_action_script`) or a trajectory directory (`action_path`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from contracts.errors import InvalidArgumentError, ModelError
from contracts.lingbot import FRAMES_PER_CHUNK, HeldKeys, camera_control, parse_action_script
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.models.lingbot_world.camera import PIXEL_FRAMES, PictureSize
from gpu_worker.models.lingbot_world.resolution import check_resolution, latent_frames
from gpu_worker.models.lingbot_world.schedule import NUM_STEPS, DMDSchedule, resolve_flow_shift
from gpu_worker.models.lingbot_world.spec import TEXT_TOKENS
from gpu_worker.models.lingbot_world.text import normalised

LATENT: Final = "latent"
PIXEL: Final = "pixel"

_PARAMS: Final = frozenset(
    {
        "action_path",
        "camera_action_script",
        "close_session",
        "flow_shift",
        "height",
        "images",
        "lingbot_reuse_last_step_kv",
        "max_sequence_length",
        "num_frames",
        "num_inference_steps",
        "num_outputs",
        "output_type",
        "reset",
        "session_id",
        "width",
    }
)


@dataclass(frozen=True, slots=True)
class LingBotRequest:
    """A request that can be followed.

    Args:
        prompt: with single spaces.
        generator: the session's random state.
        schedule: noise levels.
        decodes: whether pictures are wanted, too.
        reuse_last_step_kv: see `DMDBlock`.
        chunks: how many.
        script: keys of each chunk's frames, of a request without a tick.
        action_path: a trajectory directory, of a request without a tick.
    """

    prompt: str
    generator: torch.Generator
    schedule: DMDSchedule
    decodes: bool
    reuse_last_step_kv: bool
    chunks: int = 1
    script: tuple[tuple[HeldKeys, ...], ...] | None = None
    action_path: object = None

    @property
    def num_frames(self) -> int:
        """Pixel frames of all its chunks."""
        return 4 * (FRAMES_PER_CHUNK * self.chunks - 1) + 1

    def ticks(self, session_id: str) -> list[ARDiffusionTickRequest]:
        """Ticks for its chunks, made up where the request has none."""
        return [
            ARDiffusionTickRequest(session_id, session_id, index, (), self.prompt)
            for index in range(self.chunks)
        ]


def check_request(
    request: ARDiffusionRequest, size: PictureSize, *, flow_shift: object, scheduler: Mapping[str, Any]
) -> LingBotRequest:
    """The request, checked.

    Args:
        request: as it came.
        size: of the deployment's pictures; there is no other.
        flow_shift: the deployment's, or None.
        scheduler: the checkpoint's scheduler configuration.

    Raises:
        InvalidArgumentError: names the field.
        ModelError: a request without a tick has no camera.
    """
    asked = {**request.params, **request.extra_args}
    _check_names(asked)
    if not isinstance(request.generator, torch.Generator):
        raise InvalidArgumentError("a chunk needs exactly one generator", field="generator")
    prompt = normalised(request.prompt)
    if request.tick is not None and normalised(request.tick.prompt) != prompt:
        raise InvalidArgumentError("the tick's prompt is not the request's", field="prompt")
    _exactly(asked, "num_inference_steps", NUM_STEPS)
    _exactly(asked, "max_sequence_length", TEXT_TOKENS)
    _exactly(asked, "num_outputs", 1)
    _check_size(asked, size)
    output_type = PIXEL if asked.get("output_type") is None else asked["output_type"]
    if output_type not in (LATENT, PIXEL):  # not a set: what is asked for may have no hash
        raise InvalidArgumentError(
            f"output_type is {LATENT} or {PIXEL}, got {output_type!r:.80}", field="output_type"
        )
    reuse = False if asked.get("lingbot_reuse_last_step_kv") is None else asked["lingbot_reuse_last_step_kv"]
    if not isinstance(reuse, bool):
        raise InvalidArgumentError(
            f"lingbot_reuse_last_step_kv must be a bool, got {reuse!r:.80}",
            field="lingbot_reuse_last_step_kv",
        )
    script, path = _camera_source(request, asked)
    return LingBotRequest(
        prompt=prompt,
        generator=request.generator,
        schedule=DMDSchedule.of(resolve_flow_shift(asked.get("flow_shift"), flow_shift, scheduler)),
        decodes=output_type == PIXEL,
        reuse_last_step_kv=reuse,
        chunks=_chunks(request, asked, script),
        script=script,
        action_path=path,
    )


def _check_names(asked: Mapping[str, Any]) -> None:
    moved = asked.get("additional_information")
    if isinstance(moved, Mapping) and "action_path" in moved:
        raise InvalidArgumentError(
            "action_path belongs into sampling_params.extra_args.action_path, not into additional_information",
            field="action_path",
        )
    if asked.get("latents") is not None:
        raise InvalidArgumentError("latents can't be given: they are drawn here", field="latents")
    for name in asked:
        if name not in _PARAMS and asked[name] is not None:
            raise InvalidArgumentError(
                f"lingbot-world has no parameter {name!r:.80}; known: {', '.join(sorted(_PARAMS))}",
                field=str(name)[:80],
            )


def _exactly(asked: Mapping[str, Any], name: str, value: int) -> None:
    found = asked.get(name)
    if found is not None and (type(found) is not int or found != value):
        raise InvalidArgumentError(f"{name} must be {value}, got {found!r:.80}", field=name)


def _check_size(asked: Mapping[str, Any], size: PictureSize) -> None:
    wanted = asked.get("height"), asked.get("width")
    if wanted == (None, None):
        return
    height, width = check_resolution(*wanted)
    for name, found, expected in (("height", height, size.height), ("width", width, size.width)):
        if found != expected:
            raise InvalidArgumentError(
                f"{name} must be {expected}, the size that this deployment is made for, got {found}",
                field=name,
            )


def _camera_source(
    request: ARDiffusionRequest, asked: Mapping[str, Any]
) -> tuple[tuple[tuple[HeldKeys, ...], ...] | None, object]:
    script, path = asked.get("camera_action_script"), asked.get("action_path")
    if request.tick is not None:
        for name, value in (("camera_action_script", script), ("action_path", path)):
            if value is not None:
                raise InvalidArgumentError(
                    f"a tick's camera is its control: {name} does not go with it", field=name
                )
        camera_control(request.tick.controls)
        return None, None
    if script is not None and path is not None:
        raise InvalidArgumentError(
            "camera_action_script and action_path exclude each other", field="camera_action_script"
        )
    if script is None and path is None:
        raise ModelError(
            "a request without a tick needs camera_action_script or action_path", field="camera_action_script"
        )
    return None if script is None else parse_action_script(script), path


def _chunks(
    request: ARDiffusionRequest, asked: Mapping[str, Any], script: tuple[tuple[HeldKeys, ...], ...] | None
) -> int:
    found = asked.get("num_frames")
    if found is None:
        return 1 if script is None else len(script)
    chunks = latent_frames(found) // FRAMES_PER_CHUNK
    if request.tick is not None and chunks != 1:
        raise InvalidArgumentError(
            f"a tick is one block of {PIXEL_FRAMES} frames: num_frames must be {PIXEL_FRAMES}, got {found}",
            field="num_frames",
        )
    if script is not None and chunks != len(script):
        raise InvalidArgumentError(
            f"camera_action_script must have one entry a chunk: {chunks}, got {len(script)}",
            field="camera_action_script",
        )
    return chunks
