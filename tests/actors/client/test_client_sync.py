"""The client without an event loop."""

import threading
from collections.abc import Iterator

import pytest

from actors.client import SessionStart
from actors.sync_client import SyncSessionClient
from contracts.commands import Op
from contracts.errors import BrokerError, SessionNotFoundError, WorldlineError
from contracts.lifecycle import Status
from support.answerer import Answerer, answerer_in_thread, chunk_fields
from support.broker import RealBroker


@pytest.fixture
def served(broker: RealBroker) -> Iterator[Answerer]:
    with answerer_in_thread(broker.url) as running:
        yield running


def test_the_same_calls_block(served: Answerer, broker: RealBroker) -> None:
    with SyncSessionClient("world-1", broker.url) as session:
        assert session.create(model="reference", seed=1) == SessionStart("life-1", 0, -1)
        assert session.next_chunk().chunk_index == 0
        session.run(100)
        session.pause()
        assert session.reset().life == "life-2"
        assert session.close() is Status.CLOSED

    assert [command.op for command in served.seen] == [
        Op.CREATE,
        Op.NEXT_CHUNK,
        Op.RUN,
        Op.PAUSE,
        Op.RESET,
        Op.CLOSE,
    ]


def test_errors_come_through(served: Answerer, broker: RealBroker) -> None:
    served.handlers[Op.NEXT_CHUNK] = lambda command: SessionNotFoundError("no session world-1")
    with SyncSessionClient("world-1", broker.url) as session, pytest.raises(SessionNotFoundError):
        session.next_chunk()


def test_a_watch_is_a_plain_loop(served: Answerer, broker: RealBroker) -> None:
    keys = served.keys.session("world-1")
    with broker.client() as client:
        client.hset(keys.state, "status", "ACTIVE")
        for index in range(3):
            fields = chunk_fields(
                "world-1", index, applied_event_ids="[]", frames="f", accepted_to_applied_ms=1
            )
            client.xadd(keys.chunks, fields)

    with SyncSessionClient("world-1", broker.url) as session:
        seen = []
        for chunk in session.watch(from_start=True):
            seen.append(chunk.chunk_index)
            if len(seen) == 2:
                break

    assert seen == [0, 1]


def test_it_is_used_in_a_with_block(broker: RealBroker) -> None:
    session = SyncSessionClient("world-1", broker.url)

    with pytest.raises(WorldlineError, match="with"):
        session.state()


def test_a_broker_that_is_not_there_leaves_no_thread() -> None:
    with pytest.raises(BrokerError), SyncSessionClient("world-1", "redis://127.0.0.1:1/0"):
        pass

    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("session ")] == []
