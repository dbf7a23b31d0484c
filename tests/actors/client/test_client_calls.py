"""Commands and their answers."""

import asyncio

import pytest

from actors.broker_pool import Broker, NoHostError
from actors.calls import AnswerTimeoutError
from actors.client import SessionClient, SessionStart
from contracts.commands import Op
from contracts.errors import (
    BrokerError,
    CorruptDataError,
    InvalidArgumentError,
    NoCapacityError,
    SessionNotFoundError,
    SessionStateError,
    TickFailedError,
)
from contracts.lifecycle import Status
from support.answerer import Answerer, chunk_fields
from support.broker import RealBroker
from support.relay import Relay

SOON_S = 15
"""Far less than a call waits for its answer."""


async def test_each_call_sends_its_command_and_returns_the_typed_result(
    answerer: Answerer, pool: Broker
) -> None:
    async with SessionClient("world-1", pool) as session:
        start = await session.create(
            model="reference", reducer="lingbot-camera", seed=3, prompt="hills", params={"k": [1]}, pace_ms=20
        )
        chunk = await session.next_chunk()
        await session.run(150)
        await session.run()
        await session.pause()
        again = await session.reset()
        closed = await session.close("enough")

    assert start == SessionStart("life-1", 0, -1)
    assert (chunk.chunk_index, chunk.applied_event_ids, chunk.frames) == (0, (), None)
    assert again == SessionStart("life-2", 0, 7)
    assert closed is Status.CLOSED
    sent = [(command.op, dict(command.args)) for command in answerer.seen]
    assert sent[0] == (
        Op.CREATE,
        {
            "model": "reference",
            "reducer": "lingbot-camera",
            "seed": 3,
            "prompt": "hills",
            "params": {"k": [1]},
            "recording": "last 1000",
            "max_pending_events": 256,
            "pace_ms": 20,
        },
    )
    assert sent[1:] == [
        (Op.NEXT_CHUNK, {}),
        (Op.RUN, {"pace_ms": 150}),
        (Op.RUN, {}),
        (Op.PAUSE, {}),
        (Op.RESET, {}),
        (Op.CLOSE, {"reason": "enough"}),
    ]


@pytest.mark.parametrize(
    "error",
    [
        SessionNotFoundError("session world-1 does not exist", field="session_id"),
        SessionStateError("session world-1 is closing", field="status"),
        NoCapacityError("all workers of reference are full", field="model"),
        TickFailedError("the worker was lost", code="worker_lost"),
    ],
    ids=lambda error: error.code,
)
async def test_an_error_comes_back_as_the_error_it_was(answerer: Answerer, pool: Broker, error) -> None:
    answerer.handlers[Op.NEXT_CHUNK] = lambda command: error
    session = SessionClient("world-1", pool)

    with pytest.raises(type(error)) as raised:
        await session.next_chunk()

    assert (raised.value.code, raised.value.field, str(raised.value)) == (error.code, error.field, str(error))
    assert raised.value.retryable == error.retryable


async def test_bad_arguments_are_refused_before_anything_is_sent(answerer: Answerer, pool: Broker) -> None:
    session = SessionClient("world-1", pool)

    with pytest.raises(InvalidArgumentError) as raised:
        await session.create(model="reference", seed=-1)
    assert raised.value.field == "seed"
    with pytest.raises(InvalidArgumentError):
        await session.run(-5)
    with pytest.raises(InvalidArgumentError):
        SessionClient("not a legal id", pool)

    assert answerer.seen == []


async def test_two_hundred_clients_on_fifty_sessions_each_get_their_own_answer(
    answerer: Answerer, pool: Broker
) -> None:
    answerer.handlers[Op.CREATE] = lambda command: {
        "life": f"life of {command.args['prompt']}",
        "chunk_index": 0,
        "event_floor": -1,
    }

    async def one(number: int) -> str:
        session = SessionClient(f"world-{number % 50}", pool)
        return (await session.create(model="reference", prompt=str(number))).life

    lives = await asyncio.gather(*(one(number) for number in range(200)))

    assert lives == [f"life of {number}" for number in range(200)]


async def test_a_command_client_is_never_held_up_by_calls_that_wait(answerer: Answerer, pool: Broker) -> None:
    answerer.handlers[Op.NEXT_CHUNK] = lambda command: None
    waiting = [asyncio.create_task(SessionClient(f"w-{n}", pool).next_chunk()) for n in range(300)]
    while len(answerer.seen) < 300:
        await asyncio.sleep(0.02)

    await pool.commands.ping()

    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    _, still_waiting = await asyncio.wait(waiting, timeout=5)
    assert not still_waiting
    assert all(task.cancelled() for task in waiting)


async def test_a_call_that_is_cancelled_never_spoils_the_reply_of_the_next(
    answerer: Answerer, relay: Relay
) -> None:
    relay.delay_s = 0.01
    async with Broker(relay.url) as pool:
        session = SessionClient("world-1", pool)
        for pause in range(60):
            doomed = asyncio.create_task(session.next_chunk())
            await asyncio.sleep(pause / 1000)
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
            if pause % 5 == 0:
                answerer.handlers[Op.RESET] = lambda command, n=pause: {
                    "life": f"life-{n}",
                    "chunk_index": 0,
                    "event_floor": n,
                }
                assert await session.reset() == SessionStart(f"life-{pause}", 0, pause)


async def test_a_lost_reply_to_the_command_sends_the_same_id_and_acts_once(
    answerer: Answerer, relay: Relay
) -> None:
    async with Broker(relay.url) as pool:
        session = SessionClient("world-1", pool)
        lost = relay.drop_reply(b"XADD")

        chunk = await session.next_chunk()

    assert lost.happened
    assert chunk.chunk_index == 0
    assert len({command.command_id for command in answerer.seen}) == 1
    assert set(answerer.carried_out.values()) == {1}


async def test_a_broker_that_is_away_when_the_lease_is_looked_at_is_borne_with(
    answerer: Answerer, relay: Relay
) -> None:
    async with Broker(relay.url) as pool:
        session = SessionClient("world-1", pool)
        await session.next_chunk()
        pool._owned_until.clear()
        lost = relay.drop_reply(b"lease")

        assert (await session.next_chunk()).chunk_index >= 0

    assert lost.happened


async def test_an_answer_that_is_lost_on_the_way_is_found_again(answerer: Answerer, relay: Relay) -> None:
    async with Broker(relay.url) as pool:
        session = SessionClient("world-1", pool)
        lost = relay.drop_reply(b"XREAD\r\n")

        chunk = await session.next_chunk()

    assert lost.happened
    assert chunk.chunk_index == 0
    assert set(answerer.carried_out.values()) == {1}


async def test_an_answer_that_was_trimmed_away_is_found_by_its_id(answerer: Answerer, pool: Broker) -> None:
    session = SessionClient("world-1", pool)
    keys = answerer.keys.session("world-1")
    answerer.delay_s = 0.2
    waiting = asyncio.create_task(session.next_chunk())
    while not answerer.seen:
        await asyncio.sleep(0.01)
    await (
        pool.blocking.connection_pool.disconnect()
    )  # the read is broken, and comes back too late for the entry
    answerer.delay_s = 0.0
    await answerer.answer(answerer.seen[0])
    await answerer.client.delete(keys.answers)

    assert (await waiting).chunk_index == 0


async def test_the_same_command_id_gets_the_same_answer_again(answerer: Answerer, pool: Broker) -> None:
    session = SessionClient("world-1", pool)

    first = await session.next_chunk(command_id="mine")
    second = await session.next_chunk(command_id="mine")

    assert first == second
    assert answerer.carried_out["mine"] == 1


async def test_no_answer_in_time_is_a_typed_error_that_names_the_command(
    answerer: Answerer, pool: Broker
) -> None:
    answerer.handlers[Op.NEXT_CHUNK] = lambda command: None
    session = SessionClient("world-1", pool, timeout_s=0.3)

    with pytest.raises(AnswerTimeoutError) as raised:
        await session.next_chunk()

    assert isinstance(raised.value, TimeoutError)
    assert raised.value.retryable
    assert raised.value.command_id == answerer.seen[0].command_id


async def test_without_a_host_nothing_is_sent_and_the_error_says_so(broker: RealBroker, pool: Broker) -> None:
    with pytest.raises(NoHostError, match="worldline host"):
        await SessionClient("world-1", pool).close()

    with broker.client() as client:
        assert client.dbsize() == 0


async def test_a_lease_that_has_run_out_is_no_host(answerer: Answerer, pool: Broker) -> None:
    await answerer.own(lease_ms=-60_000)

    with pytest.raises(NoHostError):
        await SessionClient("world-1", pool).next_chunk()

    assert answerer.seen == []


async def test_a_host_that_comes_up_meanwhile_is_waited_for(broker: RealBroker) -> None:
    async with Broker(broker.url, host_wait_s=5) as pool:
        waiting = asyncio.create_task(SessionClient("world-1", pool).next_chunk())
        await asyncio.sleep(0.2)
        async with Answerer(broker.url):
            assert (await waiting).chunk_index == 0


async def test_a_broker_that_is_not_there_is_said_soon() -> None:
    with pytest.raises(BrokerError):
        async with asyncio.timeout(SOON_S), SessionClient("world-1", "redis://127.0.0.1:1/0"):
            pass


async def test_a_broker_that_accepts_but_never_answers_is_said_soon() -> None:
    gone = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        gone.set()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    with pytest.raises(BrokerError, match="does not answer"):
        async with asyncio.timeout(SOON_S), SessionClient("world-1", f"redis://127.0.0.1:{port}/0"):
            pass

    await gone.wait()
    server.close()
    await server.wait_closed()


async def test_foreign_answers_are_passed_over(answerer: Answerer, pool: Broker) -> None:
    keys = answerer.keys.session("world-1")
    answerer.delay_s = 0.2
    waiting = asyncio.create_task(SessionClient("world-1", pool).next_chunk())
    await asyncio.sleep(0.05)
    await answerer.client.xadd(keys.answers, {"answer": "not json"})
    await answerer.client.xadd(keys.answers, {"something": "else"})

    assert (await waiting).chunk_index == 0


async def test_a_key_of_the_wrong_type_is_named(answerer: Answerer, pool: Broker) -> None:
    keys = answerer.keys.session("world-1")
    await answerer.client.set(keys.answers, "x")

    with pytest.raises(CorruptDataError) as raised:
        await SessionClient("world-1", pool).next_chunk()

    assert raised.value.field == keys.answers


async def test_a_chunk_carries_what_the_answer_says(answerer: Answerer, pool: Broker) -> None:
    answerer.handlers[Op.NEXT_CHUNK] = lambda command: chunk_fields(
        "world-1", 3, applied_event_ids=[4, 9], frames="redis:frames", accepted_to_applied_ms=12
    )

    chunk = await SessionClient("world-1", pool).next_chunk()

    assert (chunk.chunk_index, chunk.applied_event_ids, chunk.frames) == (3, (4, 9), "redis:frames")
    assert chunk.accepted_to_applied_ms == 12
