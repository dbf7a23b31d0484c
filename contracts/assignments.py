"""`NAME=VALUE` as a command line repeats it; a value is JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from contracts.errors import InvalidArgumentError
from contracts.events import loads


def parse_assignments(
    texts: Sequence[str], option: str, *, form: str = "K=JSON", words: Collection[str] = ()
) -> dict[str, Any]:
    """`["fov=60", 'sky="red"']` as a mapping; each name at most once.

    Args:
        texts: what was given, one a time that the option was.
        option: its name, for messages.
        form: what one looks like, for messages.
        words: names whose value is a word, which may do without quotes.

    Raises:
        InvalidArgumentError: one of another form; or a name that is given twice, or has a value that is no JSON: its
            field is the name.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise InvalidArgumentError(f"--{option} is {form}, got {text!r:.80}", field=option)
        if name in values:
            raise InvalidArgumentError(f"--{option} {name:.80} is given twice", field=name[:80])
        plain = name in words and not value.startswith('"')
        values[name] = value if plain else _value(value, name[:80], option)
    return values


def _value(text: str, name: str, option: str) -> Any:
    try:
        return loads(text, name)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--{option} {error.message}", field=name) from None
