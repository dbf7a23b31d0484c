"""Events: what one carries, its limits, and its form in the stream."""

from typing import Any

import pytest

from contracts.errors import InvalidArgumentError
from contracts.events import (
    MAX_DEPTH,
    MAX_EVENT_BYTES,
    AcceptStatus,
    ARDiffusionControlInput,
    ARDiffusionEventReceipt,
    ARDiffusionSessionEvent,
    controls_from_json,
    controls_to_json,
    freeze,
    loads,
)
from contracts.identity import MAX_INTEGER


def control(track: str = "camera", **data: Any) -> ARDiffusionControlInput:
    return ARDiffusionControlInput(track, "test.v1", data)


def nested(levels: int, innermost: Any = 1) -> Any:
    """`levels` mappings and lists, one in the other."""
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("event_id", [-1, True, False, 1.0, "1", None, 2**53, 10**30])
def test_an_event_id_is_a_whole_number_below_2_to_the_53_and_no_bool(event_id: Any) -> None:
    with pytest.raises(ValueError, match="event_id") as refused:
        ARDiffusionSessionEvent(event_id, "prompt")
    assert refused.value.field == "event_id"


@pytest.mark.parametrize("event_id", [0, 1, MAX_INTEGER])
def test_every_id_from_0_is_taken(event_id: int) -> None:
    assert ARDiffusionSessionEvent(event_id, "prompt").event_id == event_id


def test_an_event_carries_a_prompt_or_a_control() -> None:
    with pytest.raises(ValueError, match="at least one control"):
        ARDiffusionSessionEvent(1)
    assert ARDiffusionSessionEvent(1, "p").controls == ()
    assert ARDiffusionSessionEvent(1, controls=(control(),)).prompt is None
    assert ARDiffusionSessionEvent(1, "").prompt == ""


@pytest.mark.parametrize("prompt", [1, b"p", True, ["p"]])
def test_the_prompt_of_an_event_is_text_or_none(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        ARDiffusionSessionEvent(1, prompt)


def test_an_event_names_each_track_at_most_once() -> None:
    with pytest.raises(ValueError, match="at most once"):
        ARDiffusionSessionEvent(1, controls=(control(x=1), control(x=2)))
    assert len(ARDiffusionSessionEvent(1, controls=(control("a"), control("b"))).controls) == 2


@pytest.mark.parametrize("controls", ["camera", b"camera", None, {"camera": 1}, [{"track": "camera"}], 1])
def test_the_controls_of_an_event_are_control_objects(controls: Any) -> None:
    with pytest.raises(ValueError, match="controls"):
        ARDiffusionSessionEvent(1, "p", controls)


def test_changing_what_was_passed_in_never_changes_the_event() -> None:
    data = {"held": ["w"]}
    controls = [ARDiffusionControlInput("camera", "test.v1", data)]
    event = ARDiffusionSessionEvent(1, controls=controls)  # type: ignore[arg-type]

    data["held"].append("s")
    controls.clear()

    assert event.controls[0].to_dict()["data"] == {"held": ["w"]}
    with pytest.raises(AttributeError):
        event.prompt = "other"  # type: ignore[misc]


@pytest.mark.parametrize("innermost", [1, {}, []])
def test_data_may_be_nested_32_deep_and_no_deeper(innermost: Any) -> None:
    containers = 0 if innermost == 1 else 1

    control(a=nested(MAX_DEPTH - 1 - containers, innermost))
    with pytest.raises(ValueError, match=f"transport-safe: nested deeper than {MAX_DEPTH}"):
        control(a=nested(MAX_DEPTH - containers, innermost))


def test_data_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop

    with pytest.raises(ValueError, match="nested deeper"):
        control(a=loop)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not finite") as refused:
        control(speed=[1.0, number])
    assert refused.value.field == "data.speed[1]"


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**63, 2**64, 10**400])
def test_an_integer_beyond_2_to_the_53_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=r"integer beyond 2\^53"):
        control(n=number)
    assert control(n=MAX_INTEGER, m=-MAX_INTEGER).data == {"n": MAX_INTEGER, "m": -MAX_INTEGER}


@pytest.mark.parametrize("digits", [19, 20, 400])
def test_an_integer_in_json_keeps_its_value_however_long_it_is(digits: int) -> None:
    number = int("7" * digits)

    assert loads(f'{{"n": {number}, "x": 0.5}}', "args") == {"n": number, "x": 0.5}


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("beside", [1, 10**400])
def test_what_is_no_json_number_is_refused_beside_numbers_of_any_length(text: str, beside: int) -> None:
    with pytest.raises(InvalidArgumentError, match="args is not valid JSON"):
        loads(f"[{beside}, {text}]", "args")


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "cut \ud83d"])
def test_a_lone_surrogate_is_refused_wherever_text_may_stand(text: str) -> None:
    attempts = [
        lambda: ARDiffusionSessionEvent(1, text),
        lambda: control(a=text),
        lambda: control(a={text: 1}),
        lambda: ARDiffusionControlInput(text, "v1", {}),
        lambda: ARDiffusionControlInput("camera", text, {}),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidArgumentError, match="lone surrogate"):
            attempt()


def test_an_event_of_64_kib_is_taken_and_one_byte_more_is_refused() -> None:
    room = MAX_EVENT_BYTES - len("7")

    assert ARDiffusionSessionEvent(7, "x" * room).size_bytes() == MAX_EVENT_BYTES
    with pytest.raises(InvalidArgumentError, match=str(MAX_EVENT_BYTES)) as refused:
        ARDiffusionSessionEvent(7, "x" * (room + 1))
    assert refused.value.field == "event"


def test_the_size_is_counted_in_bytes_of_utf_8() -> None:
    with pytest.raises(InvalidArgumentError, match="limit"):
        ARDiffusionSessionEvent(7, "é" * (MAX_EVENT_BYTES // 2))


def test_controls_count_towards_the_size() -> None:
    with pytest.raises(InvalidArgumentError, match="limit"):
        ARDiffusionSessionEvent(7, controls=(control(blob="x" * MAX_EVENT_BYTES),))


def test_what_is_absent_is_left_out_of_the_entry() -> None:
    assert ARDiffusionSessionEvent(0, "p").to_entry() == {"event_id": "0", "prompt": "p"}
    entry = ARDiffusionSessionEvent(12, controls=(control(x=1),)).to_entry()
    assert entry == {"event_id": "12", "controls": '[{"track":"camera","schema":"test.v1","data":{"x":1}}]'}


def test_controls_survive_their_json_form() -> None:
    controls = (control("a", x=[1, 2.5, None]), control("b", y={"z": "é"}))

    assert controls_from_json(controls_to_json(controls)) == controls


@pytest.mark.parametrize("name", ["track", "schema", "data"])
def test_a_control_has_exactly_its_three_fields(name: str) -> None:
    plain = control().to_dict()
    with pytest.raises(InvalidArgumentError, match="extra"):
        ARDiffusionControlInput.from_dict({**plain, "extra": 1})
    del plain[name]
    with pytest.raises(InvalidArgumentError, match=name):
        ARDiffusionControlInput.from_dict(plain)


def test_a_refusal_of_data_names_the_path_and_stays_short() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        freeze({"a" * 10_000: {"b": [float("nan")]}}, "data")

    assert refused.value.field == f"data.{'a' * 80}.b[0]"
    assert len(str(refused.value)) < 200


def test_a_receipt_says_what_became_of_the_event() -> None:
    receipt = ARDiffusionEventReceipt("world-1", 3, AcceptStatus.ACCEPTED, 1)

    assert (receipt.session_id, receipt.event_id, receipt.status, receipt.pending_event_count) == (
        "world-1",
        3,
        "ACCEPTED",
        1,
    )
    with pytest.raises(InvalidArgumentError):
        ARDiffusionEventReceipt("world-1", 3, AcceptStatus.DUPLICATE, -1)
