"""Rendering of diagnostics."""

from __future__ import annotations

import copy
import pickle

from tpplan.language import Diagnostic, PlanError, Position, suggest

LINE = "  model.layers.*.self_attn.{q,k,v}_proj:  colwize"


def test_a_problem_shows_its_line_and_what_to_do() -> None:
    position = Position("llama.yaml", 12, 43, LINE, 7)
    rendered = Diagnostic("unknown style 'colwize'", position, "did you mean 'colwise'?").render()
    assert rendered == "\n".join(
        [
            "llama.yaml:12:43: error: unknown style 'colwize'",
            f"   12 | {LINE}",
            "      | " + " " * 42 + "^^^^^^^",
            "   help: did you mean 'colwise'?",
        ]
    )


def test_related_places_are_notes_and_the_hint_comes_last() -> None:
    first = Position("a.yaml", 9, 1, "norm: replicate", 4)
    second = Position("a.yaml", 123456, 1, "norm: vocab", 4)
    text = Diagnostic("given twice", second, "delete one", (("here first", first),)).render()
    assert text.splitlines() == [
        "a.yaml:123456:1: error: given twice",
        "123456 | norm: vocab",
        "       | ^^^^",
        "a.yaml:9:1: note: here first",
        "    9 | norm: replicate",
        "      | ^^^^",
        "   help: delete one",
    ]


def test_a_problem_without_a_place_is_one_line() -> None:
    assert Diagnostic("tp must be at least 1").render() == "error: tp must be at least 1"


def test_a_blank_line_is_not_shown() -> None:
    assert "|" not in Diagnostic("empty", Position("a", 1, 1, "")).render()


def test_a_long_line_is_clipped_around_the_place() -> None:
    line = "a" * 5000 + "WRONG" + "b" * 5000
    _, shown, carets = Diagnostic("x", Position("a", 1, 5001, line, 5)).render().splitlines()
    assert len(shown) < 120
    assert shown.startswith("    1 | ...a")
    assert shown.endswith("b...")
    start = carets.index("^")
    assert shown[start : start + 5] == "WRONG"
    assert carets.endswith("^" * 5)


def test_carets_stay_below_wide_and_unprintable_characters() -> None:
    line = "\u65e5\u672c\t\x1b[31m: wrong"
    column = line.index("wrong") + 1
    _, shown, carets = Diagnostic("x", Position("a", 1, column, line, 5)).render().splitlines()
    assert "\x1b" not in shown
    assert carets.index("^") == shown.index("wrong") + 2


def test_a_place_behind_the_line_keeps_its_caret() -> None:
    *_, carets = Diagnostic("x", Position("a", 1, 8, "layers:")).render().splitlines()
    assert carets == "      |        ^"


def test_an_error_renders_all_and_pickles() -> None:
    error = PlanError([Diagnostic("one", Position("a", 1, 1, "x")), Diagnostic("two")])
    assert str(error).split("\n\n")[1] == "error: two"
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert other.diagnostics == error.diagnostics
        assert str(other) == str(error)


def test_suggestions() -> None:
    styles = ["colwise", "rowwise", "sequence_parallel"]
    assert suggest("ColwiseParallel", styles) == "colwise"
    assert suggest("SequenceParallel", styles) == "sequence_parallel"
    assert suggest("zzz", styles) is None
    assert suggest("c" * 10**6, styles) is None
