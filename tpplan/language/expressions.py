"""Integer expressions such as ``heads * head_dim``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tpplan.language.diagnostics import TextError, did_you_mean, quoted

MAX_LENGTH = 200
MAX_DEPTH = 32
MAX_MAGNITUDE = 2**63

_TOKEN = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)|//|[-+*%()]")
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}
_SUMS = ("+", "-")
_PRODUCTS = ("*", "//", "%")


class ExpressionError(TextError):
    """An expression that cannot be read or evaluated."""


@dataclass(frozen=True)
class _Token:
    text: str
    kind: str
    offset: int


@dataclass(frozen=True)
class _Node:
    """A number, a name, or an operator with one or two operands."""

    token: _Token
    operands: tuple[_Node, ...] = ()


@dataclass(frozen=True)
class Expression:
    """An expression over names and integers: ``+ - * // %`` and parentheses.

    Raises:
        ExpressionError: where the text is not such an expression.
    """

    text: str
    names: frozenset[str] = field(init=False, repr=False, compare=False)
    _root: _Node = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reader = _Reader(self.text)
        object.__setattr__(self, "names", reader.names)
        object.__setattr__(self, "_root", reader.read())

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The expression's value where its names have ``values``.

        Raises:
            ExpressionError: for an unknown name, a division by zero, or a value out of range.
        """
        return _evaluate(self._root, values)


def _evaluate(node: _Node, values: Mapping[str, int]) -> int:
    token = node.token
    if token.kind == "number":
        return int(token.text)
    if token.kind == "name":
        if token.text not in values:
            known = f"known names are {', '.join(values)}" if values else "no names are known"
            hint = did_you_mean(token.text, values, known)
            raise ExpressionError(f"unknown name {quoted(token.text)}; {hint}", token.offset)
        return values[token.text]
    operands = [_evaluate(operand, values) for operand in node.operands]
    if len(operands) == 1:
        return -operands[0] if token.text == "-" else operands[0]
    if token.text in ("//", "%") and operands[1] == 0:
        raise ExpressionError("division by zero", token.offset)
    result = _OPERATORS[token.text](*operands)
    if abs(result) >= MAX_MAGNITUDE:
        raise ExpressionError("the value is too large", token.offset)
    return result


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters", MAX_LENGTH)
        self.tokens = list(_tokens(text))
        self.names = frozenset(token.text for token in self.tokens if token.kind == "name")
        self.end = len(text)
        self.depth = 0

    def read(self) -> _Node:
        root = self.sum()
        if self.tokens:
            raise self.unexpected()
        return root

    def unexpected(self) -> ExpressionError:
        if not self.tokens:
            return ExpressionError("the expression ends too early", self.end)
        return ExpressionError(f"unexpected {quoted(self.tokens[0].text)}", self.tokens[0].offset)

    def next_is(self, *texts: str) -> bool:
        return bool(self.tokens) and self.tokens[0].text in texts

    def sum(self) -> _Node:
        left = self.product()
        while self.next_is(*_SUMS):
            left = _Node(self.tokens.pop(0), (left, self.product()))
        return left

    def product(self) -> _Node:
        left = self.operand()
        while self.next_is(*_PRODUCTS):
            left = _Node(self.tokens.pop(0), (left, self.operand()))
        return left

    def operand(self) -> _Node:
        if not self.tokens:
            raise self.unexpected()
        token = self.tokens[0]
        if token.kind in ("name", "number"):
            return _Node(self.tokens.pop(0))
        if token.text not in ("(", *_SUMS):
            raise self.unexpected()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError("the expression is nested too deeply", token.offset)
        self.tokens.pop(0)
        if token.text == "(":
            inner = self.sum()
            if not self.next_is(")"):
                raise self.unexpected()
            self.tokens.pop(0)
        else:
            inner = _Node(token, (self.operand(),))
        self.depth -= 1
        return inner


def _tokens(text: str) -> Iterator[_Token]:
    offset = 0
    while offset < len(text):
        if text[offset].isspace():
            offset += 1
            continue
        found = _TOKEN.match(text, offset)
        if found is None:
            allowed = "names, whole numbers, + - * // % and parentheses"
            message = f"{quoted(text[offset])} cannot stand here; an expression is made of"
            raise ExpressionError(f"{message} {allowed}", offset)
        if found["number"] and int(found["number"]) >= MAX_MAGNITUDE:
            raise ExpressionError("the number is too large", offset)
        yield _Token(found[0], found.lastgroup or "symbol", offset)
        offset = found.end()
