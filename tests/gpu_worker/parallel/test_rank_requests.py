"""What rank 0 tells the others arrives as it was."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.events import ARDiffusionControlInput
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.parallel.requests import Order, RankRequest
from support.rank_processes import RankProcesses

TEXT = st.text(max_size=20).filter(lambda text: text.isprintable())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
CONTROLS = st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=2).map(
    lambda data: tuple(
        ARDiffusionControlInput(f"track-{index}", "s.v1", value) for index, value in enumerate(data)
    )
)
TICKS = st.builds(
    ARDiffusionTickRequest,
    st.just("world"),
    st.just("ar-world-1"),
    st.integers(0, 1000),
    st.sets(st.integers(0, 2**53 - 1), max_size=4).map(lambda ids: tuple(sorted(ids))),
    st.none() | TEXT.filter(str.strip),
    CONTROLS,
    st.booleans(),
    st.booleans(),
)
IMAGES = st.lists(st.binary(max_size=40) | TEXT | st.integers(0, 9), max_size=4)


@given(
    tick=TICKS,
    params=st.dictionaries(TEXT, VALUES, max_size=3),
    images=IMAGES,
    seed=st.integers(0, 2**63 - 1),
)
def test_a_tick_arrives_as_it_was(
    tick: ARDiffusionTickRequest, params: dict[str, Any], images: list[Any], seed: int
) -> None:
    request = RankRequest(Order.TICK, tick=tick, params=params | {"images": images}, seed=seed)

    assert RankRequest.decode(request.encode()) == request


@pytest.mark.parametrize("order", list(Order))
def test_every_order_arrives(order: Order) -> None:
    request = RankRequest(order, "world")

    assert RankRequest.decode(request.encode()) == request


@pytest.mark.parametrize("images", [None, "x.png", 7, {"a": 1}])
def test_images_that_are_no_list_are_left_to_the_model(images: Any) -> None:
    request = RankRequest(Order.TICK, params={"images": images})

    assert RankRequest.decode(request.encode()).params == {"images": images}


def test_a_message_of_any_length_arrives_with_one_broadcast_or_with_two(two_ranks: RankProcesses) -> None:
    lengths = [0, 1, (16 << 10) - 8, (16 << 10) - 7, 100_000]

    first, second = two_ranks.run("support.rank_messages:exchange", lengths=lengths)

    assert (
        first == second == [(length, count) for length, count in zip(lengths, (1, 1, 1, 2, 2), strict=True)]
    )
