"""Suggested plans as text: YAML reads them as they are meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpplan
from tpplan.suggestion.draft import Decision
from tpplan.suggestion.patterns import Names, patterns_of
from tpplan.suggestion.text import rules_from


@pytest.mark.parametrize("path", ["1", "0.1", "1e3", "on", "null", "*.0", "layers.0", "~"])
def test_keys_are_text(path: str) -> None:
    """Of modules that are called by numbers, or by words that YAML has a meaning for."""
    (rule,) = rules_from([(path, Decision("colwise"))])
    assert rule.pattern.text == path


class Added(nn.Module):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.net(x)
        return out


def test_a_model_without_names() -> None:
    def mlp() -> nn.Module:
        return Added(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    model = nn.Sequential(nn.Embedding(40, 16), mlp(), mlp(), nn.LayerNorm(16), nn.Linear(16, 40))
    inputs = {"input": torch.randint(1, 40, (2, 8))}
    plan = tpplan.suggest(model, 2, inputs=inputs)
    assert {'"0"', '"3"', '"4"'} <= {
        line.partition(":")[0].strip() for line in plan.text.splitlines()
    }
    assert "attention" not in plan.text  # the norms run on rows, before the stream is gathered
    assert tpplan.verify(model, plan, 4, inputs=inputs).rank_share < 0.3


def test_no_two_patterns_of_one_module() -> None:
    """Also of lists in which others have other styles."""
    pairs = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))
    model = nn.ModuleDict({"pairs": pairs})
    whole = {"pairs.0.0", "pairs.1.0", "pairs.1.1", "pairs.1.2"}
    decisions = {f"pairs.{i}.{j}": Decision("colwise") for i in range(2) for j in range(3)}
    decisions |= dict.fromkeys(whole, Decision("replicate"))
    names = Names(model)
    found = patterns_of(decisions, names)
    met = [path for text, _, _ in found for path in sorted(names.matched(text))]
    assert sorted(met) == sorted(decisions)


class Own(nn.Module):
    """Its own code multiplies by parameters of its own, and there is nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(32, 16))
        self.down = nn.Parameter(torch.randn(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up.T).relu() @ self.down.T


def test_the_model_itself() -> None:
    """Its path is empty, of which no pattern is; the language has one for it."""
    model = Own()
    ((text, decision, paths),) = patterns_of({"": Decision("replicate")}, Names(model))
    assert (text, paths) == (".", ("",))
    (rule,) = rules_from([(text, decision)])
    assert rule.pattern.matches("")
    with pytest.raises(tpplan.PlanError, match="no part of the model was found"):
        tpplan.suggest(model, 2, inputs={"x": torch.randn(2, 8, 16)})
