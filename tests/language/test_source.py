"""What YAML has and plans have not."""

from __future__ import annotations

import pytest

from tests.language.helpers import marked, problem, problems

HEAD = "tpplan: 1\nrules:\n"


@pytest.mark.parametrize(
    "pattern", ["*.q_proj", "**.q", "%a", "@a", "`a", "{q,k}_proj", "[qk]_proj"]
)
def test_an_unquoted_pattern_is_told_to_be_quoted(pattern: str) -> None:
    found = problem(f"{HEAD}  {pattern}: colwise\n")
    assert marked(found) == (3, 3, pattern)
    assert found.hint == f'quote the pattern: "{pattern}"'


@pytest.mark.parametrize("value", ["*.h", "%h", "{a,b}.c"])
def test_an_unquoted_pattern_as_a_value(value: str) -> None:
    found = problem(f"tpplan: 1\nlayers: {value}\n")
    assert marked(found) == (2, 9, value)
    assert found.hint == f'quote the pattern: "{value}"'


def test_an_unquoted_pattern_that_is_an_alias() -> None:
    found = problem(f"{HEAD}  *q_proj : colwise\n")
    assert marked(found) == (3, 3, "*q_proj")
    assert found.hint == 'quote the pattern: "*q_proj"'


@pytest.mark.parametrize("pattern", ["{q,k}", "[qk]"])
def test_an_unquoted_pattern_that_is_a_collection(pattern: str) -> None:
    found = problem(f"{HEAD}  {pattern}: colwise\n")
    assert marked(found) == (3, 3, pattern)
    assert found.hint == f'quote the pattern: "{pattern}"'


def test_anchors_and_aliases_are_refused() -> None:
    anchor, alias = problems(f"{HEAD}  a: &x vocab\n  b: *x\n")
    assert marked(anchor) == (3, 6, "&x vocab")
    assert "'&x' as an anchor" in anchor.message
    assert marked(alias) == (4, 6, "*x")
    assert "'*x' as an alias" in alias.message


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    lines = ["a0: &a0 [x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    found = problems("\n".join(lines))
    assert any("'&a0'" in d.message for d in found)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!str", "!mine", "!"])
def test_tags_are_refused(tag: str) -> None:
    found = problem(f"{HEAD}  a: {tag} vocab\n")
    assert marked(found)[:2] == (3, 6)
    assert f"'{tag}'" in found.message


@pytest.mark.parametrize(
    ("text", "line", "first"),
    [
        ("tpplan: 1\nrules: {a: vocab}\ntpplan: 1\n", 3, 1),
        (f"{HEAD}  a: vocab\n  'a': vocab\n", 4, 3),
        (f"{HEAD}  a:\n    style: vocab\n    style: vocab\n", 5, 4),
        (f"{HEAD}  a:\n    style: attention\n    attributes: {{\n  n: 1,\n  n: 2}}\n", 7, 6),
    ],
)
def test_duplicate_keys_show_both_lines(text: str, line: int, first: int) -> None:
    found = problem(text)
    assert "is given twice" in found.message
    assert marked(found)[0] == line
    assert found.related[0][1].line == first


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("1", "a number"),
        ("0.1", "a fractional number"),
        ("no", "true or false"),
        ("null", "nothing"),
        ("2024-01-01", "a date"),
    ],
)
def test_keys_are_text(key: str, kind: str) -> None:
    found = problem(f"{HEAD}  {key}: vocab\n")
    assert found.message == f"a key is text, but YAML reads this as {kind}"
    assert found.hint == f'quote it: "{key}"'


def test_merge_keys_are_refused() -> None:
    found = problem(f"{HEAD}  a: vocab\n  <<: {{b: vocab}}\n")
    assert marked(found) == (4, 3, "<<")
    assert "extends" in str(found.hint)


def test_a_second_document_is_refused() -> None:
    found = problem(f"{HEAD}  a: vocab\n---\ntpplan: 1\n")
    assert marked(found) == (4, 1, "---")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_an_error_and_no_recursion(opening: str) -> None:
    assert "20 levels deep" in problem(opening * 100_000).message


def test_a_huge_plan_is_refused() -> None:
    rules = "".join(f"  a{n}: vocab\n" for n in range(30_000))
    assert "far too large" in problem(HEAD + rules).message


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        (f"{HEAD}\ta: vocab\n", (3, 1, "\t"), "cannot start any token", "spaces, not with tabs"),
        (f"{HEAD}  a: b: vocab\n", (3, 7, ":"), "mapping values are not allowed", "indentation"),
        ("tpplan: 1\nrules\n", (3, 1, ""), "could not find expected ':'", "key: value"),
        ("rules: {a.{q,k}: vocab}", (1, 11, "{"), "expected ',' or '}'", "quote patterns"),
        ("a: 'b\n", (2, 1, ""), "unexpected end of stream", None),
        ("a: \x01b", (1, 4, "\x01"), "U+0001", None),
        ("a: b\r\nc: \x00", (2, 4, "\x00"), "U+0000", None),
        ('a: "\\UFFFFFFFF"', (1, 7, "F"), "cannot read this escape", None),
        ('description: "\\uD800"', (1, 14, '"\\uD800"'), "cannot be printed", None),
        ('description: "\\e[31m"', (1, 14, '"\\e[31m"'), "cannot be printed", None),
    ],
)
def test_what_is_not_yaml(
    text: str, where: tuple[int, int, str], message: str, hint: str | None
) -> None:
    found = [d for d in problems(text) if message in d.message]
    assert len(found) == 1, [d.message for d in problems(text)]
    assert marked(found[0]) == where
    assert hint is None or hint in str(found[0].hint)


def test_a_collection_never_closed_shows_where_it_starts() -> None:
    found = problem("tpplan: 1\nrules: {a: vocab\nb: c\n")
    assert any(position.line == 2 for _, position in found.related)
