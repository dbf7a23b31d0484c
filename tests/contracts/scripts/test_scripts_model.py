"""Any sequence of calls, repeated, late or from an owner that lost the session: what is promised of a session holds.

The host of this test is as plain as can be; it reads the whole queue each time. The broker is the one in memory.
"""

import asyncio
import json
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import fakeredis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from contracts.errors import SessionError, WorldlineError
from contracts.lifecycle import TRANSITIONS, Status, Trigger
from contracts.messages import InFlight, Kind
from contracts.scripts import ScriptRunner
from contracts.session_scripts import Limits, Outcome, Rejection, parse_entries
from contracts.state import CommittedChunk, SessionState
from support.script_world import Call, Snapshot, World, snapshot

STEADY = settings(deadline=None, derandomize=True, database=None)
NUMBERS = st.integers(0, 14)
COMMANDS = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h"])
EDGES = {(row.trigger, source, row.dest) for row in TRANSITIONS for source in row.sources}
KINDS = {
    Status.ACTIVE: {None, Kind.TICK, Kind.RESET},
    Status.FAILED: {None, Kind.RELEASE, Kind.RESET},
    Status.CLOSING: {Kind.RELEASE},
    Status.CLOSED: {None},
    Status.CLEANUP_FAILED: {None},
}
"""What may be in flight in each state."""
LIMIT = 3
LOOP = asyncio.Runner()


class SessionModel(RuleBasedStateMachine):
    """One session id, its owner, producers, and owners that are not any more."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = LOOP
        client = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(version=(7,)))
        self.world = World(client, limits=Limits(batch=2))
        self.accepted: set[int] = set()
        self.offered: set[int] = set()
        self.last: tuple[str, int] = ("", 0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run(work)

    def teardown(self) -> None:
        self.run(self.world.client.aclose())

    @property
    def status(self) -> Status:
        return self.state.status

    @property
    def flying(self) -> InFlight | None:
        return self.state.inflight

    def renew(self, command_id: str) -> None:
        assert self.run(self.world.create(command_id, max_pending_events=LIMIT)) is Outcome.CREATED
        self.accepted, self.offered = set(), set()
        self.state = self.run(self.world.stored())

    # -- what may happen ----------------------------------------------------------------------------------------------

    @initialize()
    def the_first_life(self) -> None:
        self.renew("first")

    @rule(command_id=COMMANDS)
    def create(self, command_id: str) -> None:
        answered = command_id in self.run(self.world.answered())
        if self.status is Status.CLOSED and not answered:
            self.renew(command_id)
        else:
            expected = Outcome.ANSWERED if answered else Outcome.EXISTS
            assert self.run(self.world.create(command_id)) is expected

    @rule(number=NUMBERS)
    def accept(self, number: int) -> None:
        self.run(self._accept(number))

    @rule(number=NUMBERS | st.sampled_from(["x", "01", ""]))
    def add_bare(self, number: int | str) -> None:
        if self.run(self.world.bare(number)) and isinstance(number, int):
            self.offered.add(number)

    @rule()
    def sweep(self) -> None:
        self.run(self._read())
        if self.world.calls[-1].name == "reject_events":
            self.the_last_call_is_repeated()

    @rule(command_id=st.none() | COMMANDS, meanwhile=st.lists(NUMBERS, max_size=3), fewer=st.booleans())
    def begin_tick(self, command_id: str | None, meanwhile: list[int], fewer: bool) -> None:
        self.run(self._begin_tick(command_id, meanwhile, fewer, strict=True))

    @rule(events=st.lists(NUMBERS, min_size=1, max_size=2), meanwhile=NUMBERS)
    @precondition(lambda self: self.status is Status.ACTIVE and self.flying is None)
    def a_whole_chunk(self, events: list[int], meanwhile: int) -> None:
        for number in events:
            self.run(self._accept(number))
        self.run(self._begin_tick(None, [meanwhile], fewer=False, strict=False))
        self.run(self._look())
        self.commit()

    @rule()
    @precondition(lambda self: self.flying is not None)
    def commit(self) -> None:
        expected = Outcome.COMMITTED if self.flying and self.flying.kind is Kind.TICK else Outcome.STALE
        taken = set(self.flying.entries) if self.flying else set()
        assert self.run(self.world.commit(ticks_kept=2)).outcome is expected
        if expected is Outcome.COMMITTED:
            assert taken.isdisjoint(self.run(self.world.entries()).values())

    @rule(
        trigger=st.sampled_from([Trigger.TICK_FAILED, Trigger.EVICTED, Trigger.RESET_FAILED]),
        release=st.booleans(),
    )
    def fail(self, trigger: Trigger, release: bool) -> None:
        allowed = [Status.ACTIVE, Status.FAILED] if trigger is Trigger.RESET_FAILED else [Status.ACTIVE]
        flying = self.flying
        if trigger is Trigger.RESET_FAILED and (flying is None or flying.kind is not Kind.RESET):
            return
        expected = Outcome.FAILED if self.status in allowed else Outcome.STATUS
        waiting = (flying.command_id if flying else None) or ""
        got = self.run(self.world.fail(trigger, release=release, allowed=allowed, command_id=waiting))
        assert got is expected

    @rule()
    @precondition(lambda self: self.flying is not None and self.status is not Status.CLOSING)
    def end_in_flight(self) -> None:
        flying = self.flying
        assert flying is not None
        answer = self.world.refused(flying.command_id) if flying.command_id else ""
        state = self.run(self.world.state())
        assert self.run(self.world.scripts.end_inflight(state, flying.request_id, answer)) is Outcome.ENDED

    @rule(command_id=COMMANDS)
    def begin_reset(self, command_id: str) -> None:
        self.run(self.world.begin_reset(command_id))

    @rule()
    @precondition(lambda self: self.flying is not None)
    def finish_reset(self) -> None:
        expected = Outcome.RESET if self.flying and self.flying.kind is Kind.RESET else Outcome.STALE
        assert self.run(self.world.finish_reset()) is expected

    @rule(command_id=COMMANDS)
    def begin_close(self, command_id: str) -> None:
        self.run(self.world.begin_close(command_id))

    @rule(well=st.booleans())
    @precondition(lambda self: self.flying is not None)
    def end_close(self, well: bool) -> None:
        closing = self.status is Status.CLOSING
        got = self.run(self.world.finish_close() if well else self.world.fail_close())
        assert got is (Outcome.STALE if not closing else Outcome.CLOSED if well else Outcome.CLEANUP_FAILED)

    @rule()
    @precondition(lambda self: self.flying is not None)
    def resend(self) -> None:
        assert self.run(self.world.resend()) is Outcome.SENT

    @rule(command_id=COMMANDS, pace=st.none() | st.just(5))
    def set_pace(self, command_id: str, pace: int | None) -> None:
        self.run(self._set_pace(command_id, pace))

    @rule(command_id=COMMANDS)
    def refuse(self, command_id: str) -> None:
        answer = self.world.refused(command_id)
        self.run(self.world.scripts.answer(self.world.session_id, self.world.epoch, command_id, answer))

    @rule()
    def read_again(self) -> None:
        self.run(self.world.scripts.adopt(self.world.session_id, self.world.epoch))

    @rule()
    def take_over(self) -> None:
        self.world.epoch += 1
        self.run(self.world.scripts.adopt(self.world.session_id, self.world.epoch))

    @rule()
    def flush_scripts(self) -> None:
        self.run(self.world.client.script_flush())

    @rule()
    def the_last_call_is_repeated(self) -> None:
        before, after = self._replay(-1)
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        name = self.world.calls[-1].name
        assert changed <= ({self.world.k.state} if name == "adopt" else {self.world.k.answers})

    @rule()
    @precondition(lambda self: self.flying is not None and self.flying.command_id is not None)
    def refuse_what_is_in_flight(self) -> None:
        assert self.flying is not None
        self.refuse(self.flying.command_id or "")

    @rule(back=st.integers(1, 12))
    def an_owner_that_lost_the_session_calls(self, back: int) -> None:
        call = self.world.calls[max(-back, -len(self.world.calls))]
        if call.name != "accept_event":
            old = Call(call.name, call.keys, (self.world.epoch - 1, *call.args[1:]))
            before, after = self.run(self._send(old))
            assert after == before

    @rule(back=st.integers(1, 3) | st.integers(1, 12))
    def a_call_arrives_late(self, back: int) -> None:
        """Of an owner that lost the session: nothing changes. Of the present one: what is promised holds."""
        at = max(-back, -len(self.world.calls))
        call = self.world.calls[at]
        before, after = self._replay(at)
        if call.name != "accept_event" and int(call.args[0]) < self.world.epoch:
            assert after == before

    # -- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_promised_holds(self) -> None:
        self.run(self._look())
        self._index_grows_by_one_or_a_new_life_begins_at_0()
        self._every_transition_is_in_the_table_and_follows_the_one_before()
        self._every_command_has_one_answer_and_it_is_remembered()
        self._fences_grow_and_what_is_in_flight_was_sent_last()
        self._what_is_in_flight_fits_the_state()
        self._events_are_applied_in_order_and_once()
        self._no_accepted_event_is_lost()

    async def _look(self) -> None:
        """Everything that the broker holds."""
        k = self.world.k
        pipe = self.world.client.pipeline(transaction=False)
        pipe.hgetall(k.state).hgetall(k.answered).zrange(k.ids, 0, -1)
        for stream in (k.answers, k.history, k.chunks, k.rejected, k.events, self.world.requests):
            pipe.xrange(stream)
        state, answered, ids, answers, history, chunks, rejected, events, requests = await pipe.execute()
        found = SessionState.from_hash(self.world.session_id, state)
        assert found is not None
        self.state = found
        self.ids = [int(member) for member in ids]
        self.answered = {name.decode(): json.loads(text) for name, text in answered.items()}
        self.answers = [json.loads(fields[b"answer"]) for _, fields in answers]
        self.history = [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in history]
        self.chunks = [CommittedChunk.from_entry(fields) for _, fields in chunks]
        self.rejected = [(f[b"event_id"].decode(), f[b"reason"].decode()) for _, f in rejected]
        self.events = [(i.decode(), fields[b"event_id"].decode()) for i, fields in events]
        self.requests = [(int(f[b"fence"]), f[b"request_id"].decode()) for _, f in requests]

    def _index_grows_by_one_or_a_new_life_begins_at_0(self) -> None:
        life, index = self.last
        allowed = (index, index + 1) if self.state.life == life else (0,)
        assert self.state.chunk_index in allowed
        self.last = (self.state.life, self.state.chunk_index)
        for earlier, later in pairwise(self.chunks):
            assert later.chunk_index == (earlier.chunk_index + 1 if later.life == earlier.life else 0)

    def _every_transition_is_in_the_table_and_follows_the_one_before(self) -> None:
        assert all((h["trigger"], h["from"] or "CLOSED", h["to"]) in EDGES for h in self.history)
        assert all(later["from"] == earlier["to"] for earlier, later in pairwise(self.history))
        assert self.history[-1]["to"] == self.state.status

    def _every_command_has_one_answer_and_it_is_remembered(self) -> None:
        assert len(self.answers) == len(self.answered)
        assert {answer["command_id"]: answer for answer in self.answers} == self.answered

    def _fences_grow_and_what_is_in_flight_was_sent_last(self) -> None:
        assert all(earlier < later for (earlier, _), (later, _) in pairwise(self.requests))
        flying = self.state.inflight
        if flying is not None:
            assert self.requests[-1] == (flying.fence, flying.request_id)
            assert flying.fence <= self.state.fence

    def _what_is_in_flight_fits_the_state(self) -> None:
        flying = self.state.inflight
        assert (flying.kind if flying else None) in KINDS[self.state.status]
        if flying is not None and flying.kind is Kind.TICK:
            assert flying.chunk_index == self.state.chunk_index
            assert set(flying.entries) <= {entry_id for entry_id, _ in self.events}

    def _events_are_applied_in_order_and_once(self) -> None:
        self.applied = [number for chunk in self.chunks for number in chunk.applied_event_ids]
        assert all(earlier < later for earlier, later in pairwise(self.applied))
        assert set(self.applied) <= self.offered
        assert sum(number <= self.state.event_floor for number in self.ids) <= LIMIT

    def _no_accepted_event_is_lost(self) -> None:
        dropped = {text for text, reason in self.rejected if reason in ("reset", "closed")}
        pending = {text for _, text in self.events}
        for number in self.accepted:
            there = number in self.applied or str(number) in pending | dropped
            assert there, f"event {number} was accepted and is nowhere"
            if str(number) in pending and number > self.state.event_floor:
                assert number in self.ids
        assert sum(self.state.rejected_total.values()) == len(self.rejected)

    # -- the host -----------------------------------------------------------------------------------------------------

    async def _accept(self, number: int) -> None:
        try:
            if await self.world.accept(number) == "ACCEPTED":
                assert number not in self.accepted
                self.accepted.add(number)
                self.offered.add(number)
        except SessionError:
            pass

    async def _read(self) -> list[int]:
        """Reads the queue and rejects what can't be applied; the ids of the rest, in order."""
        state = await self.world.state()
        flying = state.inflight.event_ids if state.inflight else ()
        own = set(state.inflight.entries) if state.inflight else set()
        floor = max(state.event_floor, *flying) if flying else state.event_floor
        known = set(await self.world.ids())
        held: list[int] = []
        refused: list[Rejection] = []
        for entry_id, fields in parse_entries(await self.world.client.xrange(self.world.k.events)):
            text = fields[b"event_id"].decode()
            number = int(text) if text in {str(n) for n in range(20)} else -1
            if entry_id in own:
                continue
            if number < 0:
                refused.append(Rejection(entry_id, text, "invalid", "", False))
            elif number in held or number <= floor:
                refused.append(Rejection(entry_id, text, "duplicate", "", False))
            elif (state.status is not Status.ACTIVE and number not in known) or len(held) == LIMIT:
                refused.append(Rejection(entry_id, text, "queue_full", "", True))
            else:
                held.append(number)
        if refused:
            assert await self.world.scripts.reject_events(state, refused) == len(refused)
        return sorted(held)

    async def _begin_tick(
        self, command_id: str | None, meanwhile: list[int], fewer: bool, strict: bool
    ) -> None:
        """Snapshot, then what comes meanwhile, then begin; after three tries without any event."""
        world, state = self.world, await self.world.state()
        for tries in range(4):
            held = (await self._read())[: 1 if fewer else None] if tries < 3 else []
            record, request = await world.tick(held, command_id, state)
            cursor = await world.cursor()
            for number in meanwhile[tries : tries + 1]:
                await self._accept(number)
            outcome, newer = await world.scripts.begin_tick(
                state, record, request, "gpu-0", cursor=cursor, strict=strict and tries == 0
            )
            assert bool(newer) is (outcome is Outcome.NEWER)
            if outcome is not Outcome.NEWER:
                break
        if outcome is Outcome.BEGUN:
            assert (state.status, state.inflight) == (Status.ACTIVE, None)
        elif outcome is not Outcome.ANSWERED:
            assert outcome is (Outcome.BUSY if state.status is Status.ACTIVE else Outcome.STATUS)

    async def _set_pace(self, command_id: str, pace: int | None) -> None:
        await self.world.scripts.set_pace(
            await self.world.state(), command_id, pace, self.world.ok(command_id)
        )

    def _replay(self, at: int) -> tuple[Snapshot, Snapshot]:
        before, after = self.run(self._send(self.world.calls[at]))
        if self.world.calls[at].name == "accept_event":
            self.run(self._learn())
        return before, after

    async def _send(self, call: Call) -> tuple[Snapshot, Snapshot]:
        """Everything before and after a call."""
        before = await snapshot(self.world.client)
        try:
            await ScriptRunner(self.world.client, self.world.keys).run(call.name, call.keys, call.args)
        except WorldlineError as error:
            raise AssertionError(f"{call.name} raised {error}") from error
        return before, await snapshot(self.world.client)

    async def _learn(self) -> None:
        """An event whose call came late may have been accepted now."""
        self.offered |= set(await self.world.ids())
        self.accepted |= set((await self.world.entries()).keys() & await self._ids())

    async def _ids(self) -> set[int]:
        return set(await self.world.ids())


def test_any_sequence_of_calls_keeps_what_is_promised_of_a_session() -> None:
    run_state_machine_as_test(
        SessionModel, settings=settings(STEADY, max_examples=40, stateful_step_count=25)
    )
