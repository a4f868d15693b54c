"""``--json`` is what its schema says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import tpplan
from tests.gpt import GPT
from tests.models import hf

SCHEMA = json.loads((Path(tpplan.__file__).parent / "render" / "schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.turns(24)
@pytest.mark.parametrize(
    "options",
    [{}, {"sequence_parallel": False}, {"loss": True}, {"optimizer": None}, {"fold": False}],
    ids=str,
)
def test_reports_follow_it(options: dict[str, Any]) -> None:
    model = hf("Qwen3", device="meta", num_hidden_layers=9)
    report = tpplan.dry_run(model, "llama.yaml", 2, 1, 16, **options)
    VALIDATOR.validate(json.loads(json.dumps(report.to_dict())))


def test_also_of_one_rank() -> None:
    report = tpplan.dry_run(GPT(), "gpt", 1, 1, 8)
    VALIDATOR.validate(json.loads(json.dumps(report.to_dict())))
