"""Entries of the events stream, as any producer may write them: each is an event or refused with the field at fault."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidArgumentError
from contracts.events import MAX_DEPTH, MAX_EVENT_BYTES, ARDiffusionSessionEvent

CAMERA = b'[{"track":"camera","schema":"v1","data":{"x":1}}]'


def decode(**fields: bytes) -> ARDiffusionSessionEvent:
    return ARDiffusionSessionEvent.from_entry({name.encode(): value for name, value in fields.items()})


def with_data(text: str) -> bytes:
    return f'[{{"track":"camera","schema":"v1","data":{text}}}]'.encode()


def refused(**fields: bytes) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        decode(**fields)
    assert len(str(caught.value)) < 1_000
    return caught.value


def test_a_bare_entry_becomes_an_event() -> None:
    event = decode(event_id=b"10", prompt="grün".encode(), controls=CAMERA)

    assert (event.event_id, event.prompt, len(event.controls)) == (10, "grün", 1)
    assert event.controls[0].to_dict() == {"track": "camera", "schema": "v1", "data": {"x": 1}}
    assert decode(event_id=b"0", prompt=b"").prompt == ""


def test_a_missing_id_is_named() -> None:
    assert refused(prompt=b"p").field == "event_id"


@pytest.mark.parametrize(
    "event_id",
    [
        b"",
        b"-1",
        b"-0",
        b"+7",
        b"07",
        b"00",
        b"7.0",
        b"7.5",
        b"1e3",
        b" 7",
        b"7 ",
        b"7\n",
        b"0x7",
        b"1_000",
        b"true",
        b"null",
        b"NaN",
        b"9007199254740992",
        b"18446744073709551616",
        b"9" * 5_000,
        "٧".encode(),
        "⁷".encode(),
    ],
)
def test_an_id_that_is_not_canonical_digits_below_2_to_the_53_is_refused(event_id: bytes) -> None:
    assert refused(event_id=event_id, prompt=b"p").field == "event_id"


def test_the_largest_id_is_taken() -> None:
    assert decode(event_id=b"9007199254740991", prompt=b"p").event_id == 2**53 - 1


def test_an_entry_with_neither_prompt_nor_control_is_refused() -> None:
    assert refused(event_id=b"1").field == "prompt"
    assert refused(event_id=b"1", controls=b"[]").field == "prompt"


def test_an_unknown_field_is_named() -> None:
    assert refused(event_id=b"1", prompt=b"p", colour=b"red").field == "colour"


@pytest.mark.parametrize("name", ["event_id", "prompt", "controls"])
def test_bad_utf_8_is_refused_and_named(name: str) -> None:
    fields = {"event_id": b"1", "prompt": b"p", name: b"\xff\xfe"}

    assert refused(**fields).field == name


def test_a_field_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="field name"):
        ARDiffusionSessionEvent.from_entry({b"event_id": b"1", b"\xff": b"x"})


@pytest.mark.parametrize(
    "controls",
    [
        b"",
        b"{",
        b"nonsense",
        b"[NaN]",
        with_data('{"x":NaN}'),
        with_data('{"x":Infinity}'),
        with_data('{"x":-Infinity}'),
        with_data('{"x":"\\ud800"}'),
        with_data('{"x":1}') + b" trailing",
        with_data("{'x':1}"),
        b"[" * 100_000,
        with_data('{"x":' + "9" * 5_000 + "}"),
        with_data('{"x":1e999}'),
    ],
    ids=lambda controls: controls[:40].decode(),
)
def test_what_is_not_json_is_refused(controls: bytes) -> None:
    assert refused(event_id=b"1", controls=controls).field in ("controls", "data.x", "event")


@pytest.mark.parametrize(
    "controls",
    [
        b"null",
        b"1",
        b'"camera"',
        b"{}",
        b"[1]",
        b"[null]",
        b"[[]]",
        b"[{}]",
        b'[{"track":"camera","schema":"v1"}]',
        b'[{"track":"camera","schema":"v1","data":{},"more":1}]',
    ],
)
def test_json_that_is_no_list_of_controls_is_refused(controls: bytes) -> None:
    assert (refused(event_id=b"1", controls=controls).field or "").startswith("controls")


@pytest.mark.parametrize("data", ["[]", "null", "1", '"x"'])
def test_data_that_is_no_object_is_refused(data: str) -> None:
    assert refused(event_id=b"1", controls=with_data(data)).field == "data"


def test_a_track_that_comes_twice_is_refused() -> None:
    twice = b"[" + CAMERA[1:-1] + b"," + CAMERA[1:-1] + b"]"

    assert "at most once" in str(refused(event_id=b"1", controls=twice))


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**63, 2**64, 2**64 + 1, 10**30])
def test_an_integer_that_other_readers_would_change_is_refused(number: int) -> None:
    error = refused(event_id=b"1", controls=with_data(f'{{"x":{number}}}'))

    assert error.field == "data.x"
    assert "2^53" in str(error)


def test_a_long_decimal_is_still_a_number() -> None:
    event = decode(event_id=b"1", controls=with_data('{"x":0.1234567890123456789012345}'))

    assert event.controls[0].data["x"] == 0.12345678901234568


def test_depth_32_is_taken_and_33_refused() -> None:
    def data(levels: int) -> bytes:
        return with_data('{"a":' * levels + "1" + "}" * levels)

    decode(event_id=b"1", controls=data(MAX_DEPTH))
    assert "nested deeper" in str(refused(event_id=b"1", controls=data(MAX_DEPTH + 1)))


def test_an_entry_that_is_too_large_is_refused_before_it_is_read() -> None:
    assert decode(event_id=b"1", prompt=b"x" * (MAX_EVENT_BYTES - 1)).prompt
    assert refused(event_id=b"1", prompt=b"x" * MAX_EVENT_BYTES).field == "event"
    assert refused(event_id=b"1", controls=b"[" * 1_000_000).field == "event"


def test_what_an_event_writes_it_reads_again() -> None:
    event = decode(event_id=b"5", prompt=b"p", controls=CAMERA)

    again = ARDiffusionSessionEvent.from_entry({k.encode(): v.encode() for k, v in event.to_entry().items()})

    assert again == event


NAMES = st.sampled_from([b"event_id", b"prompt", b"controls", b"other"]) | st.binary(max_size=5)
VALUES = (
    st.binary(max_size=30)
    | st.integers().map(lambda n: str(n).encode())
    | st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5).map(
        lambda value: json.dumps([{"track": "t", "schema": "s", "data": {"v": value}}]).encode()
    )
)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_bytes_are_an_event_or_a_typed_refusal(fields: dict[bytes, bytes]) -> None:
    try:
        outcome: ARDiffusionSessionEvent | InvalidArgumentError = ARDiffusionSessionEvent.from_entry(fields)
    except InvalidArgumentError as error:
        outcome = error

    if isinstance(outcome, InvalidArgumentError):
        assert outcome.field is not None
    else:
        assert outcome.to_entry()["event_id"].encode() == fields[b"event_id"]
