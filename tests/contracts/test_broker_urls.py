"""What is said of a broker that is not one, and of URLs: a password is never shown."""

import asyncio
import contextlib

import pytest

from actors.config import JanitorSettings
from contracts.broker import command_client, map_exceptions, redact
from contracts.config import load_settings
from contracts.errors import BrokerError, ConfigurationError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("redis://me:secret@host", "redis://me:***@host"),
        ("redis://:sec/ret@host:1/0", "redis://:***@host:1/0"),
        ("redis://:sec#re?t@host:1/0", "redis://:***@host:1/0"),
        ("redis://:sec@ret@host:1/0", "redis://:***@host:1/0"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=***&db=1"),
        ("unix:///tmp/broker.sock", "unix:///tmp/broker.sock"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize("url", ["redis://:secret/word@host:1/0", "redis://h:secret/0", "http://:secret@h/0"])
def test_a_url_that_makes_no_sense_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError, match="REDIS_URL: ") as caught:
        command_client(url)

    assert "secret" not in str(caught.value)


def test_a_jobs_url_that_makes_no_sense_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_JOBS_URL", "redis://:secret@host:port/0")

    with pytest.raises(ConfigurationError, match="WORLDLINE_JOBS_URL") as caught:
        load_settings(JanitorSettings)

    assert "secret" not in str(caught.value)


async def test_what_answers_but_is_no_broker_is_a_broker_error() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = command_client(f"redis://:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}/0")

    with pytest.raises(BrokerError, match="no Redis or Valkey"), map_exceptions("PING"):
        await client.ping()

    await client.aclose()
    server.close()
