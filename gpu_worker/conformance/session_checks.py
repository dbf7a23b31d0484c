"""How sessions live beside each other, start again and end."""

from __future__ import annotations

from collections.abc import Callable

from contracts.errors import NotResidentError
from gpu_worker.conformance.bench import Bench
from gpu_worker.conformance.memory import live_bytes
from gpu_worker.conformance.subject import NotApplicableError, require


def binding(bench: Bench) -> None:
    """The KV state is used inside the call only: nothing of the pipeline refers to it afterwards."""
    bench.probe.lend = True
    session_id = bench.session("world")
    for index in range(3):
        bench.tick(session_id)
        require(not bench.probe.loan_is_kept(), f"the KV state is still referred to after chunk {index}")
    bench.probe.lend = False
    bench.close(session_id)


def reset(bench: Bench) -> None:
    """After a reset the session is a new world: chunk 0 and all after it as from a fresh start."""
    session_id = bench.session("world")
    first = bench.run(session_id, 3)
    bench.reset(session_id)
    require(bench.probe.resets == [session_id], "the reset hook was not called once")
    bench.require_all_free("after the reset")
    require(bench.run(session_id, 3) == first, "a session that was reset does not repeat its first life")
    bench.close(session_id)


def release(bench: Bench) -> None:
    """A closed session leaves nothing: no page, no tensor, and a later one of that name is a new world."""
    session_id = bench.session("world")
    first = bench.run(session_id, 3)
    bench.close(session_id)
    before = live_bytes(bench.subject.device)
    other = bench.session("other")
    bench.run(other, 3)
    bench.probe.forget_calls()
    bench.close(other)
    require(bench.probe.closes == [other], "the close hook was not called once")
    bench.require_all_free("after the close")
    kept = live_bytes(bench.subject.device) - before
    require(kept <= 0, f"{kept} bytes of tensors are still kept after the close")
    require(bench.run(session_id, 3) == first, "a session that was closed goes on instead of starting anew")
    bench.close(session_id)


def interleaving(bench: Bench) -> None:
    """Two sessions that take turns yield what each of them yields alone."""
    if bench.capacity < 2:
        raise NotApplicableError("only one session can be resident")
    count = 4
    alone = [bench.alone(f"alone-{seed}", count, seed=seed) for seed in (1, 2)]
    together: list[list[str]] = [[], []]
    for _ in range(count):
        for index, digests in enumerate(together):
            digests.append(bench.tick(bench.session(f"turn-{index}"), seed=index + 1).digest)
    for index in range(2):
        bench.close(bench.session(f"turn-{index}"))
        require(together[index] == alone[index], "sessions that take turns change each other")


def eviction(bench: Bench) -> None:
    """One session too many drops the least recently used one, through the close hook, and no other is touched."""
    room = bench.capacity
    seeds = range(1, room + 2)
    alone = {seed: bench.alone(f"alone-{seed}", 2, seed=seed) for seed in seeds}
    names = {seed: bench.session(f"world-{seed}") for seed in seeds}
    evicted: list[str] = []
    bench.runner.on_evict = evicted.append
    bench.probe.forget_calls()
    made = {seed: [bench.tick(names[seed], seed=seed).digest] for seed in seeds}
    require(bench.probe.closes == [names[1]], "the close hook was not called once, for the evicted session")
    require(evicted == [names[1]], "not the least recently used session was evicted")
    for seed in list(seeds)[1:]:
        made[seed].append(bench.tick(names[seed], seed=seed).digest)
        require(made[seed] == alone[seed], "an eviction changed a session that stayed")
    _require_refused(lambda: bench.tick(names[1]))
    bench.restarts(names[1])
    again = bench.tick(names[1], seed=1).digest
    require(again == alone[1][0], "an evicted session does not start anew at chunk 0")
    bench.close_all()
    bench.require_all_free("after the eviction")


def _require_refused(call: Callable[[], object]) -> None:
    try:
        call()
    except NotResidentError:
        return
    require(False, "a session that is not resident was continued")
