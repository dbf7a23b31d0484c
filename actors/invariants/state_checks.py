"""What must hold between the fields of one session's state, and how long its keys live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from actors.invariants.finding import Finding
from actors.invariants.snapshot import Snapshot
from contracts.errors import CorruptDataError
from contracts.keys import SESSION_KEY_TYPES
from contracts.lifecycle import Status
from contracts.messages import InFlight, Kind
from contracts.state import SessionState

_MAY_FLY: Final = {
    Status.ACTIVE: {Kind.TICK, Kind.RESET},
    Status.FAILED: {Kind.RESET, Kind.RELEASE},
    Status.CLOSING: {Kind.RELEASE},
    Status.CLOSED: set(),
    Status.CLEANUP_FAILED: set(),
}
"""What may be in flight in each status."""

_KEPT: Final = ("state", "events", "ids", "chunks", "ticks", "history")
"""Keys that expire after CLOSED and never before."""


def check_types(snapshot: Snapshot) -> Iterator[Finding]:
    """Each key has its type."""
    for part, wanted in SESSION_KEY_TYPES.items():
        if not snapshot.right(part):
            text = f"is a {snapshot.types[part]}, must be a {wanted}"
            yield Finding("wrong_type", snapshot.key(part), text, corrupt=True)


def read_state(snapshot: Snapshot) -> SessionState | Finding | None:
    """The typed state, None where there is none, a finding where it can't be read."""
    try:
        return SessionState.from_hash(snapshot.session_id, snapshot.state)
    except CorruptDataError as error:
        return Finding(
            "corrupt_state", snapshot.key("state"), error.message, snapshot.session_id, corrupt=True
        )


def check_state(snapshot: Snapshot, state: SessionState) -> Iterator[Finding]:
    """Status, what is in flight, reasons and times to live fit each other."""
    for code, message in (*_status(state), *_in_flight(state), *_expiry(snapshot, state)):
        yield Finding(code, snapshot.key("state"), message)


def _status(state: SessionState) -> Iterator[tuple[str, str]]:
    if not state.life:
        yield "no_life", f"{state.status} without a life"
    if (state.status is Status.FAILED and state.failure_code is None) or (
        state.status is Status.ACTIVE and state.failure_code is not None
    ):
        yield "failure_code", f"{state.status} with failure_code {state.failure_code}"
    if state.status is Status.CLEANUP_FAILED and state.cleanup_error is None:
        yield "no_cleanup_error", "CLEANUP_FAILED without a reason"
    if state.pace_ms is not None and state.status is not Status.ACTIVE:
        yield "runs_free", f"runs free although it is {state.status}"
    if (state.chunk_index > 0) != (state.last_request_id is not None):
        yield "last_request", f"chunk index {state.chunk_index} with last request {state.last_request_id}"


def _in_flight(state: SessionState) -> Iterator[tuple[str, str]]:
    flying = state.inflight
    if flying is None:
        if state.status is Status.CLOSING:
            yield "nothing_in_flight", "CLOSING without a release in flight: nobody would finish it"
        return
    if flying.kind not in _MAY_FLY[state.status]:
        yield "in_flight", f"{state.status} with a {flying.kind} in flight"
    if flying.fence > state.fence:
        yield "in_flight_fence", f"in flight under fence {flying.fence}, above the session's {state.fence}"
    if flying.life != (flying.request_id if flying.kind is Kind.RESET else state.life):
        yield (
            "in_flight_life",
            f"a {flying.kind} of life {flying.life} in flight, the session lives {state.life}",
        )
    if flying.kind is Kind.TICK:
        yield from _tick(state, flying)


def _tick(state: SessionState, flying: InFlight) -> Iterator[tuple[str, str]]:
    if flying.chunk_index != state.chunk_index:
        yield "in_flight_chunk", f"chunk {flying.chunk_index} in flight, the next one is {state.chunk_index}"
    if flying.event_ids and flying.event_ids[0] <= state.event_floor:
        yield "in_flight_events", f"event {flying.event_ids[0]} in flight, the floor is {state.event_floor}"


def _expiry(snapshot: Snapshot, state: SessionState) -> Iterator[tuple[str, str]]:
    if state.status is Status.CLOSED and "state" not in snapshot.expires:
        yield "never_expires", "CLOSED, but its state has no time to live"
    doomed = [part for part in _KEPT if part in snapshot.expires]
    if state.status is not Status.CLOSED and doomed:
        yield "expires", f"{state.status}, but {', '.join(doomed)} will expire"
