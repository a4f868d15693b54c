"""Models whose own code reads the table of another module: as a head, or as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.planner.helpers import INNER, RULES, WIDTH, Layer

VOCABULARY = 37  # no number of ranks divides it


class Reader(nn.Module):
    """A decoder that reads its table itself."""

    def __init__(self, read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(INNER) for _ in range(2))
        self.read = read

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.read(x, self.embed)


READS: dict[str, Any] = {
    "a head": lambda x, table: F.linear(x, table.weight),
    "a head with a loss": lambda x, table: F.cross_entropy(
        F.linear(x, table.weight).view(-1, VOCABULARY), torch.arange(x.size(0) * x.size(1)) % 30
    ),
    "a product": lambda x, table: x @ table.weight.t(),
    "rows": lambda x, table: x + table.weight[:1],
    "a norm": lambda x, table: x * table.weight.norm(),
    "shape and dtype": lambda x, table: x.to(table.weight.dtype) * table.weight.size(0),
}


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("name", READS)
def test_a_table_is_read_by_others(name: str, sp: bool) -> None:
    torch.manual_seed(0)
    plan = {"tpplan": 1, "rules": {"embed": "vocab", **RULES}}
    tpplan.verify(lambda: Reader(READS[name]), plan, 2, sequence_parallel=sp)


def test_a_head_of_the_table_keeps_its_classes_apart() -> None:
    plan = {"tpplan": 1, "rules": {"embed": "vocab", **RULES}}
    found = tpplan.verify(lambda: Reader(READS["a head with a loss"]), plan, 2)
    (check, *_) = found.checks
    assert check.counts["forward"]["all_gather"] == 0
