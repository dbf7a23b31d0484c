"""`NAME=VALUE` on a command line."""

import pytest

from contracts.assignments import parse_assignments
from contracts.errors import InvalidArgumentError


def test_a_value_is_json_and_may_hold_the_sign_itself() -> None:
    texts = ["fov=60", 'sky="a=b"', "quick=false", "nothing=null", "list=[1]"]
    assert parse_assignments(texts, "param") == {
        "fov": 60,
        "sky": "a=b",
        "quick": False,
        "nothing": None,
        "list": [1],
    }


def test_a_word_may_do_without_quotes_where_it_is_known_to_be_one() -> None:
    for text in ("dtype=bfloat16", 'dtype="bfloat16"'):
        assert parse_assignments([text], "set", words=("dtype",)) == {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("texts", "field", "said"),
    [
        (["fov"], "param", "--param is K=JSON, got 'fov'"),
        (["=1"], "param", "--param is K=JSON"),
        (["fov=1", "fov=1"], "fov", "--param fov is given twice"),
        (["fov=wide"], "fov", "fov is not valid JSON"),
        (["fov="], "fov", "fov is not valid JSON"),
        (["fov=NaN"], "fov", "fov is not valid JSON"),
    ],
)
def test_anything_else_is_refused_and_named(texts: list[str], field: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        parse_assignments(texts, "param")
    assert caught.value.field == field
