"""Integer expressions."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpplan.language import Expression, ExpressionError

VALUES = {"heads": 32, "head_dim": 128, "kv_heads": 8}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads * head_dim", 4096),
        ("heads // kv_heads", 4),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("10 - 4 - 3", 3),
        ("100 // 7 // 2", 7),
        ("-heads + 33", 1),
        ("- - 2", 2),
        ("7 % 4", 3),
        ("  12  ", 12),
    ],
)
def test_values(text: str, value: int) -> None:
    assert Expression(text).evaluate(VALUES) == value


def test_names() -> None:
    assert Expression("heads * (head_dim + heads) // 2").names == {"heads", "head_dim"}
    assert Expression("12").names == frozenset()


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("", 0),
        ("heads *", 7),
        ("heads ** 2", 7),
        ("heads.x", 5),
        ("f(2)", 1),
        ("(heads", 6),
        ("heads)", 5),
        ("2 heads", 2),
        ("1 / 2", 2),
        ("__import__('os')", 11),
        ("a if b else c", 2),
        ("9" * 30, 0),
        ("(" * 40 + "1" + ")" * 40, 32),
        ("1+" * 200 + "1", 200),
        ("\u0660", 0),
    ],
)
def test_what_is_no_expression_says_where(text: str, offset: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text)
    assert caught.value.offset == offset
    assert str(caught.value)


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("2 * haeds", 4, "unknown name 'haeds'; did you mean 'heads'?"),
        ("2 * zzz", 4, "unknown name 'zzz'; known names are heads, head_dim, kv_heads"),
        ("heads // (2 - 2)", 6, "division by zero"),
        ("heads % 0", 6, "division by zero"),
        ("*".join(["1000000"] * 4), 23, "the value is too large"),
    ],
)
def test_what_cannot_be_evaluated_says_where(text: str, offset: int, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text).evaluate(VALUES)
    assert (caught.value.offset, str(caught.value)) == (offset, message)


def test_expressions_copy_and_pickle() -> None:
    expression = Expression("heads * 2")
    for other in (copy.deepcopy(expression), pickle.loads(pickle.dumps(expression))):
        assert other == expression
        assert other.evaluate(VALUES) == 64


@given(
    st.recursive(
        st.integers(0, 50).map(str) | st.sampled_from(list(VALUES)),
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        max_leaves=8,
    )
)
def test_agrees_with_python(text: str) -> None:
    try:
        expected = eval(text, dict(VALUES))
    except ZeroDivisionError:
        expected = None
    try:
        assert Expression(text).evaluate(VALUES) == expected
    except ExpressionError as error:
        assert expected is None or "large" in str(error)
