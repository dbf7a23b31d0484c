"""What a worker makes of each kind of request, on a real server."""

import asyncio
from typing import Any

import pytest

from contracts.messages import NoticeKind
from contracts.payloads import PayloadStore, decode_frames, decode_payload
from contracts.tick import metadata_from_envelope
from support.fake_host import FakeHost
from support.noop_engine import FRAMES_SHAPE, expected_digest
from support.worker_runner import WorkerRunner, malformed


# ------------------------------------------------------------------------------------------------ the plain way
async def test_a_chunk_is_made_stored_and_answered(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker()
    world = await host.create("world-1", frames=True)
    request = world.tick(prompt="a forest")

    reply = await host.run(request)

    assert reply.output is not None
    assert metadata_from_envelope(reply.output.metadata).request_id == request.request_id
    assert (reply.life, reply.incarnation) == (world.life, running.worker.incarnation)
    store = PayloadStore(host.client)
    payload = await store.read(reply.output.payload)
    assert len(payload) == reply.output.bytes
    assert decode_payload(payload)["latents"].tobytes() == expected_digest(world.seed, request.tick)
    assert decode_frames(await store.read(reply.output.frames)).shape == FRAMES_SHAPE


async def test_payloads_in_the_broker_expire(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker(payload_ttl_ms=50_000)
    reply = await host.run((await host.create("world-1")).tick())

    key = reply.output.payload.removeprefix("redis:")
    assert 0 < await host.client.pttl(key) <= 50_000


async def test_memory_persists_from_chunk_to_chunk(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world = await host.create("world-1")
    ticks = []
    for _ in range(3):
        request = world.tick()
        ticks.append(request.tick)
        reply = world.committed(await host.run(request))

    payload = decode_payload(await PayloadStore(host.client).read(reply.output.payload))
    assert payload["latents"].tobytes() == expected_digest(world.seed, *ticks)


async def test_payloads_go_to_a_folder_where_one_is_set(
    host: FakeHost, start_worker: WorkerRunner, tmp_path
) -> None:
    await start_worker(payload_url=f"file://{tmp_path}")
    reply = await host.run((await host.create("..", frames=True)).tick())

    assert reply.output.payload.startswith(f"file://{tmp_path}/")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert decode_payload(await PayloadStore().read(reply.output.payload)).keys() == {"latents"}


async def test_a_finished_request_is_acknowledged_deleted_and_leaves_the_worker_idle(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    await host.run((await host.create("world-1")).tick())

    await host.until(host.stream_is_empty)
    pending = await host.client.xpending(host.worker.requests, "worker")
    assert pending["pending"] == 0
    assert "busy_since" not in await host.info()


async def test_a_worker_is_marked_busy_while_it_runs(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world = await host.create("world-1", sleep_ms=400)
    entry_id = await host.send(world.tick())

    async def busy_since() -> int:
        return int((await host.info()).get("busy_since", 0))

    began_ms = await host.until(busy_since)
    assert began_ms >= int(entry_id.partition(b"-")[0])
    reply = await host.reply()
    assert reply.executed_ms >= 390
    assert reply.queued_ms < 300


async def test_heartbeats_go_on_while_the_engine_works(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker(heartbeat_ms=50)
    await host.send((await host.create("world-1", sleep_ms=600)).tick())
    await asyncio.sleep(0.15)
    before = int((await host.info())["last_seen_ms"])
    await asyncio.sleep(0.25)

    assert int((await host.info())["last_seen_ms"]) > before
    await host.reply()


# ------------------------------------------------------------------------------------------------ fences and records
async def test_a_lower_fence_is_dropped_silently(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    late = world.tick()
    await host.run(world.tick())

    await host.send(late, inflight=False)
    await host.nothing_more()
    assert running.engine.calls.count(("tick", "world-1")) == 1
    assert await host.stream_is_empty()


async def test_a_request_that_ran_is_answered_from_the_record_under_the_new_fence(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    request = world.tick()
    first = await host.run(request)

    again = await host.run(world.again(request))

    assert again.fence == first.fence + 1
    assert (again.output, again.life, again.executed_ms) == (first.output, first.life, first.executed_ms)
    assert running.engine.calls.count(("tick", "world-1")) == 1


async def test_a_failure_is_recorded_as_run_too(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker()
    world = await host.create("world-1", fail_at=0)
    request = world.tick()
    await host.run(request)

    assert (await host.run(world.again(request))).error.code == "model_error"
    assert running.engine.calls.count(("tick", "world-1")) == 1


async def test_a_fence_outlives_the_release(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world = await host.create("world-1")
    late = world.tick()
    await host.chunk(world)
    await host.run(world.release())

    await host.send(late)  # the state names it, and it is chunk 0: only the fence stands in its way
    await host.nothing_more()


# ------------------------------------------------------------------------------------------------ expiry
async def test_an_expired_tick_is_refused_and_not_recorded_as_run(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1")
    request = world.tick()

    refused = await host.run(request, expires_in_ms=-1)
    assert (refused.error.code, refused.error.retryable) == ("expired", True)

    assert (await host.run(world.again(request))).output is not None


async def test_only_ticks_expire(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world = await host.create("world-1")
    release = world.release()
    entry = release.to_entry() | {"expires_at_ms": "1"}

    await host.client.xadd(host.worker.requests, entry)
    assert (await host.reply()).error is None


# ------------------------------------------------------------------------------------------------ where a tick may run
async def test_a_tick_beyond_chunk_0_of_a_session_that_is_not_here_is_refused(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1")
    world.chunk_index, world.last_request_id = 4, "ar-world-1-3-x"

    assert (await host.run(world.tick())).error.code == "not_resident"


async def test_a_tick_of_another_life_beyond_chunk_0_leaves_the_present_one_alone(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)

    assert (await host.run(world.tick(life="another"))).error.code == "not_resident"
    assert running.engine.is_resident("world-1")
    await host.chunk(world)


async def test_a_tick_that_does_not_follow_the_last_chunk_is_refused(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)

    assert (
        await host.run(world.tick(parent_request_id="ar-world-1-0-other"))
    ).error.code == "parent_mismatch"


async def test_chunk_0_follows_the_life(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world = await host.create("world-1")

    assert (await host.run(world.tick(parent_request_id="else"))).error.code == "parent_mismatch"


async def test_chunk_0_is_not_made_twice_when_the_commit_was_lost(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1")
    await host.run(world.tick())

    assert (await host.run(world.tick())).error.code == "parent_mismatch"


@pytest.mark.parametrize(
    "state", ["nothing in flight", "another request in flight", "no state", "a corrupt record"]
)
async def test_a_tick_that_creates_a_session_runs_only_if_the_state_waits_for_it(
    state: str, host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    if state == "another request in flight":
        await host.set_state(world, inflight='{"request_id":"x","kind":"tick","fence":1,"life":"y"}')
    elif state == "no state":
        await host.drop_state(world)
    elif state == "a corrupt record":
        await host.set_state(world, inflight="{")

    await host.send(world.tick(), inflight=False)
    await host.nothing_more()
    assert ("tick", "world-1") not in running.engine.calls
    assert await host.stream_is_empty()


async def test_a_request_for_another_model_is_refused(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world = await host.create("world-1")

    reply = await host.run(world.tick(model="other"))
    assert (reply.error.code, reply.error.field) == ("model_error", "model")


# ------------------------------------------------------------------------------------------------ failures of the model
@pytest.mark.parametrize(
    ("params", "code", "text"),
    [
        ({"fail_at": 1}, "model_error", "scripted failure"),
        ({"error_at": 1}, "model_error", "scripted error"),
        ({"metadata": {"chunk_index": [{}, float("5e-324")]}, "metadata_at": 1}, None, ""),
    ],
)
async def test_a_failure_of_the_model_is_answered_with_its_code_and_text(
    params: dict[str, Any], code: str | None, text: str, host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world, neighbour = await host.create("world-1", **params), await host.create("neighbour")
    await host.chunk(world)
    await host.chunk(neighbour)

    reply = await host.run(world.tick())
    if code is None:
        assert reply.error is None  # what the metadata says is for the host to judge
    else:
        assert (reply.error.code, text in reply.error.message) == (code, True)
    await host.chunk(neighbour)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, 2**60, {1: 2}])
async def test_metadata_that_json_would_change_is_a_mismatch(
    value: object, host: FakeHost, start_worker: WorkerRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    make = running.engine.execute_tick

    def changed(tick, **options):
        return make(tick, **options | {"params": {"metadata": {"chunk_index": value}}})

    monkeypatch.setattr(running.engine, "execute_tick", changed)
    assert (await host.run(world.tick())).error.code == "metadata_mismatch"


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), StopIteration(), GeneratorExit()]
)
async def test_whatever_an_engine_raises_is_the_session_s_failure_alone(
    error: BaseException, host: FakeHost, start_worker: WorkerRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_worker()
    world, neighbour = await host.create("world-1"), await host.create("world-2")
    make = running.engine.execute_tick

    def raising(tick, **options):
        if tick.session_id == "world-1":
            raise error
        return make(tick, **options)

    monkeypatch.setattr(running.engine, "execute_tick", raising)

    reply = await host.run(world.tick())
    assert (reply.error.code, type(error).__name__ in reply.error.message) == ("model_error", True)
    await host.chunk(neighbour)


async def test_an_engine_may_run_an_event_loop_of_its_own(
    host: FakeHost, start_worker: WorkerRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_worker()
    make = running.engine.execute_tick

    def looping(tick, **options):
        asyncio.run(asyncio.sleep(0.01))
        return make(tick, **options)

    monkeypatch.setattr(running.engine, "execute_tick", looping)
    world = await host.create("world-1")
    for _ in range(3):
        await host.chunk(world)


async def test_nothing_follows_a_failed_chunk_until_a_new_life(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1", fail_at=1)
    await host.chunk(world)
    await host.run(world.tick())

    assert (await host.run(world.tick())).error.code == "not_resident"


# ------------------------------------------------------------------------------------------------ release
async def test_a_release_closes_the_session_and_gives_its_room_back_before_the_reply(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)

    assert (await host.run(world.release())).error is None
    assert not running.engine.is_resident("world-1")
    assert not await host.client.hexists(host.worker.sessions, "world-1")


async def test_a_release_of_a_life_that_is_not_here_succeeds(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")

    assert (await host.run(world.release())).error is None
    assert ("close", "world-1") not in running.engine.calls


async def test_a_release_leaves_any_other_life_alone(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)

    assert (await host.run(world.release(life="an earlier one"))).error is None
    assert running.engine.is_resident("world-1")
    assert await host.client.hexists(host.worker.sessions, "world-1")
    await host.chunk(world)


async def test_a_release_that_fails_says_so_and_the_next_one_works(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1", release_fails=1)
    await host.chunk(world)
    first = world.release()

    assert (await host.run(first)).error.code == "model_error"
    assert (await host.run(world.again(first))).error.code == "model_error"
    assert await host.client.hexists(host.worker.sessions, "world-1")
    assert (await host.run(world.release())).error is None
    assert running.engine.calls.count(("close", "world-1")) == 2


# ------------------------------------------------------------------------------------------------ reset, new lives
async def test_a_reset_frees_the_session_and_its_new_life_starts_at_chunk_0(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)
    reset = world.reset()

    assert (await host.run(reset)).error is None
    assert ("reset", "world-1") in running.engine.calls
    world.begin(reset.request_id)
    request = world.tick()
    reply = await host.run(request)
    payload = decode_payload(await PayloadStore(host.client).read(reply.output.payload))
    assert payload["latents"].tobytes() == expected_digest(world.seed, request.tick)


async def test_a_reset_of_a_session_that_is_not_here_succeeds(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()

    assert (await host.run((await host.create("world-1")).reset())).error is None


async def test_a_reset_that_fails_says_so_and_the_next_one_works(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1", reset_fails=1)
    await host.chunk(world)

    assert (await host.run(world.reset())).error.code == "model_error"
    assert (await host.run(world.reset())).error is None


async def test_chunk_0_of_a_new_life_first_releases_the_other_one(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)
    world.begin("ar-world-1-create-new")

    await host.chunk(world)
    assert ("close", "world-1") in running.engine.calls
    await host.chunk(world)


async def test_a_tick_may_close_its_session(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    world.committed(await host.run(world.tick(close_session=True)))

    assert not running.engine.is_resident("world-1")
    assert (await host.run(world.tick())).error.code == "not_resident"


# ------------------------------------------------------------------------------------------------ eviction
async def test_an_evicted_session_is_told_at_once_with_its_life(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    victim = await host.create("victim")
    await host.chunk(victim)
    greedy = await host.create("greedy", evict="victim", sleep_ms=600)

    await host.send(greedy.tick())
    notice = await host.notice(within_s=0.5)  # while the other's chunk is still being made

    assert (notice.kind, notice.session_id, notice.life) == (NoticeKind.EVICTED, "victim", victim.life)
    assert (notice.worker, notice.incarnation) == ("gpu-0", running.worker.incarnation)
    assert (await host.reply()).error is None
    assert not await host.client.hexists(host.worker.sessions, "victim")
    assert (await host.run(victim.tick())).error.code == "not_resident"


async def test_the_least_recently_used_session_makes_room(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker(capacity=2)
    old, new, newest = [await host.create(name) for name in ("old", "new", "newest")]
    for world in (old, new, newest):
        await host.chunk(world)

    assert (await host.notice()).session_id == "old"
    await host.chunk(new)


# ------------------------------------------------------------------------------------------------ malformed entries
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda e: e.pop("tick"), id="no tick"),
        pytest.param(lambda e: e.update(tick="{"), id="broken tick"),
        pytest.param(lambda e: e.update(tick=[1]), id="tick of another type"),
        pytest.param(lambda e: e.update(kind="dance"), id="unknown kind"),
        pytest.param(lambda e: e.update(params="[]"), id="params no object"),
        pytest.param(lambda e: e.update(seed="x"), id="seed no number"),
        pytest.param(lambda e: e.update(expires_at_ms="soon"), id="expiry no number"),
        pytest.param(lambda e: e.pop("life"), id="no life"),
        pytest.param(lambda e: e.pop("reply_to"), id="no reply_to"),
        pytest.param(lambda e: e.pop("model"), id="no model"),
    ],
)
async def test_a_malformed_request_is_answered_where_it_can_be_attributed(
    change, host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1")
    request = world.tick()

    await host.client.xadd(host.worker.requests, malformed(request.to_entry(), change))
    reply = await host.reply()

    assert (reply.request_id, reply.fence) == (request.request_id, request.fence)
    assert reply.error.code == "payload_lost"
    await host.chunk(world)
    await host.until(host.stream_is_empty)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"a": "b"}, id="nothing that we know"),
        pytest.param({"kind": b"\xff", "request_id": b"\xff\xfe"}, id="not UTF-8"),
        pytest.param(
            {"kind": "tick", "request_id": "ar-x-0-1", "fence": "many"}, id="a fence that is no number"
        ),
        pytest.param(
            {"kind": "release", "request_id": "r", "fence": "1", "session_id": "a b"}, id="a bad session"
        ),
    ],
)
async def test_a_request_that_nobody_can_be_told_about_is_dropped(
    entry: dict[str, Any], host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1")

    await host.client.xadd(host.worker.requests, entry)
    await host.chunk(world)
    await host.until(host.stream_is_empty)


async def test_a_request_and_a_tick_with_different_ids_are_refused(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    request = world.tick(request_id="ar-world-1-0-a")

    await host.client.xadd(host.worker.requests, request.to_entry() | {"request_id": "ar-world-1-0-b"})
    assert (await host.reply()).error.code == "payload_lost"
    assert ("tick", "world-1") not in running.engine.calls


# ------------------------------------------------------------------------------------------------ cost
async def test_a_chunk_costs_two_round_trips(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker(heartbeat_ms=60_000, worker_lost_after_ms=61_000)
    world = await host.create("world-1")
    await host.chunk(world)

    async def commands() -> dict[str, int]:
        stats = await host.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}

    before = await commands()
    for _ in range(20):
        world.committed(await host.run(world.tick(), inflight=False))
    after = await commands()
    spent = {name: after[name] - before.get(name, 0) for name in after}

    # One read (with the last acknowledgement and the busy mark in it), one transaction (payload and reply).
    assert spent["xreadgroup"] == spent["evalsha"] == spent["exec"] == 20
    assert spent.get("eval", 0) == 0
