"""Groups of rank processes: starting one takes seconds, so there is one of each size for all tests."""

from collections.abc import Iterator

import pytest

from support.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankProcesses]:
    group = RankProcesses(2)
    yield group
    group.end()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankProcesses]:
    group = RankProcesses(4)
    yield group
    group.end()


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> RankProcesses:
    """The same test with two ranks and with four."""
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
