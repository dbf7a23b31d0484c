"""The relay passes everything on, and loses exactly the reply that it was told to lose."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from support.broker import RealBroker, plain_options, wait_until
from support.relay import Relay


@pytest.fixture
def client(relay: Relay):
    with redis.Redis.from_url(relay.url, **plain_options()) as client:
        yield client


def test_passes_everything_on(client: redis.Redis) -> None:
    big = bytes(range(256)) * 4_096

    client.set("big", big)

    assert client.get("big") == big


def test_loses_the_reply_of_the_nth_matching_request_and_only_that(
    broker: RealBroker, relay: Relay, client: redis.Redis
) -> None:
    lost = relay.drop_reply(b"INCR", nth=2)

    assert client.incr("n") == 1
    assert client.get("n") == b"1"
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert lost.happened
    assert client.incr("n") == 3  # the second was carried out, unheard

    with broker.client() as direct:
        assert direct.get("n") == b"3"


def test_a_match_across_two_packets_counts(broker: RealBroker, relay: Relay) -> None:
    lost = relay.drop_reply(b"needle")

    with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as connection:
        connection.sendall(b"*2\r\n$4\r\nECHO\r\n$6\r\nnee")
        time.sleep(0.1)
        connection.sendall(b"dle\r\n")

        assert connection.recv(100) == b""
    assert lost.happened


def test_cuts_connections_and_takes_new_ones(relay: Relay, client: redis.Redis) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.blpop, ["nothing"], 5)
        wait_until(lambda: relay.connections, what="the connection")

        relay.sever()

        with pytest.raises(redis.ConnectionError):
            waiting.result(5)
    assert client.ping()


def test_delays_requests(relay: Relay, client: redis.Redis) -> None:
    client.ping()
    relay.delay_s = 0.1

    started = time.monotonic()
    client.ping()

    assert time.monotonic() - started >= 0.1


async def test_serves_a_test_that_blocks_its_own_loop(relay: Relay) -> None:
    with redis.Redis.from_url(relay.url, **plain_options()) as client:
        assert client.ping()
