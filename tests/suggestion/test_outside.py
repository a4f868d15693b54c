"""Plans suggested for models from outside transformers."""

from __future__ import annotations

import pytest

import tpplan
from benchmarks import suggest_outside as table
from benchmarks.common import kept_rows

pytestmark = pytest.mark.turns(24)

PROVED = (
    "nanoGPT",
    "gpt-fast",
    "torchtune",
    "timm ViT, class token",
    "x-transformers",
    "nn.TransformerEncoder, words",
    "nn.Transformer, words",
)


@pytest.mark.turns(12)
@pytest.mark.parametrize("name", PROVED)
def test_proved_without_a_line_by_hand(name: str) -> None:
    model = table.EXAMINED[name]
    inputs = dict(model.call(*table.CALL))
    plan = tpplan.suggest(model.make(), 2, inputs)
    found = tpplan.verify(model.make, plan, 2, inputs=inputs)
    assert found.rank_share < 0.7


def test_table() -> None:
    """The page that is kept has all of them: each proved, or refused with the reason."""
    rows = kept_rows(table.RESULTS, table.HEADS)
    assert list(rows) == list(table.EXAMINED)
    assert all(len(row) == len(table.HEADS) for row in rows.values())
    for name in PROVED:
        assert rows[name][3].startswith(("2/4", "4/4"))
