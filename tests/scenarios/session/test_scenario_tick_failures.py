"""A chunk that fails: the session is FAILED and says why, nothing is committed, the memory is released once."""

import json
from typing import Any

import pytest

from actors.reducers.base import PreparedControls
from contracts.events import ARDiffusionControlInput
from support.hosting import Caller
from support.reducers import ScriptedReducer
from support.scripted_worker import ScriptedWorker, failing, output_of


async def fails(world: Caller, worker: ScriptedWorker, code: str) -> dict[str, Any]:
    """Sends a tick that must fail with `code`, and checks what every failure has in common."""
    before = await world.state()
    releases = worker.kinds().count("release")
    pending = await world.pending()

    error = await world.refused("next_chunk")

    after = await world.until("FAILED")
    assert error["code"] == after["failure_code"] == code
    assert error["message"] == after["failure_message"]
    for name in ("chunk_index", "event_floor", "prompt", "controls", "reducer_state", "last_request_id"):
        assert after.get(name) == before.get(name), name
    assert await world.pending() == pending
    assert worker.kinds().count("release") == releases + 1
    assert worker.requests[-1]["life"] == before["life"]
    refused = await world.refused("next_chunk")
    assert refused["code"] == "invalid_state"
    assert "failed" in refused["message"]
    return error


async def test_a_model_that_raises_fails_its_session_and_the_neighbour_never_notices(
    world: Caller, neighbour: Caller, worker: ScriptedWorker
) -> None:
    # Given two sessions with a chunk each, and an event that waits
    for caller in (world, neighbour):
        await caller.accept(1, "p")
        await caller.ok("next_chunk")
    await world.accept(2, "q")
    worker.on_request = lambda request: failing()(request) if "world-1" in request.get("tick", "") else None

    # When the model raises
    error = await fails(world, worker, "model_error")

    # Then its message came through, and the neighbour goes on
    assert error["message"] == "boom"
    assert not error["retryable"]
    assert (await neighbour.ok("next_chunk"))["chunk_index"] == 1
    assert (await neighbour.state())["status"] == "ACTIVE"


@pytest.mark.parametrize(
    "code", ["execution_timeout", "payload_lost", "worker_restarted", "not_resident", "parent_mismatch"]
)
async def test_the_failure_code_is_the_workers(world: Caller, worker: ScriptedWorker, code: str) -> None:
    worker.on_request = failing(code)
    await fails(world, worker, code)


async def test_a_code_that_is_no_failure_code_is_the_models(world: Caller, worker: ScriptedWorker) -> None:
    worker.on_request = failing("pool_exhausted", "no page left")
    error = await fails(world, worker, "model_error")
    assert error["message"] == "pool_exhausted: no page left"


ANY: list[Any] = [None, True, 1.5, "x", [], {}, -1]
WRONG: dict[str, list[Any]] = {
    "session_id": ["world-2", "", *ANY],
    "request_id": ["ar-world-1-0-00", "", *ANY],
    "chunk_index": [1, 2**53, "0", False, *ANY],
    "applied_event_ids": [
        [],
        [1],
        [1, 2, 3],
        [2, 1],
        [1, 1, 2],
        [1, True],
        [1.0, 2],
        ["1", "2"],
        "1,2",
        None,
        {},
        3,
    ],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}={value!r}" for name, value in CASES])
async def test_metadata_that_differs_in_one_field_is_not_committed(
    world: Caller, worker: ScriptedWorker, name: str, value: Any
) -> None:
    await world.accept(1, "p")
    await world.accept(2, "p")
    worker.on_request = lambda request: (
        {"output": output_of(json.loads(request["tick"]), **{name: value})}
        if request["kind"] == "tick"
        else None
    )
    await fails(world, worker, "metadata_mismatch")


def _without(name: str) -> Any:
    def change(output: dict[str, Any]) -> None:
        del output["metadata"]["ar_diffusion"][name]

    return change


ENVELOPES: dict[str, Any] = {
    "no session_id": _without("session_id"),
    "no request_id": _without("request_id"),
    "no chunk_index": _without("chunk_index"),
    "no applied_event_ids": _without("applied_event_ids"),
    "an unknown field": lambda output: output["metadata"]["ar_diffusion"].update(more=1),
    "no envelope": lambda output: output["metadata"].clear(),
    "an envelope that is a list": lambda output: output["metadata"].update(ar_diffusion=[]),
    "metadata that is a list": lambda output: output.update(metadata=[]),
    "no metadata": lambda output: output.pop("metadata"),
    "no payload": lambda output: output.pop("payload"),
    "a blank payload": lambda output: output.update(payload=" "),
    "negative bytes": lambda output: output.update(bytes=-1),
    "bytes that are a bool": lambda output: output.update(bytes=True),
    "frames that are a number": lambda output: output.update(frames=1),
}


@pytest.mark.parametrize("what", ENVELOPES)
async def test_an_output_with(world: Caller, worker: ScriptedWorker, what: str) -> None:
    def script(request: dict[str, str]) -> dict[str, Any] | None:
        if request["kind"] != "tick":
            return None
        output = output_of(json.loads(request["tick"]))
        ENVELOPES[what](output)
        return {"output": output}

    worker.on_request = script
    await fails(world, worker, "metadata_mismatch")


REPLIES: dict[str, dict[str, Any]] = {
    "neither output nor error": {"nothing": 1},
    "an output that is a string": {"output": "done"},
    "an output that is null": {"output": None},
    "an error that is a string": {"error": "boom"},
    "an error that is null": {"error": None},
    "a fractional queued_ms": {"output": {}, "queued_ms": 0.5},
    "no incarnation": {"output": {}, "incarnation": None},
}


@pytest.mark.parametrize("what", REPLIES)
async def test_a_reply_with(world: Caller, worker: ScriptedWorker, what: str) -> None:
    worker.on_request = lambda request: REPLIES[what] if request["kind"] == "tick" else None
    await fails(world, worker, "metadata_mismatch")


@pytest.mark.parametrize("where", ["prepare", "commit"])
async def test_a_reducer_that_raises_fails_the_session(
    stranger: Caller, worker: ScriptedWorker, reducer: type[ScriptedReducer], where: str
) -> None:
    await stranger.ok("create", model="scripted", reducer="scripted")
    await stranger.event(1, prompt="p")
    await stranger.ok("next_chunk")
    await stranger.event(2, prompt="q")
    ticks = worker.kinds().count("tick")
    reducer.fails_in = where
    commits = reducer.calls.count("commit")

    error = await fails(stranger, worker, "reducer_failed")

    assert f"RuntimeError: {where} broke" in error["message"]
    assert worker.kinds().count("tick") == ticks + (where == "commit")
    assert reducer.calls.count("commit") == commits + (where == "commit")


CAMERA = ARDiffusionControlInput("camera", "s", {})


@pytest.mark.parametrize(
    "prepared",
    [
        "not prepared controls",
        PreparedControls((CAMERA, CAMERA)),
        PreparedControls(("camera",)),  # type: ignore[arg-type]
        PreparedControls((), private_state=object()),
        PreparedControls((), private_state=float("nan")),
    ],
    ids=["another type", "two values a track", "no controls", "a state that is no JSON", "a state with NaN"],
)
async def test_a_reducer_that_prepares(
    stranger: Caller, worker: ScriptedWorker, reducer: type[ScriptedReducer], prepared: Any
) -> None:
    await stranger.ok("create", model="scripted", reducer="scripted")
    reducer.returns = prepared

    await fails(stranger, worker, "reducer_failed")

    assert worker.ticks() == []


async def test_a_reducer_whose_check_raises_anything_refuses_the_event_only(
    stranger: Caller, reducer: type[ScriptedReducer]
) -> None:
    await stranger.ok("create", model="scripted", reducer="scripted")
    reducer.fails_in = "check"
    await stranger.event(1, prompt="p")

    assert (await stranger.ok("next_chunk"))["applied_event_ids"] == []
    assert [(e["event_id"], e["reason"]) for e in await stranger.rejected()] == [("1", "invalid_control")]


async def test_an_unknown_reducer_is_refused_at_the_creation(stranger: Caller) -> None:
    error = await stranger.refused("create", model="scripted", reducer="nobody")

    assert (error["code"], error["field"]) == ("invalid_argument", "reducer")
    assert await stranger.state() == {}


async def test_a_release_that_fails_after_a_failure_keeps_the_room_until_a_close_succeeds(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given a tick that fails, and a worker that can't release either
    worker.on_request = lambda request: failing(kind="tick")(request) or failing(kind="release")(request)
    await world.refused("next_chunk")
    await world.until("FAILED")
    assert await world.client.hexists("wl:{w:w0}:sessions", "world-1")

    # When the session is closed later
    worker.on_request = None
    await world.ok("close")

    # Then the room is free again
    assert not await world.client.hexists("wl:{w:w0}:sessions", "world-1")


async def test_an_expired_tick_leaves_the_session_active_and_its_events_pending(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.accept(1, "p")
    worker.on_request = failing("expired", "waited too long", times=1)

    error = await world.refused("next_chunk")

    assert (error["code"], error["retryable"]) == ("expired", True)
    state = await world.until("ACTIVE")
    assert (state["chunk_index"], state["event_floor"]) == ("0", "-1")
    assert "release" not in worker.kinds()
    chunk = await world.ok("next_chunk")
    assert (chunk["chunk_index"], chunk["applied_event_ids"]) == (0, [1])


async def test_events_are_refused_naming_the_state_while_a_session_is_failed(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.on_request = failing()
    await world.accept(1, "p")
    await world.refused("next_chunk")

    with pytest.raises(RuntimeError, match="failed"):
        await world.accept(2, "q")
    await world.event(3, prompt="bare")
    assert (await world.ok("sweep"))["pending"] == 1
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("3", "not_active")]


@pytest.mark.parametrize("key", ["events", "ids", "chunks", "ticks", "answers", "answered", "history"])
async def test_a_key_of_a_foreign_type_harms_its_own_session_only(
    world: Caller, neighbour: Caller, worker: ScriptedWorker, key: str
) -> None:
    # Given a tick in flight, and a string where a stream or hash should be
    worker.gate.clear()
    await world.send("next_chunk")
    await worker.arrived(1)
    await world.client.set(f"{world.base}:{key}", "collision")

    # When the reply comes
    worker.gate.set()

    # Then nobody waits for ever: the neighbour goes on, and the session says what is wrong once the key is repaired
    await neighbour.ok("next_chunk")
    await world.client.delete(f"{world.base}:{key}")
    answer = await world.call("next_chunk")
    assert answer["ok"] or answer["error"]["code"] in {"invalid_state", "corrupt_data"}
    await world.ok("close")
    await world.client.delete(
        *[f"{world.base}:{name}" for name in ("history", "answers", "answered", "chunks", "state")]
    )
    await world.client.zrem("wl:sessions:CLOSED", "world-1")
