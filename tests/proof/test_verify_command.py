"""``tpplan verify``, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpt import GPT
from tests.models import hf
from tests.planner.helpers import Stack
from tpplan import models, proof
from tpplan.cli import main

LARGE = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3.1-8b.json"


def small() -> nn.Module:
    """A model of one's own, as a factory gives it."""
    return GPT()


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A folder with a transformers config.json."""
    hf(device="meta").config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"verify llama.yaml --model {config} --tp 2 --sequence-parallel".split()) == 0
    out = capsys.readouterr().out
    assert "TP+SP" in out
    assert "shrunk" not in out


def test_a_factory_and_its_input(capsys: pytest.CaptureFixture[str]) -> None:
    line = "verify gpt.yaml --model tests.proof.test_verify_command:small --tp 2"
    assert main([*line.split(), "--input", "idx:int64[2,9]"]) == 0
    assert capsys.readouterr().err == ""


def test_a_large_config_is_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"verify llama.yaml --model {LARGE} --tp 4".split()) == 0
    assert "shrunk by its config, from 8,030,261,248 to " in capsys.readouterr().out


@pytest.mark.parametrize("debug", [False, True])
def test_what_differs(
    debug: bool,
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise proof.VerificationError("model.norm differs")

    monkeypatch.setattr("tpplan.api.verify", fails)
    line = f"verify llama.yaml --model {config} --tp 2".split()
    if debug:
        with pytest.raises(proof.VerificationError):
            main([*line, "--debug"])
        return
    assert main(line) == 1
    assert "error: model.norm differs" in capsys.readouterr().err


def test_what_cannot_be_run() -> None:
    with torch.device("meta"):
        wide = nn.Linear(2**15, 2**15)
    with pytest.raises(models.ModelError, match="1,073,774,592 parameters, too many to compute"):
        models.made_runnable(wide)


def test_meta_weights_are_drawn() -> None:
    with torch.device("meta"):
        model = Stack(lambda _: nn.LayerNorm(16))
    model, note = models.made_runnable(model)
    assert note is None
    assert all(not p.is_meta and bool(p.isfinite().all()) for p in model.parameters())


def test_the_config_of_a_large_model_stays() -> None:
    """A small one is built of a config of its own."""
    model = hf(device="meta", hidden_size=2048, intermediate_size=8192, num_hidden_layers=3)
    before = model.config.to_dict()
    small, told = models.made_runnable(model)
    assert told is not None
    assert model.config.to_dict() == before
    assert small.config.num_hidden_layers < 3  # type: ignore[union-attr]
