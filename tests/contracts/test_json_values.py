"""Property: what a control takes comes back from JSON as the same value of the same type; all else is refused."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput, controls_from_json, controls_to_json, thaw

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**53, 2**53 - 1, -(2**53), 2**63, 2**64, 2**64 + 1, 10**19, 10**25])
    | st.floats()
    | st.sampled_from([1e22, 1.5e300, 5e-324, -0.0, 1234567890123456789.0])
    | st.text(max_size=8)
    | st.characters(categories=["Cs"])
    | st.binary(max_size=3)
)
KEYS = st.text(max_size=4) | st.integers(0, 3) | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down; tuples and lists are both JSON arrays."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


@given(VALUES)
def test_a_value_is_refused_or_survives_with_its_types(value: Any) -> None:
    try:
        control = ARDiffusionControlInput("camera", "v1", {"value": value})
    except InvalidArgumentError:
        return
    (back,) = controls_from_json(controls_to_json((control,)))

    assert same(thaw(back.data), {"value": value})
    assert same(thaw(control.data), {"value": value})


@given(st.text(max_size=20) | st.characters(categories=["Cs"]))
def test_text_is_refused_or_survives_in_every_place(text: str) -> None:
    try:
        control = ARDiffusionControlInput(text, text, {text: text})
    except InvalidArgumentError:
        assert not text.strip() or any("\ud800" <= c <= "\udfff" for c in text)
        return

    assert controls_from_json(controls_to_json((control,))) == (control,)
