"""What only large models show; inputs of one size only; modules exchanged as a model runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tpplan.planner import compile_plan
from tpplan.proof import prove

WIDTH = 16


class Block(nn.Module):
    """Scores its input by the weight of a module that it does not call, and mixes its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 6, bias=False)
        self.fc, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = F.linear(x, self.scores.weight).softmax(-1).amax(-1, keepdim=True)
        return x + best * self.out(self.fc(x).relu())


class Frames(nn.Module):
    """Encodes so many frames, and no others."""

    def __init__(self, frames: int = 150) -> None:
        super().__init__()
        self.conv = nn.Conv1d(80, WIDTH, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(frames, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.frames = frames

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.frames:
            raise ValueError(f"{x.shape[-1]} frames, not {self.frames}")
        x = self.conv(x).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return x


class Exchanging(Frames):
    """Has another block after its first run on few frames."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] < 200:
            self.layers[0].out = nn.Linear(32, WIDTH)
        return super().forward(x)


PLAN = {
    "tpplan": 1,
    "sequence_parallel": False,
    "rules": {
        "conv": "replicate",
        "positions": "replicate",
        "layers.*.scores": "replicate",
        "layers.*.fc": "colwise",
        "layers.*.out": "rowwise",
    },
}
INPUT = torch.randn(2, 80, 150)


def test_weights_that_another_module_reads_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpplan.planner.replay._LARGE", 8)
    monkeypatch.setattr("tpplan.planner.stand_in._SMALL", 8)
    assert compile_plan(Frames(), tpplan.load_plan(PLAN), 2, False, inputs=INPUT).tp == 2


@pytest.mark.parametrize("tp", [2, 4])
def test_inputs_of_one_size_only(tp: int) -> None:
    found = tpplan.verify(Frames, tpplan.load_plan(PLAN), tp, inputs=INPUT)
    assert found.gradient_error <= 1e-5
    model = Frames()
    compiled = compile_plan(model, tpplan.load_plan(PLAN), tp, False, inputs=INPUT)
    prove(model, compiled, INPUT)


def test_modules_that_are_exchanged_as_the_model_runs() -> None:
    with pytest.raises(tpplan.PlanError, match=r"layers\.0\.out: the model puts another module"):
        compile_plan(Exchanging(), tpplan.load_plan(PLAN), 2, False, inputs=INPUT)
