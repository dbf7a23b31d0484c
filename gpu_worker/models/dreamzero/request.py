"""What a request asks for, checked before anything is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from contracts.dreamzero import (
    Observation,
    ObservationMissingError,
    observation_of,
    parse_observation,
    same_text,
)
from contracts.errors import InvalidArgumentError
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.models.dreamzero.embodiment import Embodiment
from gpu_worker.models.dreamzero.normalisation import Numbers, raw_state
from gpu_worker.models.dreamzero.pictures import Picture, check_views, decode_picture, stitch
from gpu_worker.models.dreamzero.settings import DreamZeroSettings, check_scale, check_steps

ACTIONS: Final = "actions"
LATENT: Final = "latent"
PIXEL: Final = "pixel"
_OUTPUTS: Final = (ACTIONS, LATENT, PIXEL)

DUMMY_PROMPT: Final = "dummy run"

_PARAMS: Final = frozenset(
    {
        "cfg_scale",
        "close_session",
        "images",
        "num_inference_steps",
        "output_type",
        "reset",
        "robot_obs",
        "session_id",
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """How an observation is answered.

    Args:
        cfg_scale: 1 is without guidance.
        steps: denoising steps.
        output_type: "actions"; "latent" with the imagined latents, too; "pixel" with pictures of them, too.
    """

    cfg_scale: float
    steps: int
    output_type: str


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """An observation in the robot's own terms.

    Args:
        picture: the stitched cameras.
        state: raw, in the model's order.
        language: what the robot is asked to do, as the producer wrote it.
    """

    picture: Picture
    state: Numbers
    language: str


def is_dummy(request: ARDiffusionRequest) -> bool:
    """Whether an engine only wants to see the shape of an answer: no tick, the prompt "dummy run", and one step."""
    dummy = request.tick is None and request.prompt == DUMMY_PROMPT
    return dummy and _asked(request).get("num_inference_steps") == 1


def check_options(request: ARDiffusionRequest, settings: DreamZeroSettings) -> Options:
    """The request's options, the deployment's where it names none; InvalidArgumentError names one that is wrong."""
    asked = _asked(request)
    for name, value in asked.items():
        if name not in _PARAMS and value is not None:
            raise InvalidArgumentError(
                f"dreamzero has no parameter {name!r:.80}; known: {', '.join(sorted(_PARAMS))}",
                field=str(name)[:80],
            )
    scale, steps, output = (asked.get(name) for name in ("cfg_scale", "num_inference_steps", "output_type"))
    output = ACTIONS if output is None else output
    if output not in _OUTPUTS:
        raise InvalidArgumentError(
            f"output_type is {', '.join(_OUTPUTS)}, got {output!r:.80}", field="output_type"
        )
    return Options(
        cfg_scale=settings.cfg_scale if scale is None else check_scale(scale),
        steps=settings.num_inference_steps if steps is None else check_steps(steps),
        output_type=output,
    )


def observe(request: ARDiffusionRequest, embodiment: Embodiment) -> Observed:
    """The request's observation, decoded.

    Raises:
        ObservationMissingError: it has none.
        InvalidArgumentError: a view or a part of the state is missing, wrong or not the robot's; it is named.
    """
    observation = _observation(request)
    if request.prompt is not None and not same_text(request.prompt, observation.language):
        raise InvalidArgumentError(
            "the prompt is not the observation's language, which is what the robot follows", field="prompt"
        )
    check_views(observation.images, embodiment)
    state = raw_state(observation.state, embodiment)
    views = observation.views
    if len(request.images) != len(views):
        raise InvalidArgumentError(
            f"the observation names {len(views)} images, {len(request.images)} came with it", field="images"
        )
    pictures = {
        view: decode_picture(source, f"images.{view}")
        for view, source in zip(views, request.images, strict=True)
    }
    return Observed(stitch(pictures, embodiment), state, observation.language)


def _observation(request: ARDiffusionRequest) -> Observation:
    if request.tick is not None:
        return observation_of(request.tick.controls)
    data = request.extra_args.get("robot_obs")
    if data is None:
        raise ObservationMissingError("a request without a tick needs robot_obs", field="robot_obs")
    if not isinstance(data, Mapping):
        raise InvalidArgumentError("robot_obs must be an observation's data", field="robot_obs")
    return parse_observation(data)


def _asked(request: ARDiffusionRequest) -> dict[str, Any]:
    return {**request.params, **request.extra_args}
