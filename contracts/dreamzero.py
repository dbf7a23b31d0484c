"""Observations of DreamZero worlds: what a robot saw and felt, and what it is asked to do.

    event, tick  dreamzero.observation.v1   {"images": {"wrist": "redis:key", "left": "redis:key", ...},
                                             "state": {"joint_position": [...], "gripper_position": [...]},
                                             "language": "put the cup on the shelf"}

An image is named by the payload URL that it lies behind. Which views there are, and which parts of the state, each with
how many numbers, is the deployment's: the host does not know it, so reducer and pipeline share the form alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput

OBSERVATION_TRACK: Final = "observation"
OBSERVATION_SCHEMA: Final = "dreamzero.observation.v1"

URL_PATTERN: Final = r"^[A-Za-z][A-Za-z0-9+.\-]*:\S+$"
"""Of a payload URL; which of them a worker reads is the worker's choice."""

_URL: Final = re.compile(URL_PATTERN.removesuffix("$"))
_FIELDS: Final = ("images", "state", "language")
_LONGEST_NAME: Final = 80


class ObservationMissingError(InvalidArgumentError, KeyError):
    """Raised for a tick without an observation: there is nothing to act on."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation.

    Args:
        images: payload URL by view.
        state: numbers by part, for example seven joints under "joint_position".
        language: what the robot is asked to do.
    """

    images: Mapping[str, str]
    state: Mapping[str, tuple[float, ...]]
    language: str

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the views, sorted: the order in which their pictures come with a request."""
        return tuple(sorted(self.images))


def parse_observation(data: Mapping[str, Any]) -> Observation:
    """The data of an observation; InvalidArgumentError names the field that is missing or wrong."""
    for name in _FIELDS:
        if name not in data:
            raise InvalidArgumentError(f"an observation needs {name}", field=name)
    unknown = sorted(set(data) - set(_FIELDS))
    if unknown:
        raise InvalidArgumentError(
            f"an observation has no field {unknown[0]!r:.80}", field=unknown[0][:_LONGEST_NAME]
        )
    return Observation(
        images={view: _url(url, f"images.{view}") for view, url in _named(data["images"], "images")},
        state={part: _numbers(values, f"state.{part}") for part, values in _named(data["state"], "state")},
        language=_language(data["language"]),
    )


def check_observation(control: ARDiffusionControlInput) -> Observation:
    """The observation of a control on the observation track, its schema checked."""
    if control.schema != OBSERVATION_SCHEMA:
        raise InvalidArgumentError(
            f"the observation track's schema is {OBSERVATION_SCHEMA}, got {control.schema!r:.80}",
            field="schema",
        )
    return parse_observation(control.data)


def observation_of(controls: Sequence[ARDiffusionControlInput]) -> Observation:
    """The one observation of a tick; ObservationMissingError without any."""
    for control in controls:
        if control.track == OBSERVATION_TRACK:
            return check_observation(control)
    raise ObservationMissingError(
        "a tick needs an observation, and none has come yet", field=OBSERVATION_TRACK
    )


def observation_images(controls: Sequence[ARDiffusionControlInput]) -> dict[str, str]:
    """Payload URL by view, in order of view, of the images that a tick's observation names.

    Empty where there is no observation, or none that can be understood: its reader says what is wrong with it.
    """
    try:
        observation = observation_of(controls)
    except InvalidArgumentError:
        return {}
    return {view: observation.images[view] for view in observation.views}


def observation_control(
    images: Mapping[str, str], state: Mapping[str, Sequence[float]], language: str
) -> ARDiffusionControlInput:
    """The control that a producer sends; checked."""
    data = {
        "images": dict(images),
        "state": {part: list(values) for part, values in state.items()},
        "language": language,
    }
    control = ARDiffusionControlInput(OBSERVATION_TRACK, OBSERVATION_SCHEMA, data)
    check_observation(control)
    return control


def same_text(one: str, other: str) -> bool:
    """Whether two texts are the same but for white space."""
    return one.split() == other.split()


def _named(value: object, field: str) -> list[tuple[str, Any]]:
    """The items of an object that has some, each under a name that is not blank."""
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{field} must be an object, got {type(value).__name__}", field=field)
    if not value:
        raise InvalidArgumentError(f"{field} must not be empty", field=field)
    for name in value:
        if not name.strip() or len(name) > _LONGEST_NAME:
            raise InvalidArgumentError(
                f"{field}: a name has 1 to {_LONGEST_NAME} characters, got {name!r:.100}", field=field
            )
    return list(value.items())


def _url(value: object, field: str) -> str:
    if not isinstance(value, str) or _URL.fullmatch(value) is None:
        raise InvalidArgumentError(f"{field} must be a payload URL, got {value!r:.80}", field=field)
    return value


def _numbers(value: object, field: str) -> tuple[float, ...]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence) or not value:
        raise InvalidArgumentError(f"{field} must be a list of numbers", field=field)
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in value):
        raise InvalidArgumentError(f"{field} must hold numbers only", field=field)
    try:
        numbers = tuple(float(item) for item in value)
    except OverflowError:
        numbers = (math.inf,)
    if not all(map(math.isfinite, numbers)):
        raise InvalidArgumentError(f"{field} must be finite", field=field)
    return numbers


def _language(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgumentError(
            f"language must be a text that is not blank, got {value!r:.80}", field="language"
        )
    return value
