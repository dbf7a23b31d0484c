"""Commands run in this process, against a real server and a scripted host in a thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from actors.cli.main import run
from support.answerer import Answerer, answerer_in_thread
from support.broker import RealBroker


@dataclass
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.out)


@pytest.fixture
def served(broker: RealBroker) -> Iterator[Answerer]:
    with answerer_in_thread(broker.url) as running:
        yield running


@pytest.fixture
def worldline(
    broker: RealBroker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs a command line: `worldline("sessions", "list")`."""
    monkeypatch.setenv("REDIS_URL", broker.url)

    def call(*arguments: str) -> Outcome:
        capfd.readouterr()
        status = run(arguments)
        out, err = capfd.readouterr()
        return Outcome(status, out, err)

    return call
