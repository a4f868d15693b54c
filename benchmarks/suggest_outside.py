"""Suggested plans for models from outside transformers, beside those that their users write.

The models of tests/outside, and torch's own encoder and transformer: a plan is suggested for each
at tp 2, without a line by hand, and verified at tp 2 and 4, TP and TP+SP. The table is kept: a run
adds to it the models that it was asked for, and without any all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

import tpplan
from benchmarks.common import kept_rows, markdown
from benchmarks.coverage import reason_of
from benchmarks.suggest import BETTER, EQUAL, Found, verdict, verified
from tests.outside import torchs
from tests.outside.models import MODELS, Call, ids_of

RESULTS = Path(__file__).parent / "results" / "suggest-outside.md"
HEADS = ("model", "seconds", "rules", "suggested", "on a rank", "collectives", "by hand", "verdict")
# batch, length and seed of the call
CALL = (2, 8, 1)


@dataclass(frozen=True)
class Model:
    """One that is examined.

    Attributes:
        plan: that of its user; None where none was written.
    """

    make: Callable[[], nn.Module]
    call: Callable[[int, int, int], Call]
    plan: str | Mapping[str, Any] | None = None


def _stream(*names: str) -> Callable[[int, int, int], Call]:
    def call(batch: int, length: int, seed: int) -> Call:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, length, torchs.WIDTH)
        return {name: torch.randn(shape, generator=generator) for name in names}

    return call


def _translated(batch: int, length: int, seed: int) -> Call:
    ids = ids_of(batch, length, seed) % torchs.VOCAB
    return {"source": ids, "target": ids[:, : length // 2]}


def _read(batch: int, length: int, seed: int) -> Call:
    return {"ids": ids_of(batch, length, seed) % torchs.VOCAB}


_WRITTEN = (
    *("nanoGPT", "nanoGPT without flash, biases", "gpt-fast", "Meta's Llama"),
    *("torchtune", "torchtune, tied", "timm ViT, class token", "timm ViT, average"),
    "timm ViT, norms in the blocks",
    *("x-transformers", "x-transformers, half the KV heads"),
)
EXAMINED: Mapping[str, Model] = {
    **{name: Model(MODELS[name].make, MODELS[name].call, MODELS[name].plan) for name in _WRITTEN},
    "nn.TransformerEncoder": Model(torchs.encoder, _stream("src")),
    "nn.TransformerEncoder, words": Model(torchs.Classified, _read),
    "nn.Transformer": Model(torchs.transformer, _stream("src", "tgt")),
    "nn.Transformer, words": Model(torchs.Translator, _translated),
}


def examine(model: Model) -> tuple[str, ...]:
    """The cells of a model after its name."""
    inputs = dict(model.call(*CALL))
    by_hand = Found({}, {})
    if model.plan is not None:
        by_hand = verified(model.make, tpplan.load_plan(model.plan, model.make()), inputs)
    told = by_hand.cells[0] if model.plan is not None else "none"
    start = time.perf_counter()
    try:
        plan = tpplan.suggest(model.make(), 2, inputs)
    except tpplan.PlanError as error:
        seconds = f"{time.perf_counter() - start:.0f}"
        return seconds, "", f"refused: {reason_of(error)}", "", "", told, "refused"
    seconds = f"{time.perf_counter() - start:.0f}"
    found = verified(model.make, plan, inputs)
    rules = str(len(yaml.safe_load(plan.text)["rules"]))
    if model.plan is None:
        return seconds, rules, *found.cells, told, "proved" if found.costs else "wrong"
    return seconds, rules, *found.cells, told, verdict(found, by_hand)


def document(rows: Sequence[Sequence[str]]) -> str:
    """The whole page."""
    verdicts = [row[-1] for row in rows if row[-2] != "none"]
    fine = sum(v in (EQUAL, BETTER) for v in verdicts)
    parts = [
        "# Suggested plans for models from outside transformers",
        f"`python -m benchmarks.suggest_outside`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}.",
        "Written as their authors write them (`tests/outside`), small, with random weights. A plan "
        "is suggested at tp 2 without a line by hand; it and the plan that users write are then "
        "verified at tp 2 and 4, TP and TP+SP: in how many of these four ways each is right, the "
        "largest share of the parameters on a rank, and the collectives forward and backward in "
        "each, in that order. Worse is a suggestion that is wrong where the written plan is right, "
        "or has a larger share or more collectives in one.",
        f"- as good as the plan by hand or better: {fine} of {len(verdicts)} that have one\n"
        f"- refused, with the reason: {sum(row[-1] == 'refused' for row in rows)}",
        markdown(HEADS, rows),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Examine, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their name")
    parser.add_argument("--new", action="store_true", help="only those that the table lacks")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = kept_rows(RESULTS, HEADS)
    for name, model in EXAMINED.items():
        if options.only not in name or (options.new and name in rows):
            continue
        torch.manual_seed(0)
        rows[name] = (name, *(cell.replace("|", "/") for cell in examine(model)))
        print(" | ".join(rows[name]), flush=True)
        RESULTS.write_text(document([rows[known] for known in EXAMINED if known in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
