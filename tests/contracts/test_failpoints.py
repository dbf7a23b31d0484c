"""Failpoints: nothing while they are off, once where they are armed, and named after places that exist."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from contracts import failpoints
from contracts.config import SharedSettings, load_settings
from contracts.errors import ConfigurationError
from contracts.failpoints import EXIT_STATUS, POINTS, Action, FailpointError
from support.tree import sources

PLACE = "host.commit.after"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_every_name_is_passed_at_one_place_and_every_place_has_a_name() -> None:
    places = [
        name
        for path in sources(".py")
        for name in re.findall(r"failpoints\.hit\(\"([^\"]+)\"\)", path.read_text(encoding="utf-8"))
    ]

    assert sorted(places) == sorted(point.name for point in POINTS)


def test_nothing_happens_where_nothing_is_armed() -> None:
    for point in POINTS:
        failpoints.hit(point.name)


def test_an_armed_one_fires_at_its_nth_passage_and_never_again(capfd: pytest.CaptureFixture[str]) -> None:
    failpoints.arm(f"{PLACE}=raise@3")
    failpoints.hit(PLACE)
    failpoints.hit("host.commit.before")
    failpoints.hit(PLACE)

    with pytest.raises(FailpointError, match=PLACE):
        failpoints.hit(PLACE)
    failpoints.hit(PLACE)

    assert capfd.readouterr().err == f"failpoint {PLACE}: raise\n"


def test_several_are_armed_at_once_and_anew() -> None:
    failpoints.arm("host.begin.before=raise, worker.run.after=raise")
    for name in ("host.begin.before", "worker.run.after"):
        with pytest.raises(FailpointError):
            failpoints.hit(name)

    failpoints.arm("worker.run.before=raise")
    failpoints.arm("worker.run.after=raise")
    failpoints.hit("worker.run.before")


def test_an_exit_leaves_nothing_behind_but_its_status() -> None:
    program = (
        "import atexit; from contracts import failpoints\n"
        "atexit.register(print, 'at exit')\n"
        f"failpoints.arm('{PLACE}=exit')\n"
        "try: failpoints.hit('host.commit.after')\n"
        "finally: print('finally')\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (EXIT_STATUS, "")


@pytest.mark.parametrize(
    "text",
    ["host.commit.after", "host.comit.after=exit", "host.commit.after=die", "host.commit.after=exit@0"],
)
def test_what_can_not_be_armed_is_bad_configuration(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ConfigurationError, match="failpoint"):
        failpoints.arm(text)

    monkeypatch.setenv("WORLDLINE_FAILPOINTS", text)
    with pytest.raises(ConfigurationError) as raised:
        load_settings(SharedSettings)
    assert raised.value.field == "failpoints"


def test_names_are_unique_and_every_action_does_something() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS)
    assert all(point.name.startswith(f"{point.process}.") for point in POINTS)
    assert set(failpoints._ACTIONS) == set(Action)
