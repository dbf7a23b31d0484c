"""`worldline plan`: exact figures, properties over many geometries, bad input."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import kv_specs
from actors.cli.main import run

GIB = 2**30
LINGBOT: dict[str, Any] = {
    "num_layers": 40,
    "num_kv_heads": 40,
    "head_size": 128,
    "tokens_per_frame": 1560,
    "frames_per_block": 3,
    "window_frames": 9,
    "sink_frames": 9,
    "kv_branches": [{"name": "main", "local_index": 0}],
    "cross_attention": [{"name": "text", "num_tokens": 512}],
    "session_capacity": 2,
    "model_owned_state_bytes_per_session": 7_488_000,
    "dtype": "bfloat16",
}
DREAMZERO: dict[str, Any] = {
    "num_layers": 40,
    "num_kv_heads": 40,
    "head_size": 128,
    "tokens_per_frame": 880,
    "frames_per_block": 2,
    "window_frames": 9,
    "sink_frames": 0,
    "max_scratch_tokens_per_branch": 25,
    "kv_branches": [{"name": "positive", "local_index": 0}, {"name": "negative", "local_index": 1}],
    "cross_attention": [{"name": "text", "num_tokens": 512}, {"name": "image", "num_tokens": 257}],
    "session_capacity": 2,
    "model_owned_state_bytes_per_session": 632_291_328,
    "dtype": "bfloat16",
}
TINY: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 1,
    "tokens_per_frame": 1,
    "frames_per_block": 3,
    "window_frames": 3,
    "sink_frames": 3,
    "kv_branches": [{"name": "main", "local_index": 0}],
    "cross_attention": [{"name": "text", "num_tokens": 2}],
    "session_capacity": 2,
    "dtype": "float32",
}

Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Plan:
    """Plans a spec: its fields, or the name of a model; returns exit status, stdout and stderr."""

    def call(spec: dict[str, Any] | str, *arguments: str, memory: str = "100GiB") -> tuple[int, str, str]:
        file = tmp_path / "spec.json"
        file.write_text(json.dumps(spec))
        source = ("--model", spec) if isinstance(spec, str) else ("--spec", str(file))
        capfd.readouterr()
        status = run(["plan", *source, "--memory", memory, *arguments])
        return status, *capfd.readouterr()

    return call


def document(result: tuple[int, str, str]) -> dict[str, Any]:
    status, out, err = result
    assert (status, err) == (0, ""), (out, err)
    return json.loads(out)


# ---------------------------------------------------------------------------------------------------- exact figures


def test_the_lingbot_geometry_under_two_fractions(plan: Plan) -> None:
    default = document(plan(LINGBOT, "--json"))
    assert default == {
        "page_bytes": 1_277_952_000,
        "scratch_blocks": 3,
        "managed_blocks": 23,
        "num_blocks": 23,
        "cross_attention_bytes_per_session": 419_430_400,
        "required_bytes": {"1": 33_653_670_400, "2": 57_083_724_800},
        "configured_budget_bytes": 10_737_418_240,
        "effective_budget_bytes": 33_653_670_400,
        "capacity": 1,
    }

    tuned = document(plan(LINGBOT, "--json", "--fraction", "0.6"))
    assert tuned["effective_budget_bytes"] == tuned["configured_budget_bytes"] == 64_424_509_440
    assert (tuned["capacity"], tuned["managed_blocks"], tuned["num_blocks"]) == (2, 41, 46)


def test_the_dreamzero_geometry_with_two_slots_and_with_one(plan: Plan) -> None:
    two = document(plan(DREAMZERO, "--json"))
    assert (two["page_bytes"], two["scratch_blocks"]) == (720_896_000, 6)
    assert two["cross_attention_bytes_per_session"] == 1_259_929_600
    assert two["required_bytes"] == {"1": 23_519_100_928, "2": 38_387_449_856}

    shared = '[{"name": "positive", "local_index": 0}, {"name": "negative", "local_index": 0}]'
    one = document(plan(DREAMZERO, "--json", "--set", f"kv_branches={shared}"))
    assert one["scratch_blocks"] == 3
    assert one["cross_attention_bytes_per_session"] == 1_259_929_600
    assert one["required_bytes"] == {"1": 13_426_556_928, "2": 21_806_841_856}


@pytest.mark.parametrize(
    ("degree", "page", "text", "owned", "required", "sharded"),
    [
        (1, 1_277_952_000, 419_430_400, 7_965_984_000, 41_612_166_400, None),
        (2, 638_976_000, 209_715_200, 6_049_056_000, 22_872_147_200, (5_104_769_280, 21_927_860_480)),
        (4, 319_488_000, 104_857_600, 5_090_592_000, 13_502_137_600, (3_674_161_920, 12_085_707_520)),
    ],
)
def test_a_worker_on_several_devices_is_planned_by_the_device(  # noqa: PLR0917 - figures of one row
    plan: Plan,
    degree: int,
    page: int,
    text: int,
    owned: int,
    required: int,
    sharded: tuple[int, int] | None,
) -> None:
    """`sharded` is what it would be if the decoder were shared, too."""
    options = ("--json", "--set", "dtype=bfloat16", "--param", f"ulysses_degree={degree}")
    found = document(plan("lingbot-world", *options))

    assert (found["page_bytes"], found["cross_attention_bytes_per_session"]) == (page, text)
    assert found["required_bytes"]["1"] == required == 26 * page + text + owned
    if sharded is not None:
        own, expected = sharded
        less = document(
            plan("lingbot-world", *options, "--set", f"model_owned_state_bytes_per_session={own}")
        )
        assert less["required_bytes"]["1"] == expected


def test_a_degree_that_does_not_divide_the_heads_is_named(plan: Plan) -> None:
    status, out, err = plan("lingbot-world", "--param", "ulysses_degree=3")

    assert (status, out) == (2, "")
    assert "the 40 heads must be divisible by ulysses_degree 3" in err


def test_a_session_fits_to_the_byte(plan: Plan) -> None:
    assert document(plan(TINY, "--json", memory="128"))["capacity"] == 1
    both = document(plan(TINY, "--json", "--fraction", "1", memory="192"))
    assert (both["capacity"], both["managed_blocks"], both["required_bytes"]) == (2, 17, {"1": 128, "2": 192})


def test_one_session_that_cannot_fit_is_told_with_both_numbers(plan: Plan) -> None:
    status, out, err = plan(TINY, "--json", memory="127")
    error = json.loads(out)["error"]
    assert (status, err, set(error)) == (78, "", {"code", "message", "available_bytes", "required_bytes"})
    assert (error["code"], error["available_bytes"], error["required_bytes"]) == ("cannot_fit", 127, 128)

    status, out, err = plan(TINY, memory="127")
    assert (status, out) == (78, "")
    assert "available=127 bytes, required=128 bytes" in err


def test_the_scratch_setting_raises_the_minimum_and_never_lowers_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, pages in (("1", 3), ("5", 5)):
        monkeypatch.setenv("AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH", setting)
        assert document(plan(TINY, "--json", memory="1MB"))["scratch_blocks"] == pages
    assert document(plan(TINY, "--json", "--scratch-blocks", "7", memory="1MB"))["scratch_blocks"] == 7
    assert plan(TINY, "--scratch-blocks", "-1", memory="1MB")[0] == 2


# ---------------------------------------------------------------------------------------------------- for people


def test_the_table_names_each_part_and_what_the_next_session_needs(plan: Plan) -> None:
    status, out, _ = plan(LINGBOT, "--fraction", "0.6")
    rows = {line.rsplit(None, 4)[0].strip(): line.split()[-4:-2] for line in out.splitlines()[1:-2]}
    assert status == 0
    assert rows["one page: K and V of one latent frame"] == ["1", "1277952000"]
    assert rows["scratch, for forwards that do not stay"] == ["3", "3833856000"]
    assert rows["managed pages for 2 sessions"] == ["41", "52396032000"]
    assert rows["cross-attention of 2 sessions"] == ["0", "838860800"]
    assert rows["the model's own state of 2 sessions"] == ["0", "14976000"]
    assert rows["required for 2 sessions"] == ["44", "57083724800"]
    assert "capacity: 2 sessions of at most 2" in out
    assert "next session: 3 would need 80513779200 bytes (80.5 GB), 16089269760 bytes" in out


def test_the_next_session_may_lack_memory_altogether_or_only_the_cap(plan: Plan) -> None:
    assert "more than the budget and more than is available" in plan(TINY, memory="128")[1]
    capped = plan(TINY, "--set", "session_capacity=1", memory="1MB")[1]
    assert "which the budget holds, but session_capacity is reached" in capped


# ---------------------------------------------------------------------------------------------------- sources


def test_an_installed_model_is_planned_without_torch() -> None:
    code = (
        "import sys; from actors.cli.main import run;"
        "status = run(['plan', '--model', 'reference', '--memory', '1GB', '--json']);"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["capacity"] == 64


def test_a_models_settings_and_its_fields_can_be_changed(plan: Plan) -> None:
    plain = document(plan("reference", "--json"))
    narrow = document(plan("reference", "--json", "--param", "window_frames=3"))
    same = document(plan("reference", "--json", "--set", "window_frames=3"))
    half = document(plan("reference", "--json", "--set", "dtype=bfloat16"))
    assert narrow["required_bytes"] == same["required_bytes"] != plain["required_bytes"]
    assert 2 * half["page_bytes"] == plain["page_bytes"]


def test_a_zero_and_a_false_can_be_set(plan: Plan) -> None:
    changed = document(
        plan(TINY, "--json", "--set", "sink_frames=0", "--set", "reset_at_boundary=false", memory="1kB")
    )
    assert changed["required_bytes"]["1"] == (3 + (1 * 3 + 3) + 2) * 8 + 16


def test_a_spec_may_come_from_stdin(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(TINY).encode())))
    assert run(["plan", "--spec", "-", "--memory", "1 GiB", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["configured_budget_bytes"] == int(GIB * 0.1)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--set", "num_layers=0"), "num_layers"),
        (("--set", "head_siz=1"), "head_siz"),
        (("--set", "num_layers"), "set"),
        (("--set", "num_layers=two"), "num_layers"),
        (("--set", "num_layers=1", "--set", "num_layers=2"), "num_layers"),
        (("--set", "session_capacity=100001"), "session_capacity"),
        (("--set", "model_owned_state_bytes_per_session=9007199254740991"), None),
        (("--set", f"num_layers={2**52}", "--set", f"head_size={2**52}"), "spec"),
        (("--set", "kv_branches={}"), "kv_branches"),
        (("--set", 'kv_branches=[{"name": "main"}]'), "local_index"),
        (("--set", 'kv_branches=[{"name": "main", "local_index": 1}]'), "kv_branches"),
        (("--set", 'kv_branches=["main"]'), "kv_branches"),
        (("--set", 'cross_attention=[{"name": "text", "num_tokens": 2, "heads": 1}]'), "heads"),
        (("--set", "dtype=int8"), "dtype"),
        (("--set", 'dtype="float8"'), "dtype"),
        (("--param", "a=1"), "param"),
        (("--fraction", "0"), "gpu_memory_fraction"),
        (("--fraction", "1.01"), "gpu_memory_fraction"),
        (("--fraction", "nan"), "gpu_memory_fraction"),
        (("--model", "reference"), "model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_bad_value_is_refused_by_name(plan: Plan, arguments: tuple[str, ...], field: str | None) -> None:
    status, out, err = plan(TINY, *arguments, "--json", memory="1MB")
    error = json.loads(out)["error"]
    assert err == ""
    if field is None:
        assert (status, error["code"]) == (78, "cannot_fit")
    else:
        assert (status, error["code"], error["field"]) == (2, "invalid_argument", field)


@pytest.mark.parametrize("memory", ["", "GB", "-1", "1.5.2GB", "12 XB", "1iB", "10000000TB", "1e9"])
def test_an_amount_of_memory_that_is_none_is_refused(plan: Plan, memory: str) -> None:
    status, out, _ = plan(TINY, "--json", memory=memory)
    assert (status, json.loads(out)["error"]["field"]) == (2, "memory")


@pytest.mark.parametrize(
    ("text", "twice"),
    [
        ('"num_layers": 1, "num_layers": 1', "num_layers"),
        ('"kv_branches": [{"name": "main", "local_index": 0, "name": "other"}]', "name"),
    ],
)
def test_a_file_that_names_a_field_twice_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, twice: str
) -> None:
    whole = json.dumps(TINY)[:-1] + f", {text}}}"
    (tmp_path / "spec.json").write_text(whole)
    assert run(["plan", "--spec", str(tmp_path / "spec.json"), "--memory", "1GB", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["field"] == twice


@pytest.mark.parametrize("text", ["[]", "nonsense", "3", "{}", '{"dtype": "float32"}'])
def test_a_file_that_holds_no_spec_is_refused(plan: Plan, tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    assert run(["plan", "--spec", str(tmp_path / "other.json"), "--memory", "1GB"]) == 2
    assert run(["plan", "--spec", str(tmp_path / "gone.json"), "--memory", "1GB"]) == 2
    assert run(["plan", "--memory", "1GB"]) == 2
    assert run(["plan", "--model", "reference"]) == 2


@pytest.mark.parametrize(
    "name", [name for name in LINGBOT if name not in {"sink_frames", "session_capacity"}]
)
def test_a_field_that_is_missing_is_named_or_has_its_default(plan: Plan, name: str) -> None:
    status, out, _ = plan({key: value for key, value in LINGBOT.items() if key != name}, "--json")
    if name in {"cross_attention", "model_owned_state_bytes_per_session"}:
        assert status == 0
    else:
        assert (status, json.loads(out)["error"]["field"]) == (2, name)


def _raising(config: dict[str, Any]) -> None:
    raise KeyError(next(iter(config), "nothing"))


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("unknown", 2, "those that do: gone, none, raises"),
        ("gone", 78, "no_such_module_of_ours"),
        ("raises", 78, "KeyError: 'x'"),
        ("none", 78, "dict, not ARDiffusionKVCacheSpec"),
    ],
)
def test_a_model_that_offers_no_spec_is_told(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, model: str, status: int, text: str
) -> None:
    targets: dict[str, Any] = {"gone": None, "raises": _raising, "none": dict}

    class Point(EntryPoint):
        def load(self) -> Any:
            return targets[self.name] or super().load()

    found = [Point(name, "no_such_module_of_ours:kv_spec", "worldline.kv_specs") for name in targets]
    monkeypatch.setattr(kv_specs, "entry_points", lambda group: found)
    code, out, err = plan(model, "--param", "x=1")
    assert (code, out) == (status, "")
    assert text in err


# ---------------------------------------------------------------------------------------------------- properties

SIZES = st.integers(1, 12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=SIZES,
    heads=SIZES,
    head_size=SIZES,
    tokens=SIZES,
    frames=st.integers(1, 4),
    window=SIZES,
    sink=st.integers(0, 5),
    extra=st.integers(0, 40),
    slots=st.integers(1, 2),
    text=st.integers(1, 30),
    cross_heads=st.none() | SIZES,
    owned=st.integers(0, 5_000),
    cap=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    memory=st.integers(1, 4_000_000),
    fraction=st.floats(0.01, 1),
)
def test_the_figures_follow_the_formulas(plan: Plan, **drawn: Any) -> None:
    d = drawn
    spec = {
        "num_layers": d["layers"],
        "num_kv_heads": d["heads"],
        "head_size": d["head_size"],
        "tokens_per_frame": d["tokens"],
        "frames_per_block": d["frames"],
        "window_frames": d["window"],
        "sink_frames": d["sink"],
        "max_scratch_tokens_per_branch": d["extra"],
        "kv_branches": [
            {"name": "positive", "local_index": 0},
            {"name": "negative", "local_index": d["slots"] - 1},
        ],
        "cross_attention": [{"name": "text", "num_tokens": d["text"], "num_kv_heads": d["cross_heads"]}],
        "session_capacity": d["cap"],
        "model_owned_state_bytes_per_session": d["owned"],
        "dtype": d["dtype"],
    }
    itemsize = 4 if d["dtype"] == "float32" else 2
    page = 2 * d["tokens"] * d["heads"] * d["head_size"] * itemsize * d["layers"]
    scratch = d["slots"] * (d["frames"] + -(-d["extra"] // d["tokens"]))
    cross = 2 * 2 * d["text"] * (d["cross_heads"] or d["heads"]) * d["head_size"] * itemsize * d["layers"]

    def managed(count: int) -> int:
        return d["slots"] * (count * (d["sink"] + d["window"]) + d["frames"]) + 2

    def required(count: int) -> int:
        return (scratch + managed(count)) * page + count * (cross + d["owned"])

    status, out, _ = plan(spec, "--json", "--fraction", str(d["fraction"]), memory=str(d["memory"]))
    found = json.loads(out)
    if required(1) > d["memory"]:
        assert (status, found["error"]["required_bytes"]) == (78, required(1))
        return
    budget = max(int(d["memory"] * d["fraction"]), required(1))
    capacity = max(count for count in range(1, d["cap"] + 1) if required(count) <= budget)
    assert found == {
        "page_bytes": page,
        "scratch_blocks": scratch,
        "managed_blocks": managed(capacity),
        "num_blocks": (budget - scratch * page - capacity * (cross + d["owned"])) // page,
        "cross_attention_bytes_per_session": cross,
        "required_bytes": {str(count): required(count) for count in range(1, d["cap"] + 1)},
        "configured_budget_bytes": int(d["memory"] * d["fraction"]),
        "effective_budget_bytes": budget,
        "capacity": capacity,
    }
