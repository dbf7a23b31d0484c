"""When a close that failed is due again, and what its retry is called."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.close_retry import CloseRetry, close_command_id
from actors.config import HostSettings, JanitorSettings
from contracts.commands import MAX_COMMAND_ID, Command, Op
from contracts.config import load_settings
from contracts.errors import ConfigurationError
from contracts.identity import SESSION_ID_PATTERN

SESSION_IDS = st.from_regex(SESSION_ID_PATTERN, fullmatch=True)


def plain(low: float, high: float) -> float:
    return (low + high) / 2


def test_the_pause_doubles_from_a_second_to_ten_minutes() -> None:
    retry = CloseRetry(uniform=plain)

    assert [retry.pause_ms(failures) for failures in range(1, 12)] == [
        1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 512_000, 600_000,
    ]  # fmt: skip
    assert retry.pause_ms(10**9) == 600_000


@given(st.integers(0, 10**12), st.randoms(use_true_random=False))
def test_jitter_stays_within_a_quarter_and_within_the_bounds(failures: int, source: random.Random) -> None:
    pause = CloseRetry(uniform=source.uniform).pause_ms(failures)
    middle = CloseRetry(uniform=plain).pause_ms(failures)

    assert 1_000 <= pause <= 600_000
    assert 0.74 * middle <= pause <= 1.26 * middle


def test_what_failed_together_is_not_retried_together() -> None:
    retry = CloseRetry()

    assert len({retry.pause_ms(8) for _ in range(50)}) > 1


@given(SESSION_IDS, st.integers(0, 1_000))
def test_every_legal_session_id_makes_a_legal_name(session_id: str, attempt: int) -> None:
    name = close_command_id(session_id, "ar-x-create-00", attempt)

    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(name) <= MAX_COMMAND_ID
    assert Command(Op.CLOSE, session_id, name).command_id == name


def test_another_session_life_or_attempt_is_another_name() -> None:
    names = {
        close_command_id(session_id, life, attempt)
        for session_id in ("a", "A", "a:1", "a.1", "a-1")
        for life in ("l1", "l2")
        for attempt in (0, 1, 10)
    }

    assert len(names) == 5 * 2 * 3


@pytest.mark.parametrize(
    ("cls", "values", "field"),
    [
        (HostSettings, {"close_retry_first_ms": 5, "close_retry_longest_ms": 4}, "settings"),
        (HostSettings, {"close_retry_first_ms": 0}, "close_retry_first_ms"),
        (JanitorSettings, {"close_attempts_limit": 0}, "close_attempts_limit"),
        (JanitorSettings, {"reconcile_ms": 0}, "reconcile_ms"),
        (JanitorSettings, {"janitor_id": "no good"}, "janitor_id"),
    ],
)
def test_a_bad_setting_is_named(cls: type, values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(cls, **values)

    assert caught.value.field == field


def test_the_jobs_are_on_the_broker_itself_unless_they_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://main/0")
    assert load_settings(JanitorSettings).jobs_broker_url == "redis://main/0"

    monkeypatch.setenv("WORLDLINE_JOBS_URL", "redis://:secret@other/1")
    settings = load_settings(JanitorSettings)

    assert settings.jobs_broker_url == "redis://:secret@other/1"
    assert "secret" not in settings.shown_jobs_url
    assert "secret" not in repr(settings)
