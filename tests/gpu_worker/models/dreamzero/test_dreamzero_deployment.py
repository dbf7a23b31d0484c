"""`worldline.json`: what it says is read; what is wrong with it is named before any weight is read."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.deployment import Deployment
from gpu_worker.models.dreamzero.embodiment import Place
from support.dreamzero_checkpoint import deployment, published_config, statistics, write_json
from support.dreamzero_model import TINY

Raw = dict[str, Any]


def written(folder: Path, raw: Raw | None = None, metadata: Any = None) -> Path:
    chosen = deployment() if raw is None else raw
    write_json(folder / "worldline.json", chosen)
    write_json(folder / "config.json", published_config())
    write_json(folder / deployment()["statistics"], statistics() if metadata is None else metadata)
    return folder


def test_it_is_read(tmp_path: Path) -> None:
    found = Deployment.load(written(tmp_path))
    robot = found.embodiment

    assert robot.name == "oxe_droid"
    assert (robot.height, robot.width) == (32, 48)
    assert robot.layout == ((Place("wrist", 2),), (Place("left"), Place("right")))
    assert robot.views == {"wrist", "left", "right"}
    assert [(part.name, part.width) for part in robot.state] == [
        ("joint_position", 7),
        ("gripper_position", 1),
    ]
    assert robot.action_width == 8
    assert robot.relative == {"joint_position"}
    assert robot.action[0].q99 == tuple(0.2 * (1 + 0.1 * joint) for joint in range(7))
    assert found.negative_prompt == "rain and night"
    assert found.tokenizer == tmp_path / "tokenizer"
    assert found.topology == TINY


def test_the_sentence_goes_around_the_language_in_lower_case(tmp_path: Path) -> None:
    robot = Deployment.load(written(tmp_path)).embodiment

    assert robot.sentence(" Pick UP\nthe Cup ") == "a robot is to pick up the cup over the snow"


def test_an_unknown_embodiment_is_a_clear_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    raw = deployment() | {"embodiment": "three_arms"}
    with pytest.raises(ConfigurationError, match=r"'three_arms' is unknown; known are: oxe_droid") as caught:
        Deployment.load(written(tmp_path, raw))
    assert caught.value.field == "embodiment"


def test_an_embodiment_without_statistics_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"statistics know no embodiment 'oxe_droid'.*agibot"
    ) as caught:
        Deployment.load(written(tmp_path, metadata={"agibot": {}}))
    assert caught.value.field == "embodiment"


@pytest.mark.parametrize("file", ["worldline.json", "config.json", "experiment_cfg/metadata.json"])
def test_a_file_that_is_missing_or_no_json_is_named_without_its_path(tmp_path: Path, file: str) -> None:
    folder = written(tmp_path)
    for text in (None, "{", "[" * 100_000):
        (folder / file).unlink() if text is None else (folder / file).write_text(text)
        with pytest.raises(ConfigurationError) as caught:
            Deployment.load(folder)
        assert caught.value.field == file
        assert str(tmp_path) not in str(caught.value)


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (written(tmp_path) / "worldline.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"worldline.json must be an object"):
        Deployment.load(tmp_path)


WRONG: list[tuple[str, Raw]] = [
    ("embodiment", {"embodiment": 17}),
    ("embodiments", {"embodiments": []}),
    ("negative_prompt", {"negative_prompt": " "}),
    ("negative_prompt", {"negative_prompt": None}),
    ("tokenizer", {"tokenizer": "../elsewhere"}),
    ("tokenizer", {"tokenizer": "/etc"}),
    ("statistics", {"statistics": "a/../../b"}),
    ("statistics", {"statistics": ""}),
    ("colour", {"colour": "red"}),
    ("topology", {"topology": []}),
    ("decoder", {"topology": {"decoder": {}}}),
    ("clip", {"topology": {"clip": []}}),
    ("colour", {"topology": {"clip": {"colour": 1}}}),
    ("clip.layers", {"topology": {"clip": {"layers": "2"}}}),
    ("clip.layers", {"topology": {"clip": {"layers": True}}}),
    ("clip.layers", {"topology": {"clip": {"layers": 0}}}),
    ("clip.eps", {"topology": {"clip": {"eps": -1.0}}}),
    ("vae.mult", {"topology": {"vae": {"mult": []}}}),
    ("head.transformer.dim", {"topology": {"head": {"transformer": {"dim": 1.5}}}}),
    ("transformer", {"topology": {"head": {"transformer": 1}}}),
    ("dim", {"topology": {"head": {"transformer": {"dim": 5120}}}}),
]
"""Fields of the file; the last says another size than the checkpoint's own configuration."""

WRONG_EMBODIMENT: list[tuple[str, Raw]] = [
    ("prompt", {"prompt": "do something"}),
    ("prompt", {"prompt": "{language} and {language}"}),
    ("prompt", {"prompt": None}),
    ("view_size", {"view_size": [16]}),
    ("view_size", {"view_size": [16, 24.0]}),
    ("view_size", {"view_size": [0, 24]}),
    ("view_size", {"view_size": [16, 5000]}),
    ("view_size", {"view_size": None}),
    ("layout", {"layout": []}),
    ("layout", {"layout": [["wrist"], ["left", "right"]]}),
    ("layout", {"layout": [[]]}),
    ("layout", {"layout": [[7]]}),
    ("layout", {"layout": [[{"view": ""}]]}),
    ("layout", {"layout": [[{"view": "wrist", "stretch": 0}], ["left", "right"]]}),
    ("layout", {"layout": [[{"view": "wrist", "stretch": True}], ["left"]]}),
    ("turn", {"layout": [[{"view": "wrist", "turn": 90}]]}),
    ("optional_views", {"optional_views": ["above"]}),
    ("optional_views", {"optional_views": "wrist"}),
    ("state", {"state": []}),
    ("state", {"state": ["joint_position", "joint_position"]}),
    ("statistics.state.torso", {"state": ["torso"]}),
    ("action", {"action": None}),
    ("statistics.action.torso", {"action": ["torso"]}),
    ("relative", {"relative": ["torso"]}),
    ("relative", {"relative": ["gripper_position"], "state": ["joint_position"]}),
    ("frame_seqlen", {"view_size": [16, 16]}),
    ("view_size", {"view_size": [17, 24]}),
    ("view_size", {"view_size": [16, 25]}),
    ("colour", {"colour": "red"}),
]


@pytest.mark.parametrize(("field", "changes"), WRONG)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, field: str, changes: Raw) -> None:
    raw = deployment()
    if isinstance(changes.get("topology"), dict):
        changes = {"topology": raw["topology"] | changes["topology"]}
    with pytest.raises(ConfigurationError) as caught:
        Deployment.load(written(tmp_path, raw | changes))
    assert caught.value.field == field


IMPOSSIBLE: list[tuple[str, Raw]] = [
    ("model_type", {"transformer": {"model_type": "t2v"}}),
    ("in_dim", {"transformer": {"in_dim": 32}}),
    ("out_dim", {"transformer": {"out_dim": 8}}),
    ("num_heads", {"transformer": {"num_heads": 5}}),
    ("num_heads", {"transformer": {"num_heads": 8}}),
    ("freq_dim", {"transformer": {"freq_dim": 9}}),
    ("num_state_per_block", {"transformer": {"num_state_per_block": 3}}),
    ("num_state_per_block", {"transformer": {"num_state_per_block": 8}}),
    ("action_horizon", {"action_horizon": 3}),
    ("action_dim", {"action_dim": 11}),
    ("num_frames", {"num_frames": 32}),
    ("num_frame_per_block", {"num_frame_per_block": 9}),
]
"""Sizes of the action head that contradict each other or the code, though the checkpoint's configuration says the same."""


@pytest.mark.parametrize(("field", "changes"), IMPOSSIBLE)
def test_sizes_that_nothing_could_run_with_are_refused_at_the_start(
    tmp_path: Path, field: str, changes: Raw
) -> None:
    raw, config = deployment(), published_config()
    said = config["action_head_cfg"]["config"]
    transformer = changes.get("transformer", {})
    said |= {name: value for name, value in changes.items() if name != "transformer"}
    said["diffusion_model_cfg"] |= transformer
    head = raw["topology"]["head"]
    raw["topology"]["head"] = head | changes | {"transformer": head["transformer"] | transformer}
    folder = written(tmp_path, raw)
    write_json(folder / "config.json", config)
    with pytest.raises(ConfigurationError, match=f"^topology: {field} must") as caught:
        Deployment.load(folder)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "part", "changes"),
    [
        ("heads", "clip", {"heads": 3}),
        ("z", "vae", {"z": 8}),
        ("mult", "vae", {"mult": [1, 1, 1]}),
        ("temporal_downsample", "vae", {"temporal_downsample": [True, True]}),
        ("temporal_downsample", "vae", {"temporal_downsample": [True, True, True]}),
    ],
)
def test_an_encoder_that_nothing_could_run_with_is_refused_at_the_start(
    tmp_path: Path, field: str, part: str, changes: Raw
) -> None:
    raw = deployment()
    raw["topology"][part] = raw["topology"][part] | changes
    with pytest.raises(ConfigurationError, match=f"^topology: {field} must") as caught:
        Deployment.load(written(tmp_path, raw))
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "changes"), WRONG_EMBODIMENT)
def test_a_field_of_the_embodiment_that_is_wrong_is_named(tmp_path: Path, field: str, changes: Raw) -> None:
    raw = deployment()
    raw["embodiments"]["oxe_droid"] |= changes
    with pytest.raises(ConfigurationError) as caught:
        Deployment.load(written(tmp_path, raw))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("quantiles", "why"),
    [
        ({"q01": [1.0], "q99": [0.0]}, "at most q99"),
        ({"q01": [0.0], "q99": [1.0, 1.0]}, "as long"),
        ({"q01": [0.0]}, "list"),
        ({"q01": [], "q99": []}, "list"),
        ({"q01": [True], "q99": [1.0]}, "finite numbers"),
        ({"q01": ["0"], "q99": [1.0]}, "finite numbers"),
        ({"q01": [0.0], "q99": [10**400]}, "finite numbers"),
        ({"q01": [-1e308], "q99": [1e308]}, "too far apart"),
        ([0.0, 1.0], "object"),
    ],
)
def test_quantiles_that_do_not_fit_are_named(tmp_path: Path, quantiles: Any, why: str) -> None:
    metadata = copy.deepcopy(statistics())
    metadata["oxe_droid"]["statistics"]["state"]["gripper_position"] = quantiles
    with pytest.raises(ConfigurationError, match=why) as caught:
        Deployment.load(written(tmp_path, metadata=metadata))
    assert caught.value.field is not None
    assert caught.value.field.startswith("statistics.state.gripper_position")


def test_quantiles_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    file = folder / "experiment_cfg" / "metadata.json"
    file.write_text(json.dumps(statistics()).replace("0.0]", "NaN]", 1))
    with pytest.raises(ConfigurationError, match="finite"):
        Deployment.load(folder)


@pytest.mark.parametrize(("field", "parts"), [("state", "state"), ("action", "action")])
def test_more_numbers_than_the_model_takes_are_refused(tmp_path: Path, field: str, parts: str) -> None:
    metadata = copy.deepcopy(statistics())
    wide = {"q01": [0.0] * 40, "q99": [1.0] * 40}
    metadata["oxe_droid"]["statistics"][parts]["gripper_position"] = wide
    with pytest.raises(ConfigurationError, match="47 numbers") as caught:
        Deployment.load(written(tmp_path, metadata=metadata))
    assert caught.value.field == field
