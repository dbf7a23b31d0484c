"""What an exception leaves in the logs: where it was raised, and nothing that a user said."""

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from contracts.logs import configure_logging


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_the_values_of_variables_are_not_told(monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    configure_logging("info", log_format)

    fail(prompt="a secret garden")

    assert "ZeroDivisionError" in said.getvalue()
    assert "test_logging_of_exceptions.py" in said.getvalue()
    assert "secret" not in said.getvalue()


def fail(prompt: str) -> None:
    try:
        len(prompt) // 0
    except ZeroDivisionError:
        structlog.get_logger("test").exception("step failed")
