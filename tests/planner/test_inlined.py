"""Attention in a block's own code: its numbers are found, or the first error says what to write."""

from __future__ import annotations

from typing import Any

import pytest

import tpplan
from tests.planner.inlined import INPUT, RULES, Block, Model, OfAttributes, OfInput

pytestmark = pytest.mark.turns(4)


def plan() -> dict[str, Any]:
    return {"tpplan": 1, "rules": RULES}


def refused(kind: type[Block], sequence_parallel: bool) -> str:
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(Model(kind), plan(), 2, sequence_parallel, inputs=INPUT)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "own"),
    [(Block, {"parts": (4, 2)}), (OfAttributes, {"parts": (4, 2), "wide": (32, 16)})],
)
def test_its_numbers_are_found(kind: type[Block], own: dict[str, tuple[int, int]]) -> None:
    compiled = tpplan.check(Model(kind), plan(), 2, False, inputs=INPUT)
    assert dict(compiled.modules["layers.1"].attributes) == own
    result = tpplan.verify(Model(kind), plan(), tp=2, sequence_parallel=False, inputs=INPUT)
    assert result.gradient_error < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_width_taken_from_the_input(sequence_parallel: bool) -> None:
    text = refused(OfInput, sequence_parallel)
    assert "from the width of what layers.*.before (3 of them) gives, which is whole" in text
    assert "and parts made a rank's own" in text
    cure = "in a module of its own" if sequence_parallel else "Take it from what layers.*.one"
    assert cure in text


@pytest.mark.parametrize("kind", [Block, OfAttributes])
def test_rows_of_the_sequence(kind: type[Block]) -> None:
    text = refused(kind, True)
    assert "the code of layers.* has a rank's rows of the sequence" in text
    assert "make the stack of what runs on rows there, 'layers: layers.*.before'" in text
    with pytest.raises(tpplan.VerificationError, match="make the stack of what runs on rows"):
        tpplan.verify(Model(kind), plan(), tp=2, sequence_parallel=True, inputs=INPUT)


def test_without_norms() -> None:
    """There is nothing to make a stack of."""
    without = {"tpplan": 1, "rules": {**RULES, "layers.*.before": "replicate"}}
    with pytest.raises(tpplan.PlanError, match="in a module of its own"):
        tpplan.check(Model(Block), without, 2, True, inputs=INPUT)
