"""Any sequence of entries, ticks, takeovers and changes of state: the queue does what plain lists say."""

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from actors.intake import EventQueue, decode
from contracts.events import ARDiffusionSessionEvent
from support.event_oracle import Oracle, Sent

NUMBERS = st.integers(0, 12) | st.sampled_from([2**53 - 2, 2**53 - 1])
STEADY = settings(deadline=None, derandomize=True, database=None)
CONTROL = {"track": "camera", "schema": "v1", "data": {}}


def proper(number: int) -> Sent:
    return Sent({b"event_id": b"%d" % number, b"prompt": b"p"}, number)


def with_control(number: int) -> Sent:
    return Sent({b"event_id": b"%d" % number, b"controls": json.dumps([CONTROL]).encode()}, number)


def not_understood(number: int) -> Sent:
    body = json.dumps([CONTROL | {"schema": "unknown"}]).encode()
    return Sent({b"event_id": b"%d" % number, b"controls": body}, number, understood=False)


def broken(number: int, how: int) -> Sent:
    text = b"%d" % number
    wires = [
        {b"event_id": b"0" + text, b"prompt": b"p"},
        {b"event_id": b"-" + text, b"prompt": b"p"},
        {b"event_id": text + b".5", b"prompt": b"p"},
        {b"event_id": text},
        {b"event_id": text, b"controls": b"{}"},
        {b"event_id": text, b"prompt": b"\xff"},
        {b"event_id": text, b"prompt": b"p", b"extra": b"1"},
        {b"event_id": b"9007199254740992", b"prompt": b"p"},
        {b"prompt": b"p"},
        {},
    ]
    return Sent(wires[how % len(wires)], None)


SENT = st.one_of(
    NUMBERS.map(proper),
    NUMBERS.map(proper),
    NUMBERS.map(with_control),
    NUMBERS.map(not_understood),
    st.builds(broken, NUMBERS, st.integers(0, 9)),
)


def check(event: ARDiffusionSessionEvent) -> None:
    if any(control.schema != "v1" for control in event.controls):
        raise ValueError(f"schema {event.controls[0].schema}")


class QueueModel(RuleBasedStateMachine):
    """Entries of one session's stream, its queue and the oracle."""

    @initialize(limit=st.integers(1, 5))
    def begin(self, limit: int) -> None:
        self.oracle = Oracle(limit)
        self.queue = EventQueue(limit)
        self.stream: list[tuple[str, Sent]] = []
        self.added = 0

    @rule(batch=st.lists(SENT, max_size=6))
    def entries_come(self, batch: list[Sent]) -> None:
        entries = []
        for sent in batch:
            self.added += 1
            entries.append((f"{self.added}-0", sent))
        expected = [(i, reason) for i, sent in entries if (reason := self.oracle.take(i, sent))]

        refused = self.queue.admit(
            decode([(i, sent.wire) for i, sent in entries]),
            floor=self.oracle.floor, recent=set(self.oracle.known), check=check, active=self.oracle.active,
        )  # fmt: skip

        assert [(item.entry_id, str(item.reason)) for item in refused] == expected
        gone = dict(expected)
        self.stream += [(i, sent) for i, sent in entries if i not in gone]
        if entries:
            assert self.queue.cursor == entries[-1][0]

    @rule(below=st.none() | NUMBERS)
    def a_tick_is_committed(self, below: int | None) -> None:
        if not self.oracle.active:
            return
        taken = self.queue.snapshot(below)
        assert [(item.event.event_id, item.entry_id) for item in taken] == self.oracle.in_order(below)
        numbers = [item.event.event_id for item in taken]
        self.queue.applied(numbers)
        self.oracle.apply(numbers)
        left = {item.entry_id for item in taken}
        self.stream = [(i, sent) for i, sent in self.stream if i not in left]

    @rule()
    def the_session_fails(self) -> None:
        """What was accepted is remembered, as the broker does."""
        self.oracle.active = False
        self.oracle.known += [number for number, _ in self.oracle.held]

    @rule()
    def the_session_is_reset(self) -> None:
        held = [number for number, _ in self.oracle.held]
        self.oracle.floor = max([self.oracle.floor, *held])
        self.oracle.known = [number for number in self.oracle.known if number not in held]
        self.oracle.held, self.stream, self.oracle.active = [], [], True
        self.queue = EventQueue(self.oracle.limit)

    @rule()
    def another_host_takes_over(self) -> None:
        """It reads what is left of the stream and stands where the one before it stood."""
        self.queue = EventQueue(self.oracle.limit)
        refused = self.queue.admit(
            decode([(i, sent.wire) for i, sent in self.stream]),
            floor=self.oracle.floor, recent=set(self.oracle.known), check=check, active=self.oracle.active,
        )  # fmt: skip
        assert refused == []

    @rule(number=st.integers(0, 12))
    def the_broker_forgets_an_id(self, number: int) -> None:
        held = [known for known, _ in self.oracle.held]
        self.oracle.known = [known for known in self.oracle.known if known != number or known in held]

    @invariant()
    def the_queue_is_what_the_lists_say(self) -> None:
        if not hasattr(self, "queue"):
            return
        got = [(item.event.event_id, item.entry_id) for item in self.queue.snapshot()]
        assert got == self.oracle.in_order()
        assert len(got) <= self.oracle.limit
        assert all(number > self.oracle.floor for number, _ in got)


def test_any_sequence_of_entries_ticks_and_takeovers_leaves_the_queue_as_plain_lists_say() -> None:
    run_state_machine_as_test(QueueModel, settings=settings(STEADY, max_examples=100, stateful_step_count=25))
