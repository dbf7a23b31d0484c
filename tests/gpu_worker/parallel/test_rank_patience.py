"""What has a limit between ranks and what has none: idle time, loading and warming up take as long as they take."""

from collections.abc import Iterator

import pytest

from support.rank_processes import RankProcesses

LIMIT_S = 1.0


@pytest.fixture(scope="module")
def hasty() -> Iterator[RankProcesses]:
    """Two ranks that may differ by a second within a request."""
    group = RankProcesses(2, LIMIT_S)
    yield group
    group.end()


def test_a_group_outlives_idle_times_and_starts_beyond_its_limit(hasty: RankProcesses) -> None:
    assert hasty.run("support.rank_messages:linger", pause_s=2 * LIMIT_S) == [2.0, 2.0]


@pytest.mark.parametrize("cold", [0, 1])
def test_a_rank_that_cannot_warm_up_only_delays_the_others(hasty: RankProcesses, cold: int) -> None:
    tick = ("tick", {"session": "a", "chunk": 0})
    first, second = hasty.run("support.rank_engines:play", script=[("start", {}), tick], cold=cold)

    assert first["outcomes"] == [None, 0.0]
    assert first["records"] == second["records"]
    assert first["joined_again"] == second["joined_again"] == 1
