"""What a KV spec and a KV config accept, and how a deployment overrides them."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from contracts.errors import InvalidArgumentError, InvalidTypeError
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
    ARDiffusionKVConfig,
    ARDiffusionKVOverrides,
    resolve_kv_config,
)


def make_spec(**changes: Any) -> ARDiffusionKVCacheSpec:
    values: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": 1,
        "tokens_per_frame": 16,
        "frames_per_block": 3,
        "window_frames": 3,
        "sink_frames": 1,
        "kv_branches": (ARDiffusionKVBranchSpec("main", 0),),
    }
    return ARDiffusionKVCacheSpec(**{**values, **changes})


# ---------------------------------------------------------------------------------------------------- spec


@pytest.mark.parametrize(
    "field",
    [
        "num_layers",
        "num_kv_heads",
        "head_size",
        "tokens_per_frame",
        "frames_per_block",
        "window_frames",
        "session_capacity",
        "max_model_len",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_a_size_must_be_a_positive_integer(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        make_spec(**{field: value})
    assert isinstance(caught.value, InvalidArgumentError)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "field", ["sink_frames", "max_scratch_tokens_per_branch", "model_owned_state_bytes_per_session"]
)
@pytest.mark.parametrize("value", [-1, False, 0.5, None])
def test_a_count_must_be_an_integer_that_is_not_negative(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        make_spec(**{field: value})
    assert caught.value.field == field
    assert getattr(make_spec(**{field: 0}), field) == 0


def test_reset_at_boundary_must_be_a_bool() -> None:
    with pytest.raises(InvalidArgumentError, match="reset_at_boundary"):
        make_spec(reset_at_boundary=1)


def test_defaults_are_the_published_ones() -> None:
    spec = make_spec()
    assert (spec.max_model_len, spec.session_capacity, spec.cross_attention) == (1 << 20, 1, ())
    assert (spec.max_scratch_tokens_per_branch, spec.model_owned_state_bytes_per_session) == (0, 0)


def test_a_spec_is_immutable_and_keeps_tuples() -> None:
    spec = make_spec(kv_branches=[ARDiffusionKVBranchSpec("main", 0)], cross_attention=[])
    assert isinstance(spec.kv_branches, tuple)
    with pytest.raises(FrozenInstanceError):
        spec.num_layers = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ((), "at least one branch"),
        ((ARDiffusionKVBranchSpec("main", 1),), "contiguous"),
        ((ARDiffusionKVBranchSpec("a", 0), ARDiffusionKVBranchSpec("b", 2)), "contiguous"),
        ((ARDiffusionKVBranchSpec("a", 0), ARDiffusionKVBranchSpec("a", 1)), "unique"),
        (("main",), "ARDiffusionKVBranchSpec"),
        ("main", "ARDiffusionKVBranchSpec"),
        (None, "sequence"),
    ],
)
def test_branches_are_named_once_and_their_slots_are_contiguous(branches: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        make_spec(kv_branches=branches)
    assert caught.value.field == "kv_branches"


def test_branches_may_share_a_slot() -> None:
    positive = ARDiffusionKVBranchSpec("positive", 0)
    apart = make_spec(kv_branches=(positive, ARDiffusionKVBranchSpec("negative", 1)))
    shared = make_spec(kv_branches=(positive, ARDiffusionKVBranchSpec("negative", 0)))
    assert (apart.num_local_kv_branches, shared.num_local_kv_branches) == (2, 1)
    assert shared.branch_names == ("positive", "negative")


@pytest.mark.parametrize(
    ("name", "index", "field"), [("", 0, "name"), ("  ", 0, "name"), ("a", -1, "local_index")]
)
def test_a_branch_has_a_name_and_a_slot(name: str, index: int, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        ARDiffusionKVBranchSpec(name, index)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("", 1), "name"),
        (("text", 0), "num_tokens"),
        (("text", True), "num_tokens"),
        (("text", 4, 0), "num_kv_heads"),
    ],
)
def test_a_cross_attention_cache_has_a_name_a_length_and_heads(
    arguments: tuple[Any, ...], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        ARDiffusionCrossAttentionKVSpec(*arguments)
    assert caught.value.field == field


def test_cross_attention_names_are_unique() -> None:
    text = ARDiffusionCrossAttentionKVSpec("text", 4)
    with pytest.raises(InvalidArgumentError, match="unique"):
        make_spec(cross_attention=(text, text))
    with pytest.raises(InvalidArgumentError, match="ARDiffusionCrossAttentionKVSpec"):
        make_spec(cross_attention=("text",))


# ---------------------------------------------------------------------------------------------------- config


def test_config_defaults() -> None:
    config = ARDiffusionKVConfig()
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "enable": False,
        "chunk_size": 0,
        "window_chunks": None,
        "sink_chunks": 0,
        "reset_at_boundary": False,
        "gpu_memory_fraction": 0.1,
        "warmup_cudagraph": True,
        "reuse_history_staging": False,
        "warmup_capture_reset": False,
    }
    assert config.sliding_window is None


def test_the_sliding_window_is_counted_in_tokens() -> None:
    assert ARDiffusionKVConfig(chunk_size=16, window_chunks=3).sliding_window == 48


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), float("inf"), True, "0.5", None])
def test_the_memory_fraction_lies_in_0_to_1(fraction: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="gpu_memory_fraction") as caught:
        ARDiffusionKVConfig(gpu_memory_fraction=fraction)
    assert caught.value.field == "gpu_memory_fraction"
    assert ARDiffusionKVConfig(gpu_memory_fraction=1).gpu_memory_fraction == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable", 1),
        ("reset_at_boundary", None),
        ("warmup_cudagraph", "yes"),
        ("chunk_size", -1),
        ("sink_chunks", True),
        ("window_chunks", 0),
    ],
)
def test_every_config_field_is_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        ARDiffusionKVConfig(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"enable": False}, "enable"),
        ({"window_chunks": None}, "window_chunks"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_a_cache_needs_a_config_that_is_complete(change: dict[str, Any], field: str) -> None:
    complete = ARDiffusionKVConfig(enable=True, chunk_size=16, window_chunks=3)
    assert complete.require_usable() == (16, 3)
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        replace(complete, **change).require_usable()
    assert caught.value.field == field


# ---------------------------------------------------------------------------------------------------- overrides


def test_without_overrides_the_spec_decides() -> None:
    config = resolve_kv_config(make_spec(sink_frames=2, reset_at_boundary=True))
    assert (config.enable, config.chunk_size, config.window_chunks) == (True, 16, 3)
    assert (config.sink_chunks, config.reset_at_boundary, config.gpu_memory_fraction) == (2, True, 0.1)


def test_an_override_wins_and_zero_and_false_are_values() -> None:
    spec = make_spec(sink_frames=2, reset_at_boundary=True)
    config = resolve_kv_config(
        spec,
        ARDiffusionKVOverrides(
            window_chunks=5, sink_chunks=0, reset_at_boundary=False, warmup_cudagraph=False
        ),
    )
    assert (config.window_chunks, config.sink_chunks, config.reset_at_boundary) == (5, 0, False)
    assert config.warmup_cudagraph is False


def test_a_raw_mapping_is_accepted_and_forces_enable() -> None:
    raw = {"enable": False, "chunk_size": 99, "window_chunks": None, "gpu_memory_fraction": 0.6}
    config = resolve_kv_config(make_spec(), raw)
    assert (config.enable, config.chunk_size, config.window_chunks) == (True, 16, 3)
    assert config.gpu_memory_fraction == 0.6


def test_an_unknown_key_of_a_raw_mapping_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="windw_chunks") as caught:
        resolve_kv_config(make_spec(), {"windw_chunks": 3})
    assert caught.value.field == "windw_chunks"


def test_a_raw_config_that_is_no_mapping_is_a_type_error() -> None:
    with pytest.raises(InvalidTypeError, match="mapping"):
        resolve_kv_config(make_spec(), [("window_chunks", 3)])  # type: ignore[arg-type]


def test_a_bad_override_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="window_chunks"):
        resolve_kv_config(make_spec(), {"window_chunks": 0})


def test_a_bad_override_is_told_when_it_is_made() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ARDiffusionKVOverrides(sink_chunks=-1)
    assert caught.value.field == "sink_chunks"


def test_window_and_sink_may_have_the_names_that_the_spec_gives_them() -> None:
    overrides = ARDiffusionKVOverrides.from_mapping({"window_frames": 5, "sink_frames": 0})
    assert overrides == ARDiffusionKVOverrides(window_chunks=5, sink_chunks=0)
    with pytest.raises(InvalidArgumentError, match="both of its names"):
        ARDiffusionKVOverrides.from_mapping({"window_frames": 5, "window_chunks": 5})
