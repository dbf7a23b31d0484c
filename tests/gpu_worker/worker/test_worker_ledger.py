"""The record of fences, replies and lives: pure."""

from dataclasses import replace

import pytest

from contracts.messages import WorkerReply, WorkerRequest
from gpu_worker.ledger import Holding, Ledger, Verdict
from support.fake_host import World


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(60.0, clock)


@pytest.fixture
def world() -> World:
    return World("s", "inbox", "ar-s-create-0")


def reply_to(request: WorkerRequest) -> WorkerReply:
    return WorkerReply(request.session_id, request.request_id, request.fence, request.life, "i")


def run(ledger: Ledger, request: WorkerRequest) -> WorkerReply:
    assert ledger.admit(request) is Verdict.RUN
    assert ledger.refusal(request) is None
    ledger.began(request)
    ledger.completed(request)
    ledger.record(reply_to(request))
    return reply_to(request)


def test_fences_only_go_up(ledger: Ledger, world: World) -> None:
    late, now = world.tick(), world.tick()

    assert ledger.admit(now) is Verdict.RUN
    assert ledger.admit(late) is Verdict.DROP
    assert ledger.admit(now) is Verdict.RUN, "the same delivery, read again, was not run yet"


def test_what_ran_is_repeated_under_the_new_fence(ledger: Ledger, world: World) -> None:
    request = world.tick()
    reply = run(ledger, request)
    again = world.again(request)

    assert ledger.admit(again) is Verdict.REPEAT
    assert ledger.repeat(again) == replace(reply, fence=again.fence)


def test_what_was_admitted_but_not_recorded_runs_when_it_comes_again(ledger: Ledger, world: World) -> None:
    request = world.tick()
    ledger.admit(request)

    assert ledger.admit(world.again(request)) is Verdict.RUN


def test_chunks_follow_each_other(ledger: Ledger, world: World) -> None:
    for _ in range(3):
        world.committed(run(ledger, world.tick()))

    wrong = world.tick(parent_request_id="another")
    ledger.admit(wrong)
    assert ledger.refusal(wrong).code == "parent_mismatch"


def test_nothing_follows_a_chunk_that_began_and_did_not_complete(ledger: Ledger, world: World) -> None:
    world.committed(run(ledger, world.tick()))
    failed, next_one = world.tick(), world.tick()
    ledger.admit(failed)
    ledger.began(failed)

    ledger.admit(next_one)
    assert ledger.refusal(next_one).code == "not_resident"
    assert ledger.holds("s", world.life), "its memory still has to be released"


def test_a_released_session_is_not_resident_but_its_fence_is_known(ledger: Ledger, world: World) -> None:
    late = world.tick()
    world.committed(run(ledger, world.tick()))

    assert ledger.released("s") == world.life
    assert ledger.released("s") is None
    assert ledger.holdings() == {}
    assert ledger.admit(late) is Verdict.DROP


def test_holdings_say_which_life_and_as_of_when(ledger: Ledger, world: World) -> None:
    request = world.tick()
    run(ledger, request)

    assert ledger.holdings() == {"s": Holding(world.life, request.fence)}
    ledger.admit(world.again(request))
    assert ledger.holdings()["s"].fence == request.fence + 1


def test_a_record_outlives_the_release_by_one_queue_limit(ledger: Ledger, world: World, clock: Clock) -> None:
    run(ledger, world.tick())
    clock.now_s = 500
    ledger.forget_old()
    assert len(ledger) == 1, "its memory is here"

    ledger.released("s")
    clock.now_s = 559
    ledger.forget_old()
    assert len(ledger) == 1
    clock.now_s = 561
    ledger.forget_old()
    assert len(ledger) == 0


def test_what_is_unknown_is_not_held(ledger: Ledger) -> None:
    assert ledger.life_of("s") is None
    assert ledger.released("s") is None
