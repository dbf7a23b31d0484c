"""The error tree: builtin bases, and that an error crosses the wire as what it was."""

import json
from collections.abc import Iterator

import pytest

from contracts import errors
from contracts.errors import FAILURE_CODES, CapacityError, InvalidTypeError, WorldlineError, error_from_dict


def tree(base: type[WorldlineError] = WorldlineError) -> Iterator[type[WorldlineError]]:
    for cls in base.__subclasses__():
        if cls.__module__ == errors.__name__:
            yield cls
            yield from tree(cls)


ALL = sorted(set(tree()), key=lambda cls: cls.__name__)
BASES = {errors.SessionError, errors.TickFailedError}
SENT = [cls for cls in ALL if cls not in BASES | {InvalidTypeError, CapacityError}]

BUILTINS = {
    "InvalidArgumentError": ValueError,
    "CorruptDataError": ValueError,
    "InvalidTypeError": TypeError,
    "SessionError": RuntimeError,
    "SessionNotFoundError": LookupError,
    "SessionStateError": RuntimeError,
    "SessionExistsError": RuntimeError,
    "EventStaleError": ValueError,
    "EventQueueFullError": RuntimeError,
    "TickFailedError": RuntimeError,
    "ChunkMetadataError": ValueError,
    "OwnershipLostError": RuntimeError,
    "BrokerError": ConnectionError,
    "ConfigurationError": ValueError,
    "CapacityError": ValueError,
    "KVStateError": RuntimeError,
    "PoolExhaustedError": RuntimeError,
}


def across(error: WorldlineError) -> WorldlineError:
    return error_from_dict(json.loads(json.dumps(error.to_dict())))


@pytest.mark.parametrize("cls", SENT)
def test_an_error_crosses_the_wire_as_the_same_type_with_all_that_it_says(cls: type[WorldlineError]) -> None:
    sent = cls("the floor is 10", field="event_id")

    got = across(sent)

    assert type(got) is cls
    assert (got.code, got.message, got.field, got.retryable) == (
        sent.code,
        "the floor is 10",
        "event_id",
        sent.retryable,
    )
    assert str(got) == "the floor is 10"


@pytest.mark.parametrize("code", sorted(FAILURE_CODES))
def test_every_failure_code_comes_back_as_a_failed_tick(code: str) -> None:
    got = across(errors.TickFailedError("gone", code=code))

    assert isinstance(got, errors.TickFailedError)
    assert got.code == code


def test_a_wrong_type_comes_back_as_an_invalid_argument() -> None:
    assert type(across(InvalidTypeError("no event", field="event"))) is errors.InvalidArgumentError


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_plain_python_catches_it_too(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize("cls", ALL)
def test_the_docstring_at_the_top_draws_every_class_with_a_code_of_its_own(cls: type[WorldlineError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")
    assert (cls.__doc__ or "").startswith(("Raised ", "Base of "))


def test_codes_are_unique_but_for_wrong_types() -> None:
    codes = [cls.code for cls in SENT]

    assert len(codes) == len(set(codes))


def test_only_what_may_succeed_later_is_retryable() -> None:
    assert {cls.code for cls in ALL if cls.retryable} == {
        "queue_full",
        "no_capacity",
        "expired",
        "broker_unreachable",
    }


def test_an_unknown_code_keeps_what_it_says() -> None:
    got = error_from_dict({"code": "of_the_future", "message": "m", "field": None, "retryable": True})

    assert type(got) is errors.SessionError
    assert (got.code, got.message, got.field, got.retryable) == ("of_the_future", "m", None, True)


@pytest.mark.parametrize("data", [{}, {"code": 5}, {"code": "stale", "message": None, "field": 7}])
def test_a_malformed_error_is_still_an_error(data: dict[str, object]) -> None:
    got = error_from_dict(data)

    assert isinstance(got, WorldlineError)
    assert got.field is None


def test_every_code_that_crosses_is_listed() -> None:
    assert {cls.code for cls in SENT} | FAILURE_CODES == set(errors.answer_codes())


def test_a_session_that_does_not_fit_says_both_numbers() -> None:
    error = CapacityError("too small", available_bytes=1, required_bytes=2)

    assert (error.available_bytes, error.required_bytes, error.code) == (1, 2, "cannot_fit")
