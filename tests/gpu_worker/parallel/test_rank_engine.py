"""Several ranks as one engine: what fails on one fails on all, and all hold the same afterwards."""

from typing import Any

import pytest

from support.rank_processes import RankProcesses

Call = tuple[str, dict[str, Any]]


def play(ranks: RankProcesses, *script: Call) -> list[dict[str, Any]]:
    """What each rank has recorded; they held the same after every call."""
    made = ranks.run("support.rank_engines:play", script=list(script))
    for other in made[1:]:
        assert other["records"] == made[0]["records"]
        assert other["hooks"] == made[0]["hooks"]
    return made


def tick(session: str = "a", chunk: int = 0, **params: Any) -> Call:
    return "tick", {"session": session, "chunk": chunk, "params": params}


START: Call = ("start", {})


def test_every_call_reaches_every_rank_and_takes_one_broadcast_and_one_agreement(
    two_ranks: RankProcesses,
) -> None:
    script = [START, tick(), tick(chunk=1), ("reset_session", {"of": ("a",)}), tick(), tick("b")]
    script += [("close_session", {"of": ("a",)}), ("check_integrity", {})]
    first, second = play(two_ranks, *script)

    assert first["outcomes"] == [None, 0.0, 0.5, None, 0.0, 0.0, None, None]
    orders = ["start", "tick", "tick", "reset", "tick", "tick", "close", "check"]
    assert [record["order"] for record in second["records"]] == orders
    assert second["records"][-1]["resident"] == ("b",)
    assert second["hooks"] == [("close", "__ardiffusion_warmup__"), ("reset", "a"), ("close", "a")]
    for record in second["records"]:
        compared = 1 if record["order"] in {"start", "check"} else 0
        assert record["agreements"] == {"all_reduce": 1 + compared}
    # Eight calls and the end; two comparisons; two exchanges in each of four chunks and two of the warm-up.
    assert first["crossed"] == {"broadcast_": 9, "allreduce_": 8 + 2, "allgather_": 2 * (4 + 2)}
    assert first["joined_again"] == 0
    assert first["default_seed"] == 11, "what sessions that name none begin with, as on one device"


def test_a_session_that_makes_room_goes_on_every_rank_and_rank_0_tells(two_ranks: RankProcesses) -> None:
    first, second = play(
        two_ranks, START, tick("a"), tick("b"), tick("a", 1), tick("c"), ("check_integrity", {})
    )

    assert first["evicted"] == ["b"]
    assert second["records"][-1]["resident"] == ("a", "c")


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_fails_on_all_and_all_let_go_of_the_session(
    two_ranks: RankProcesses, rank: int, before: int
) -> None:
    fault = {"ranks": [rank], "before": before}
    first, second = play(
        two_ranks, START, tick("b"), tick(), tick(chunk=1, fault=fault), tick(chunk=2), tick(), tick("b", 1)
    )

    kind, code, message = first["outcomes"][3]
    said = f"told to fail before exchange {before}"
    if rank == 0:
        assert (kind, message) == ("Fault", said)
    else:
        assert (kind, code, message) == ("ModelError", "model_error", f"rank 1: Fault: {said}")
    assert second["records"][3]["resident"] == ("b",)
    assert second["records"][3]["used"] == 1
    assert first["outcomes"][4][0] == "NotResidentError"
    assert first["outcomes"][5:] == [0.0, 0.5], "it starts anew, and the other session goes on"
    # Where the others had exchanged as much, they did not wait, and nothing had to be closed.
    assert first["joined_again"] == second["joined_again"]


def test_one_of_four_that_fails_lets_the_others_go(four_ranks: RankProcesses) -> None:
    fault = {"ranks": [2], "before": 1}
    made = play(four_ranks, START, tick(fault=fault), tick())

    assert made[0]["outcomes"][1][2] == "rank 2: Fault: told to fail before exchange 1"
    assert made[0]["outcomes"][2] == 0.0
    assert {ranks["joined_again"] for ranks in made} == {1}


def test_what_fails_on_all_ranks_alike_is_rank_0_s_own_error_and_closes_nothing(
    two_ranks: RankProcesses,
) -> None:
    fault = {"ranks": [0, 1], "before": 1}
    first, second = play(two_ranks, START, tick(fault=fault), tick("a", 4), tick())

    assert first["outcomes"][1] == ("Fault", None, "told to fail before exchange 1")
    assert first["outcomes"][2][:2] == ("NotResidentError", "not_resident")
    assert first["outcomes"][3] == 0.0
    assert first["joined_again"] == second["joined_again"] == 0


@pytest.mark.parametrize(
    ("how", "rank", "said"),
    [
        ("output", 1, "rank 1: told to say so"),
        ("output", 0, "told to say so"),
        ("exit", 1, "rank 1: SystemExit: 9"),
    ],
)
def test_an_error_in_an_output_and_an_exit_of_a_model_are_failures_of_the_tick(
    two_ranks: RankProcesses, how: str, rank: int, said: str
) -> None:
    first, second = play(two_ranks, START, tick(fault={"ranks": [rank], "before": 2, "as": how}), tick())

    assert first["outcomes"][1] == ("ModelError", "model_error", said)
    assert second["records"][1]["resident"] == ()
    assert first["outcomes"][2] == 0.0


def test_after_an_exchange_that_failed_ranks_exchange_anew(two_ranks: RankProcesses) -> None:
    fault = {"ranks": [0, 1], "before": 1, "as": "timed out"}
    first, second = play(two_ranks, START, tick(fault=fault), tick())

    assert first["outcomes"][1] == ("RuntimeError", None, "timed out")
    assert first["outcomes"][2] == 0.0
    assert first["joined_again"] == second["joined_again"] == 1


def test_ranks_that_hold_different_pages_are_found_when_idle_and_end(two_ranks: RankProcesses) -> None:
    made = two_ranks.run(
        "support.rank_engines:play",
        script=[START, tick(), tick("b"), ("lose", {"session": "a"}), ("check_integrity", {})],
    )

    assert made[0]["outcomes"][-1][:2] == ("RankMismatchError", "kv_state")
    assert made[1]["fatal"] == "RankMismatchError"


def test_pages_that_are_missing_on_one_rank_end_all(two_ranks: RankProcesses) -> None:
    made = two_ranks.run(
        "support.rank_engines:play", script=[START, tick(), ("leak", {}), ("check_integrity", {})]
    )

    assert made[0]["outcomes"][-1][:2] == ("KVStateError", "kv_state")
    assert made[1]["fatal"] == "RankMismatchError"
