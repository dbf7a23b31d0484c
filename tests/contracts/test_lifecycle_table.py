"""The lifecycle table: every trigger in every state."""

import pytest

from contracts.lifecycle import INITIAL, LIVE, TERMINAL, TRANSITIONS, Status, Trigger, destination, mermaid

LEGAL = {
    (Trigger.CREATED, Status.CLOSED): Status.ACTIVE,
    (Trigger.TICK_FAILED, Status.ACTIVE): Status.FAILED,
    (Trigger.WORKER_LOST, Status.ACTIVE): Status.FAILED,
    (Trigger.EVICTED, Status.ACTIVE): Status.FAILED,
    (Trigger.RESET_SUCCEEDED, Status.ACTIVE): Status.ACTIVE,
    (Trigger.RESET_SUCCEEDED, Status.FAILED): Status.ACTIVE,
    (Trigger.RESET_FAILED, Status.ACTIVE): Status.FAILED,
    (Trigger.RESET_FAILED, Status.FAILED): Status.FAILED,
    (Trigger.CLOSE_REQUESTED, Status.ACTIVE): Status.CLOSING,
    (Trigger.CLOSE_REQUESTED, Status.FAILED): Status.CLOSING,
    (Trigger.CLOSE_REQUESTED, Status.CLEANUP_FAILED): Status.CLOSING,
    (Trigger.CLEANUP_SUCCEEDED, Status.CLOSING): Status.CLOSED,
    (Trigger.CLEANUP_FAILED, Status.CLOSING): Status.CLEANUP_FAILED,
}


@pytest.mark.parametrize("state", Status)
@pytest.mark.parametrize("trigger", Trigger)
def test_a_trigger_leads_where_the_contract_says_or_nowhere(trigger: Trigger, state: Status) -> None:
    assert destination(trigger, state) == LEGAL.get((trigger, state))


def test_there_are_exactly_five_states_in_upper_case() -> None:
    assert list(Status) == ["ACTIVE", "FAILED", "CLOSING", "CLOSED", "CLEANUP_FAILED"]


def test_each_trigger_has_one_row() -> None:
    assert sorted(row.trigger for row in TRANSITIONS) == sorted(Trigger)


def test_closed_is_reached_only_through_closing() -> None:
    assert {source for (_, source), to in LEGAL.items() if to is Status.CLOSED} == {Status.CLOSING}


def test_no_state_is_a_dead_end() -> None:
    assert {source for _, source in LEGAL} == set(Status)


def test_the_named_sets_agree_with_the_table() -> None:
    assert {state for state in Status if destination(Trigger.RESET_SUCCEEDED, state)} == LIVE
    assert TERMINAL == {Status.CLOSED} == {INITIAL}


def test_the_diagram_has_a_line_for_each_transition() -> None:
    lines = [line.strip() for line in mermaid().splitlines()]

    for (trigger, source), to in LEGAL.items():
        assert f"{source} --> {to}: {trigger}" in lines
    assert len(lines) == len(LEGAL) + 2
