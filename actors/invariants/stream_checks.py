"""What must hold between a session's streams and its state: chunks, events, history, answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from actors.invariants.finding import Finding
from actors.invariants.snapshot import EVENTS_READ, Snapshot
from contracts.commands import Answer
from contracts.errors import CorruptDataError, InvalidArgumentError
from contracts.identity import parse_event_id
from contracts.lifecycle import INITIAL, Status, Trigger, destination
from contracts.state import CommittedChunk, SessionState


def check_chunks(snapshot: Snapshot, state: SessionState) -> Iterator[Finding]:
    """Contiguous within a life, from 0 after a reset, up to the state's index; each event applied once and in order."""
    key = snapshot.key("chunks")
    try:
        chunks = [CommittedChunk.from_entry(fields) for _, fields in snapshot.chunks]
    except CorruptDataError as error:
        yield Finding("corrupt_chunk", key, error.message, corrupt=True)
        return
    for earlier, later in pairwise(chunks):
        expected = earlier.chunk_index + 1 if later.life == earlier.life else 0
        if later.chunk_index != expected:
            yield Finding("chunk_gap", key, f"chunk {later.chunk_index} where {expected} was expected")
    present = [chunk for chunk in chunks if chunk.life == state.life]
    after = present[-1].chunk_index + 1 if present else 0
    if after != state.chunk_index:
        yield Finding(
            "chunk_index", key, f"ends before chunk {after}, the state's next is {state.chunk_index}"
        )
    if present and present[-1].request_id != state.last_request_id:
        yield Finding("last_request", key, f"ends with {present[-1].request_id}, not {state.last_request_id}")
    applied = [event_id for chunk in chunks for event_id in chunk.applied_event_ids]
    for earlier_id, later_id in pairwise(applied):
        if later_id <= earlier_id:
            yield Finding("applied_twice", key, f"event {later_id} was applied after {earlier_id}")
    if applied and applied[-1] > state.event_floor:
        yield Finding(
            "event_floor", key, f"event {applied[-1]} was applied, the floor is {state.event_floor}"
        )


def check_events(snapshot: Snapshot, state: SessionState) -> Iterator[Finding]:
    """Every event that was accepted and lies above the floor is still there."""
    try:
        accepted = {parse_event_id(member) for member in snapshot.ids}
    except InvalidArgumentError as error:
        yield Finding("corrupt_ids", snapshot.key("ids"), error.message, corrupt=True)
        return
    if snapshot.events_length >= EVENTS_READ:
        return  # a long stream of bare entries: what was accepted may lie behind what was read
    there = {fields.get(b"event_id", b"").decode(errors="replace") for _, fields in snapshot.events}
    lost = sorted(i for i in accepted if i > state.event_floor and str(i) not in there)
    if lost:
        yield Finding(
            "event_lost", snapshot.key("events"), f"accepted, not applied and not there: {lost[:10]}"
        )


def check_history(snapshot: Snapshot, state: SessionState) -> Iterator[Finding]:
    """Every transition is one of the table, begins where the last one ended, and the last leads to the status."""
    key = snapshot.key("history")
    at: str | None = None
    for entry_id, fields in snapshot.history:
        move = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
        start, end = move.get("from", ""), move.get("to", "")
        if not _is_legal(move.get("trigger", ""), start, end):
            yield Finding(
                "illegal_transition", key, f"{entry_id}: {move.get('trigger')} from {start!r} to {end!r}"
            )
        # After a closed session has expired, its history begins anew with a creation out of nothing.
        if at is not None and start not in (at, ""):
            yield Finding("history_gap", key, f"{entry_id}: begins at {start}, the last one ended at {at}")
        at = end
    if at is not None and at != state.status:
        yield Finding("history_end", key, f"ends at {at}, the session is {state.status}")


def _is_legal(trigger: str, start: str, end: str) -> bool:
    try:
        return destination(Trigger(trigger), Status(start or INITIAL)) == end
    except ValueError:
        return False


def check_answers(snapshot: Snapshot, state: SessionState) -> Iterator[Finding]:
    """Every answer of a command is the one that is remembered; as many rejections are counted as are listed."""
    key = snapshot.key("answers")
    for entry_id, fields in snapshot.answers:
        text = fields.get(b"answer", b"")
        try:
            command_id = Answer.from_json(text).command_id
        except InvalidArgumentError as error:
            yield Finding("corrupt_answer", key, f"{entry_id}: {error.message}", corrupt=True)
            continue
        if snapshot.answered.get(command_id.encode()) != text:
            yield Finding(
                "answer_not_kept", key, f"command {command_id} is remembered with another answer or none"
            )
    counted = sum(state.rejected_total.values())
    if snapshot.rejected_length > counted:
        message = f"{snapshot.rejected_length} entries, {counted} are counted in the state"
        yield Finding("rejected_total", snapshot.key("rejected"), message)
