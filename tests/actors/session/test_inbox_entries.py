"""Reading of inbox entries: what is malformed names its field, and a request that is named is never left waiting."""

import json
from typing import Any

import pytest

from actors.inbox import CommandItem, NewsItem, read_entry, sender_of
from contracts.commands import Op
from contracts.errors import InvalidArgumentError
from contracts.messages import Notice, WorkerReply

REPLY = {"session_id": "s", "request_id": "r", "fence": 5, "life": "l", "incarnation": "i"}
NOTICE = {"kind": "evicted", "session_id": "s", "worker": "w", "life": "l", "incarnation": "i", "message": ""}


def fields(name: str, value: Any) -> dict[bytes, bytes]:
    return {name.encode(): value if isinstance(value, bytes) else json.dumps(value).encode()}


def test_a_command_is_read_with_its_entry_and_whether_it_was_found() -> None:
    entry = fields("command", {"op": "reset", "session_id": "s", "command_id": "c"})

    item = read_entry("1-0", entry, found=True)

    assert isinstance(item, CommandItem)
    assert (item.entry_id, item.found, item.session_id, item.command.op) == ("1-0", True, "s", Op.RESET)


@pytest.mark.parametrize(
    ("name", "value", "kind"), [("reply", REPLY, WorkerReply), ("notice", NOTICE, Notice)]
)
def test_news_is_read(name: str, value: dict[str, Any], kind: type) -> None:
    item = read_entry("1-0", fields(name, value), found=False)

    assert isinstance(item, NewsItem)
    assert isinstance(item.news, kind)
    assert (item.session_id, item.found) == ("s", False)


@pytest.mark.parametrize(
    "change",
    [{"life": 1}, {"incarnation": ""}, {"output": []}, {"output": {}}, {"error": 5}, {"queued_ms": -1}],
    ids=str,
)
def test_a_malformed_reply_that_names_its_request_is_an_error_of_that_request(change: dict[str, Any]) -> None:
    item = read_entry("1-0", fields("reply", REPLY | change), found=False)

    assert isinstance(item, NewsItem)
    assert isinstance(item.news, WorkerReply)
    assert (item.news.request_id, item.news.fence, item.news.output) == ("r", 5, None)
    assert item.news.error is not None
    assert item.news.error.code == "metadata_mismatch"


@pytest.mark.parametrize(
    ("change", "field"),
    [({"session_id": "a b"}, "session_id"), ({"request_id": ""}, "request_id"), ({"fence": True}, "fence")],
)
def test_a_reply_that_names_no_request_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_entry("1-0", fields("reply", REPLY | change), found=False)
    assert caught.value.field == field


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", ["command", "reply", "notice"])
def test_what_is_no_object_is_refused(name: str, text: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        read_entry("1-0", {name.encode(): text}, found=False)


def test_an_entry_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="command, reply or notice"):
        read_entry("1-0", {b"news": b"{}"}, found=False)


@pytest.mark.parametrize(
    ("value", "sender"),
    [
        ({"session_id": "s", "command_id": "c", "op": "explode"}, ("s", "c")),
        ({"session_id": "s", "command_id": "c" * 200}, ("s", "c" * 200)),
        ({"session_id": "s", "command_id": "c" * 201}, None),
        ({"session_id": "s", "command_id": 5}, None),
        ({"session_id": "s", "command_id": " "}, None),
        ({"session_id": "", "command_id": "c"}, None),
        ({"command_id": "c"}, None),
        ([], None),
        (b"no JSON", None),
    ],
)
def test_the_sender_of_a_malformed_command_is_known_where_it_says_so(value: Any, sender: Any) -> None:
    assert sender_of(fields("command", value)) == sender


def test_an_entry_without_a_command_has_no_sender() -> None:
    assert sender_of({b"reply": b"{}"}) is None
