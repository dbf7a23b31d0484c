"""The event queue as a session's actor reads it: what is taken in, what is not, and why."""

from collections.abc import Collection

import pytest

from actors.intake import START, EventQueue, PendingEvent, decode, entry_ms
from contracts.events import MAX_EVENT_BYTES, ARDiffusionSessionEvent, RejectReason
from contracts.session_scripts import Entry, Rejection


def entry(number: int, event_id: object = None, **fields: bytes) -> Entry:
    body = {} if event_id is None else {b"event_id": str(event_id).encode()}
    return f"{number}-0", body | ({k.encode(): v for k, v in fields.items()} or {b"prompt": b"p"})


def admit(
    queue: EventQueue, *entries: Entry, floor: int = -1, recent: Collection[int] = (), active: bool = True
) -> list[tuple[str, str]]:
    """Admits entries; the ids of those that were refused, and why."""
    refused = queue.admit(decode(entries), floor=floor, recent=recent, check=lambda _: None, active=active)
    return [(item.entry_id, item.reason) for item in refused]


def ids(queue: EventQueue, below: int | None = None) -> list[int]:
    return [item.event.event_id for item in queue.snapshot(below)]


def test_events_are_taken_in_and_come_out_in_id_order() -> None:
    queue = EventQueue(limit=4)

    assert admit(queue, entry(1, 2), entry(2, 0), entry(3, 1)) == []
    assert ids(queue) == [0, 1, 2]
    assert [item.entry_id for item in queue.snapshot()] == ["2-0", "3-0", "1-0"]


def test_a_snapshot_below_an_id_leaves_that_id_and_all_above_out() -> None:
    queue = EventQueue(limit=4)
    admit(queue, entry(1, 5), entry(2, 7), entry(3, 6))

    assert ids(queue, below=7) == [5, 6]
    assert ids(queue, below=5) == []
    assert ids(queue, below=0) == []


def test_of_equal_ids_the_first_in_stream_order_wins() -> None:
    queue = EventQueue(limit=4)

    assert admit(queue, entry(1, 3, prompt=b"first"), entry(2, 3, prompt=b"second")) == [("2-0", "duplicate")]
    assert admit(queue, entry(3, 3, prompt=b"third")) == [("3-0", "duplicate")]
    assert queue.pending[3].event.prompt == "first"


def test_an_entry_that_is_no_event_takes_no_id_from_the_next() -> None:
    queue = EventQueue(limit=4)

    assert admit(queue, entry(1, 3, controls=b"{"), entry(2, 3)) == [("1-0", "invalid")]
    assert queue.pending[3].entry_id == "2-0"


@pytest.mark.parametrize(("event_id", "reason"), [(4, "stale"), (5, "stale"), (6, None)])
def test_at_and_below_the_floor_an_unknown_id_is_stale(event_id: int, reason: str | None) -> None:
    queue = EventQueue(limit=4)

    assert [why for _, why in admit(queue, entry(1, event_id), floor=5)] == ([reason] if reason else [])


def test_at_and_below_the_floor_a_known_id_is_a_duplicate() -> None:
    assert admit(EventQueue(limit=4), entry(1, 4), entry(2, 5), floor=5, recent={5}) == [
        ("1-0", "stale"),
        ("2-0", "duplicate"),
    ]


def test_above_the_floor_a_known_id_is_taken_in_it_was_accepted_and_not_applied() -> None:
    queue = EventQueue(limit=4)

    assert admit(queue, entry(1, 6), floor=5, recent={6}) == []
    assert ids(queue) == [6]


def test_a_full_queue_takes_nothing_more_until_a_commit_makes_room() -> None:
    queue = EventQueue(limit=2)

    assert admit(queue, entry(1, 1), entry(2, 2), entry(3, 3)) == [("3-0", "queue_full")]
    queue.applied([1])
    assert admit(queue, entry(4, 3)) == []
    assert ids(queue) == [2, 3]


def test_a_duplicate_is_a_duplicate_in_a_full_queue_too_and_so_is_what_is_stale() -> None:
    queue = EventQueue(limit=1)
    admit(queue, entry(1, 9))

    assert admit(queue, entry(2, 9), entry(3, 1), entry(4, 2), floor=2, recent={2}) == [
        ("2-0", "duplicate"),
        ("3-0", "stale"),
        ("4-0", "duplicate"),
    ]


def test_outside_active_only_what_was_accepted_before_is_kept() -> None:
    queue = EventQueue(limit=4)

    assert admit(queue, entry(1, 6), entry(2, 7), floor=5, recent={6}, active=False) == [
        ("2-0", "not_active")
    ]
    assert ids(queue) == [6]


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), KeyError("track"), RuntimeError("lone \ud800"), ZeroDivisionError(), RecursionError()],
)
def test_whatever_a_reducer_raises_is_about_this_event_only(error: Exception) -> None:
    queue = EventQueue(limit=4)

    def check(event: ARDiffusionSessionEvent) -> None:
        if event.event_id == 1:
            raise error

    (refused,) = queue.admit(decode([entry(1, 1), entry(2, 2)]), floor=-1, recent=(), check=check)

    assert (refused.entry_id, refused.reason, refused.forget) == ("1-0", "invalid_control", True)
    refused.message.encode()
    assert ids(queue) == [2]


def test_a_reducer_is_not_asked_about_what_is_refused_anyway() -> None:
    asked: list[int] = []
    queue = EventQueue(limit=1)
    entries = decode([entry(1, 5), entry(2, 5), entry(3, 1), entry(4, 6), entry(5, "x")])

    queue.admit(entries, floor=2, recent=(), check=lambda event: asked.append(event.event_id))

    assert asked == [5]


@pytest.mark.parametrize(
    ("reason", "forget"),
    [
        (RejectReason.INVALID, False),
        (RejectReason.DUPLICATE, False),
        (RejectReason.STALE, False),
        (RejectReason.QUEUE_FULL, True),
        (RejectReason.NOT_ACTIVE, True),
        (RejectReason.INVALID_CONTROL, True),
    ],
)
def test_an_id_is_freed_where_no_other_event_has_it(reason: RejectReason, forget: bool) -> None:
    queue = EventQueue(limit=1)
    admit(queue, entry(1, 9))
    if reason is RejectReason.INVALID_CONTROL:
        queue.applied([9])
    sent = {
        RejectReason.INVALID: entry(2, "09"),
        RejectReason.DUPLICATE: entry(2, 9),
        RejectReason.STALE: entry(2, 3),
    }.get(reason, entry(2, 10))

    def check(_: ARDiffusionSessionEvent) -> None:
        raise ValueError

    (refused,) = queue.admit(
        decode([sent]), floor=3, recent=(), check=check, active=reason is not RejectReason.NOT_ACTIVE
    )

    assert (refused.reason, refused.forget) == (reason, forget)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"event_id": b""},
        {b"event_id": b"1"},
        {b"prompt": b"p"},
        {b"event_id": b"07", b"prompt": b"p"},
        {b"event_id": b"+7", b"prompt": b"p"},
        {b"event_id": b"7.0", b"prompt": b"p"},
        {b"event_id": b"-1", b"prompt": b"p"},
        {b"event_id": b" 7", b"prompt": b"p"},
        {b"event_id": b"9007199254740992", b"prompt": b"p"},
        {b"event_id": "٧".encode(), b"prompt": b"p"},
        {b"event_id": b"\xff", b"prompt": b"p"},
        {b"event_id": b"7", b"prompt": b"\xff"},
        {b"event_id": b"7", b"controls": b"["},
        {b"event_id": b"7", b"controls": b"[]"},
        {b"event_id": b"7", b"controls": b"[" * 5_000},
        {b"event_id": b"7", b"prompt": b"p", b"color": b"red"},
        {b"event_id": b"7", b"prompt": b"p" * MAX_EVENT_BYTES},
        {b"event_id": b"7" * 100_000, b"prompt": b"p"},
    ],
    ids=lambda fields: repr(fields)[:50],
)
def test_what_is_no_event_is_refused_as_invalid_with_what_its_producer_wrote(
    fields: dict[bytes, bytes],
) -> None:
    queue = EventQueue(limit=4)

    (refused,) = queue.admit(decode([("1-0", fields)]), floor=-1, recent=(), check=lambda _: None)

    assert isinstance(refused, Rejection)
    assert (refused.reason, refused.forget) == ("invalid", False)
    assert refused.event_id == fields.get(b"event_id", b"")[:80].decode(errors="replace")
    assert 0 < len(refused.message) <= 300
    assert queue.pending == {}


def test_the_cursor_follows_every_entry_refused_ones_too() -> None:
    queue = EventQueue(limit=1)
    assert queue.cursor == START

    admit(queue, entry(1, 1))
    assert queue.cursor == "1-0"
    admit(queue, entry(2, 1), entry(3, "x"))
    assert queue.cursor == "3-0"
    admit(queue)
    assert queue.cursor == "3-0"


def test_applying_what_is_not_pending_does_nothing() -> None:
    queue = EventQueue(limit=2)
    admit(queue, entry(1, 1))

    queue.applied([])
    queue.applied([0, 2, 1, 1])

    assert queue.pending == {}


def test_the_time_of_acceptance_is_in_the_entry_id() -> None:
    event = ARDiffusionSessionEvent(1, "p")

    assert (
        PendingEvent("1700000000123-4", event).accepted_ms == entry_ms("1700000000123-4") == 1_700_000_000_123
    )
