"""Which tokens a window drops, and which pages a forward sees."""

import pytest

from contracts.errors import InvalidArgumentError
from contracts.kv_spec import ARDiffusionKVConfig
from gpu_worker.kv.window import SlidingWindow


def window(window_chunks: int = 2, sink_chunks: int = 0, *, reset_at_boundary: bool = False) -> SlidingWindow:
    return SlidingWindow(16, window_chunks, 16 * window_chunks, sink_chunks, reset_at_boundary)


@pytest.mark.parametrize(("tokens", "skipped"), [(0, 0), (32, 0), (48, 16), (64, 32), (50, 16)])
def test_what_lies_behind_the_window_is_skipped_in_whole_frames(tokens: int, skipped: int) -> None:
    assert window().skipped_tokens(tokens) == skipped


def test_the_sink_is_never_skipped() -> None:
    assert window(sink_chunks=1).skipped_tokens(80) == 32


def test_a_boundary_reset_skips_all_but_the_sink() -> None:
    policy = window(sink_chunks=1, reset_at_boundary=True)
    assert policy.skipped_tokens(48) == 32
    assert policy.skipped_tokens(16) == 0
    assert policy.skipped_tokens(0) == 0


def test_the_window_in_tokens_must_agree_with_the_window_in_frames() -> None:
    with pytest.raises(InvalidArgumentError, match="sliding_window"):
        SlidingWindow(16, 2, 33)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0, 2, 0), "chunk_size"), ((16, 0, 0), "window_chunks"), ((16, 2, 32, -1), "sink")],
)
def test_sizes_are_checked(arguments: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        SlidingWindow(*arguments)


def test_a_forward_sees_the_sink_and_the_most_recent_pages() -> None:
    policy = window(window_chunks=2, sink_chunks=1)
    assert policy.visible([]) == []
    assert policy.visible([7, 8, 9]) == [7, 8, 9]
    assert policy.visible([7, 8, 9, 10, 11]) == [7, 10, 11]
    assert policy.retained_blocks == 3


def test_without_a_sink_only_the_window_is_seen() -> None:
    assert window(window_chunks=1).visible([7, 8, 9]) == [9]


def test_a_policy_comes_from_a_usable_config() -> None:
    config = ARDiffusionKVConfig(enable=True, chunk_size=16, window_chunks=3, sink_chunks=1)
    assert SlidingWindow.from_config(config) == SlidingWindow(16, 3, 48, 1)
    with pytest.raises(InvalidArgumentError, match="enable"):
        SlidingWindow.from_config(ARDiffusionKVConfig(chunk_size=16, window_chunks=3))
