"""Models that do not run on plain token ids are run on others, where the user gave none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tpplan
from tests.rewrite import MODES
from tests.test_families import OF_BOTH, SIZES
from tpplan.cli import main

CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForSequenceClassification": ("Llama", {"pad_token_id": None}),
    "BertForMultipleChoice": ("Bert", {}),
    "BartForSequenceClassification": ("Bart", {"d_model": 32, **OF_BOTH}),
}


def bare() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def built(name: str) -> nn.Module:
    family, own = CLASSIFIERS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config)
    return model


@MODES
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_proved(name: str, sp: bool) -> None:
    assert tpplan.check(built(name), "auto", 2, sp).sequence_parallel == sp


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_everything_else(name: str) -> None:
    model = built(name)
    tpplan.verify(model, "auto", sequence_parallel=False)
    assert tpplan.dry_run(model, "auto", 2, batch=1, seq=16).size == "batch 1, sequence 16"


def test_choices_count_as_texts() -> None:
    ours, texts = (
        tpplan.dry_run(model, "auto", 2, batch=batch, seq=16).collectives[1].bytes
        for model, batch in ((built("BertForMultipleChoice"), 2), (bare(), 4))
    )
    assert ours == texts


def test_a_batch_that_is_asked_for_is_no_other() -> None:
    with pytest.raises(tpplan.PlanError, match="batch sizes > 1"):
        tpplan.dry_run(built("LlamaForSequenceClassification"), "auto", 2, batch=4, seq=16)


def test_the_size_of_a_report_is_that_of_its_inputs() -> None:
    given = {"input_ids": torch.zeros(3, 7, dtype=torch.long)}
    report = tpplan.dry_run(bare(), "auto", 2, inputs=given)
    assert (report.batch, report.seq) == (3, 7)
    assert "batch 3, sequence 7" in str(report)


def test_the_size_of_images() -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    report = tpplan.dry_run(transformers.ViTForImageClassification(config), "auto", 2, batch=2)
    assert report.size == "batch 2"
    assert report.to_dict()["seq"] is None
    assert "--seq" not in report.to_html()


class Picky(nn.Module):
    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted, self.table = wanted, nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise ValueError(self.wanted)


def test_what_no_inputs_are_right_for() -> None:
    with pytest.raises(tpplan.PlanError, match="a fish") as error:
        tpplan.check(Picky("a fish"), {"tpplan": 1, "rules": {"table": "vocab"}}, 2)
    assert len(error.value.diagnostics) == 1


def test_the_users_own_are_never_others() -> None:
    model = built("BertForMultipleChoice")
    with pytest.raises(tpplan.PlanError, match="cannot be run on example inputs"):
        tpplan.check(model, "auto", 2, inputs=torch.zeros(2, 8, dtype=torch.long))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain and suggest, which call no function that users call."""
    config = tmp_path / "config.json"
    transformers.BertConfig(**SIZES, architectures=["BertForMultipleChoice"]).to_json_file(config)
    model = ["--model", f"{config}", "--tp", "2"]
    assert main(["explain", "auto", "bert.encoder.layer.0.output.dense", *model]) == 0
    assert main(["suggest", *model]) == 0
    assert "bert.encoder" in capsys.readouterr().out
