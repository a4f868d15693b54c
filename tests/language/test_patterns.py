"""Patterns against paths."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpplan.language import Pattern, PatternError

Q = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        (Q, Q, True),
        ("model.layers.*.self_attn.{q,k,v}_proj", Q, True),
        ("model.layers.*.self_attn.{k,v}_proj", Q, False),
        ("model.*.q_proj", Q, False),
        ("model.**.q_proj", Q, True),
        ("**.q_proj", Q, True),
        ("**.q_proj", "q_proj", True),
        ("model.**", "model", True),
        ("**", Q, True),
        ("**.*.**", "a", True),
        ("**.*.*.**", "a", False),
        ("model.layers.?.self_attn.?_proj", Q, True),
        ("model.layers.?.self_attn.?_proj", Q.replace("3", "31"), False),
        ("model.layers.[0-4].**", Q, True),
        ("model.layers.[!0-4].**", Q, False),
        ("[abc]x", "bx", True),
        ("[]a]", "]", True),
        ("[a-]", "-", True),
        ("[{]", "{", True),
        ("[*]", "*", True),
        ("[*]", "a", False),
        ("{encoder,decoder.block}.*.x", "decoder.block.0.x", True),
        ("{encoder,decoder.block}.*.x", "encoder.0.x", True),
        ("{encoder,decoder.block}.*.x", "decoder.0.x", False),
        ("block{,.inner}", "block", True),
        ("block{,.inner}", "block.inner", True),
        ("a{b{c,d},e}", "abd", True),
        ("a{b{c,d},e}", "ae", True),
        ("a{b{c,d},e}", "ab", False),
        ("a,b", "a,b", True),
        ("{*,b}*", "xyz", True),
        ("a.{**,b}.c", "a.x.y.c", True),
        ("*", "", False),
        ("**", "", False),
        (".", "", True),
        (".", "a", False),
        ("Norm", "norm", False),
        ("h.*", "h.0.attn", False),
    ],
)
def test_matches(pattern: str, path: str, fits: bool) -> None:
    assert Pattern(pattern).matches(path) is fits


@pytest.mark.parametrize("text", ["a.b", "lm_head", ".", "a.0.b"])
def test_exact(text: str) -> None:
    assert Pattern(text).is_exact


@pytest.mark.parametrize("text", ["*", "a.?", "[a]", "{a}", "a.**", "[[]"])
def test_not_exact(text: str) -> None:
    assert not Pattern(text).is_exact


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("", 0, "empty pattern"),
        ("a..b", 2, "segment is empty"),
        (".a", 0, "segment is empty"),
        ("a.", 1, "segment is empty"),
        ("a.{b,}", 1, "segment is empty"),
        ("a.**b", 2, "whole segment"),
        ("a.b**", 3, "whole segment"),
        ("a.***", 2, "whole segment"),
        ("a.{**,b}c", 3, "whole segment"),
        ("a{b,c", 1, "never closed"),
        ("a{b,{c}", 1, "never closed"),
        ("ab}", 2, "closes nothing"),
        ("a]b", 1, "closes nothing"),
        ("a[bc", 1, "never closed"),
        ("a[]", 1, "never closed"),
        ("a[!]", 1, "never closed"),
        ("a[b.c]", 3, "dot"),
        ("[z-a]", 1, "range 'z-a' is empty"),
        ("a{}b", 1, "no alternatives"),
        ("{a,b}" * 9, 45, "more than 256"),
        ("{" + "," * 300 + "}", 257, "more than 256"),
        ("{" * 500, 16, "too deeply"),
        ("a" * 1001, 1000, "at most 1000"),
    ],
)
def test_what_is_no_pattern_says_where(text: str, offset: int, message: str) -> None:
    with pytest.raises(PatternError, match=message) as caught:
        Pattern(text)
    assert caught.value.offset == offset


def test_equal_texts_are_equal_patterns_that_copy_and_pickle() -> None:
    pattern = Pattern("h.*.{a,b}")
    for other in (
        Pattern("h.*.{a,b}"),
        copy.deepcopy(pattern),
        pickle.loads(pickle.dumps(pattern)),
    ):
        assert other == pattern
        assert hash(other) == hash(pattern)
        assert other.matches("h.7.b")


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 400 + "b", "a" * 10_000),
        ("**.a." * 150 + "b", ".".join("a" * 5_000)),
        ("**.*a*a*a*b.**.c", ".".join(["a" * 50] * 200)),
        ("{*a,*a*a}{*a,*a*a}{*a,*a*a}{*a,*a*a}b", "a" * 2_000),
    ],
)
def test_hostile_patterns_end(pattern: str, path: str) -> None:
    assert not Pattern(pattern).matches(path)


def test_many_paths() -> None:
    paths = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(2500) for p in "qkvo"]
    pattern = Pattern("model.layers.*.self_attn.{q,k,v}_proj")
    assert sum(map(pattern.matches, paths)) == 7500


# --- against a slow reference, on patterns made of parts whose meaning is spelled out

LETTERS = "ab"
ONE_CHARACTER = {"?": LETTERS, "[a]": "a", "[!a]": "b", "[a-b]": "ab", "a": "a", "b": "b"}


def _words(length: int) -> list[str]:
    found = [w for n in range(length + 1) for w in itertools.product(LETTERS, repeat=n)]
    return ["".join(word) for word in found]


def _segment_fits(parts: tuple[str, ...], name: str) -> bool:
    if not parts:
        return not name
    if parts[0] == "*":
        return any(_segment_fits(parts[1:], name[n:]) for n in range(len(name) + 1))
    return bool(name) and name[0] in ONE_CHARACTER[parts[0]] and _segment_fits(parts[1:], name[1:])


def _path_fits(segments: tuple[tuple[str, ...], ...], names: list[str]) -> bool:
    if not segments:
        return not names
    if segments[0] == ("**",):
        return any(_path_fits(segments[1:], names[n:]) for n in range(len(names) + 1))
    return (
        bool(names) and _segment_fits(segments[0], names[0]) and _path_fits(segments[1:], names[1:])
    )


SEGMENT = (
    st.lists(st.sampled_from([*ONE_CHARACTER, "*"]), min_size=1, max_size=4)
    .filter(lambda parts: "**" not in "".join(parts))
    .map(tuple)
)
SEGMENTS = st.lists(SEGMENT | st.just(("**",)), min_size=1, max_size=4).map(tuple)
PATH = st.lists(st.sampled_from(_words(3)[1:]), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(SEGMENTS, min_size=1, max_size=3), st.booleans(), PATH)
def test_agrees_with_the_reference(
    choices: list[tuple[tuple[str, ...], ...]], nested: bool, names: list[str]
) -> None:
    texts = [".".join("".join(parts) for parts in segments) for segments in choices]
    text = texts[0]
    if len(texts) > 1:
        text = "{" + ",".join(texts) + "}"
    if nested:
        text = "{" + text + "}"
    expected = any(_path_fits(segments, names) for segments in choices)
    assert Pattern(text).matches(".".join(names)) is expected


@settings(deadline=None)
@given(st.text(alphabet="ab.*?[]{},!-", max_size=20), PATH)
def test_any_text_is_a_pattern_or_an_error_within_it(text: str, names: list[str]) -> None:
    try:
        Pattern(text).matches(".".join(names))
    except PatternError as error:
        assert 0 <= error.offset <= len(text)
