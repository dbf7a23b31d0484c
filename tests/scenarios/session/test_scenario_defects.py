"""The host itself has a defect: what raised is tried once more, then answered; nobody waits for ever."""

from collections.abc import Callable
from typing import Any

import pytest

from actors.host import Host
from support.hosting import Caller
from support.scripted_worker import ScriptedWorker


def raising(times: int, call: Any, *, after: bool) -> Callable[..., Any]:
    """`call`, which raises so often, before or after it did its work."""
    left = [times]

    async def defective(*args: Any, **options: Any) -> Any:
        result = await call(*args, **options) if after or not left[0] else None
        if left[0]:
            left[0] -= 1
            raise ZeroDivisionError("a defect")
        return result

    return defective


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("script", ["begin_tick", "commit"])
async def test_a_defect_that_passes_costs_nothing(
    world: Caller, host: Host, worker: ScriptedWorker, script: str, after: bool
) -> None:
    scripts = host.services.scripts
    setattr(scripts, script, raising(1, getattr(scripts, script), after=after))

    assert (await world.ok("next_chunk"))["chunk_index"] == 0
    assert (await world.ok("next_chunk"))["chunk_index"] == 1
    assert set(worker.runs.values()) == {1}


async def test_a_defect_that_stays_is_answered_and_changes_nothing(world: Caller, host: Host) -> None:
    scripts = host.services.scripts
    scripts.begin_tick = raising(2, scripts.begin_tick, after=False)  # type: ignore[method-assign]

    assert (await world.refused("next_chunk"))["code"] == "internal_error"
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


async def test_a_command_that_has_begun_is_not_refused_for_a_defect(
    world: Caller, host: Host, worker: ScriptedWorker
) -> None:
    # Given a defect that strikes twice: once before a tick has begun, once after
    scripts, begin = host.services.scripts, host.services.scripts.begin_tick
    scripts.begin_tick = raising(1, raising(1, begin, after=True), after=False)  # type: ignore[method-assign]

    # Then the command is answered by what came of its tick
    assert (await world.ok("next_chunk"))["chunk_index"] == 0
    assert len(await world.chunks()) == 1
    assert set(worker.runs.values()) == {1}


async def test_a_reply_that_can_not_be_acted_on_fails_its_session(world: Caller, host: Host) -> None:
    scripts = host.services.scripts
    scripts.commit = raising(2, scripts.commit, after=False)  # type: ignore[method-assign]

    assert (await world.refused("next_chunk"))["code"] == "state_lost"
    await world.until("FAILED")
    await world.ok("reset")
    assert (await world.ok("next_chunk"))["chunk_index"] == 0
