"""What a deployment says about its robots, in a file beside the checkpoint: `worldline.json`. Torch-free.

    {"embodiment": "oxe_droid",                     which of those below the worker serves
     "embodiments": {"oxe_droid": {
         "prompt": "A robot is asked to {language}", the sentence around the lower-cased language
         "view_size": [176, 320],                    height and width of one view's place, in pixels
         "layout": [[{"view": "wrist", "stretch": 2}], ["left", "right"]],
         "optional_views": [],                       these are black where they are missing; all others must come
         "state": ["joint_position", "gripper_position"],
         "action": ["joint_position", "gripper_position"],
         "relative": ["joint_position"]}},           actions that are offsets from the state of the same name
     "negative_prompt": "blurred, shaking",
     "tokenizer": "tokenizer",                       a folder of the checkpoint
     "statistics": "experiment_cfg/metadata.json",   {embodiment: {"statistics": {"state": {part: {"q01", "q99"}}, ...}}}
     "topology": {"clip": {"layers": 2}}}            of a checkpoint that is not of the published size; may be absent

Nothing of it is built in. A layout is rows of views from top to bottom; a view fills one place, or with `stretch` that
many side by side, every column repeated. A view that is named twice in a row is shown twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.config import DreamZeroConfig, DreamZeroTopology
from gpu_worker.models.dreamzero.embodiment import Embodiment, read_embodiment
from gpu_worker.models.dreamzero.reading import inner_path, json_object, only_fields, read_json, text_of
from gpu_worker.models.dreamzero.topology import read_topology

FILE: Final = "worldline.json"

_FIELDS: Final = ("embodiment", "embodiments", "negative_prompt", "tokenizer", "statistics", "topology")


@dataclass(frozen=True, slots=True)
class Deployment:
    """The file, checked.

    Args:
        embodiment: the one that is served.
        negative_prompt: of the negative branch.
        tokenizer: the tokenizer's folder.
        topology: what the checkpoint must be.
    """

    embodiment: Embodiment
    negative_prompt: str
    tokenizer: Path
    topology: DreamZeroTopology

    @classmethod
    def load(cls, checkpoint: Path) -> Deployment:
        """From `worldline.json` in the checkpoint's folder.

        Raises:
            ConfigurationError: it is missing, or something in it or in the statistics is; names the field.
        """
        raw = json_object(read_json(checkpoint, FILE), FILE)
        only_fields(raw, _FIELDS, FILE)
        name = text_of(raw, "embodiment")
        embodiments = json_object(raw.get("embodiments"), "embodiments")
        if name not in embodiments:
            known = ", ".join(sorted(embodiments)) or "none"
            raise ConfigurationError(
                f"{FILE}: embodiment {name!r:.80} is unknown; known are: {known}", field="embodiment"
            )
        statistics = json_object(read_json(checkpoint, inner_path(raw, "statistics")), "statistics")
        if name not in statistics:
            known = ", ".join(sorted(map(str, statistics)))[:200] or "none"
            raise ConfigurationError(
                f"the statistics know no embodiment {name!r:.80}; known are: {known}", field="embodiment"
            )
        entry = json_object(statistics[name], f"statistics of {name}")
        embodiment = read_embodiment(name, json_object(embodiments[name], name), entry)
        topology = read_topology(
            read_json(checkpoint, "config.json"),
            json_object(raw.get("topology", {}), "topology"),
            height=embodiment.height,
            width=embodiment.width,
        )
        _check_widths(embodiment, topology.head)
        return cls(
            embodiment=embodiment,
            negative_prompt=text_of(raw, "negative_prompt"),
            tokenizer=checkpoint / inner_path(raw, "tokenizer"),
            topology=topology,
        )


def _check_widths(embodiment: Embodiment, head: DreamZeroConfig) -> None:
    for field, width, most in (
        ("state", embodiment.state_width, head.max_state_dim),
        ("action", embodiment.action_width, head.action_dim),
    ):
        if width > most:
            raise ConfigurationError(
                f"{embodiment.name}: {field} has {width} numbers, the model takes {most}", field=field
            )
