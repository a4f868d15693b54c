"""Suggested plans beside the shipped ones: whether they are right, and what they cost.

For each tiny model of the zoo a plan is suggested at tp 2, without its class or the shipped plans
being looked at. Both plans are verified at tp 2 and 4, TP and TP+SP. The table is kept: a run adds
to it the models that it was asked for, and without any those that it has not.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

import tpplan
from benchmarks import zoo
from benchmarks.common import kept_rows, markdown
from benchmarks.coverage import plan_for, reason_of
from tests.gpt import GPT

RESULTS = Path(__file__).parent / "results" / "suggest.md"
HEADS = ("model", "seconds", "suggested", "on a rank", "collectives", "shipped", "verdict")
SIZES = (2, 4)
MODES = {"TP": False, "TP+SP": True}
PLAIN = "plain GPT"
WORSE, EQUAL, BETTER = "worse", "equal", "better"
WHY = """Why some are worse:

- diffllama: right at tp 2. At tp 4 a rank needs a key-value head of each half, and another value of
  an attribute then, which the shipped plan says; where a plan is asked for tp 4, neither is found,
  and attention is left whole.
- gemma3n, gemma3n_text: some layers cut off by the mean and deviation of a whole width, and the
  search has one rule for all layers of a make; the shipped plan tells them apart by their numbers.
  What else is shared costs four collectives more.
- git: what is chosen is the plan for TP, where both cost the same. Under TP+SP its norms before
  patches and tokens are put together are on rows, and gathered; the shipped plan has them whole.
- blt: its table of hashes, two thirds of the real model's parameters and few of the tiny one's, is
  left whole, since it is looked up six times; the shipped plan shards it.
- inkling2_text: its layers are of two kinds, and what sliding and full attention have in common
  gets one way; the search found none that is right for both, and left attention whole.
- jetmoe: experts that take tokens sorted by whom they chose, with the counts as numbers: no trace
  shows which columns belong together. The shipped plan names the two weights.
- rwkv: attention by channels, each with a decay of its own, was refused as the search put it
  together, and is left whole.
- zamba, zamba2: one block of attention serves several layers, with the model's first embeddings
  beside the stream; the search leaves it whole, and finds no way to cut the sequence then."""


@dataclass(frozen=True)
class Found:
    """A plan verified: in how many of the four ways it is right, and what it costs in each.

    Attributes:
        wrong: way -> why it is not right; costs: way -> share of a rank, and collectives.
    """

    wrong: Mapping[str, str]
    costs: Mapping[str, tuple[float, int]]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Ways, shares, collectives."""
        reasons = "; ".join(dict.fromkeys(self.wrong.values()))
        ways = f"{len(self.costs)}/{len(SIZES) * len(MODES)}"
        shares = " ".join(f"{share:.0%}" for share, _ in self.costs.values())
        counts = " ".join(str(count) for _, count in self.costs.values())
        return f"{ways} {reasons}".strip(), shares, counts


def verified(make: zoo.Maker, plan: tpplan.Plan, inputs: dict[str, Any] | None) -> Found:
    """A plan at all sizes and in both modes."""
    wrong, costs = {}, {}
    for tp in SIZES:
        for mode, sequence_parallel in MODES.items():
            way = f"{mode} {tp}"
            try:
                found = tpplan.verify(
                    make, plan, tp=tp, sequence_parallel=sequence_parallel, inputs=inputs
                )
            except Exception as error:  # whatever a model may raise belongs into the table
                wrong[way] = reason_of(error)
                continue
            counts = [
                sum(found.counts.get(phase, {}).values()) for phase in ("forward", "backward")
            ]
            costs[way] = found.rank_share, sum(counts)
    return Found(wrong, costs)


def verdict(suggested: Found, shipped: Found) -> str:
    """How a suggestion stands to the shipped plan, in the ways that this one is right in."""
    if not shipped.costs:
        return "no shipped plan is right" if suggested.costs else "neither"
    missing = [way for way in shipped.costs if way not in suggested.costs]
    if missing:
        return f"{WORSE}: not right in {', '.join(missing)}"
    told = []
    for way, (share, count) in shipped.costs.items():
        own, sent = suggested.costs[way]
        if own > share + 0.005:
            told.append(f"{way}: {own:.0%} on a rank, not {share:.0%}")
        if sent > count:
            told.append(f"{way}: {sent} collectives, not {count}")
    if told:
        return f"{WORSE}: {told[0]}"
    gains = len(suggested.costs) > len(shipped.costs) or any(
        suggested.costs[way][0] < share - 0.005 or suggested.costs[way][1] < count
        for way, (share, count) in shipped.costs.items()
    )
    return BETTER if gains else EQUAL


def examine(name: str, make: zoo.Maker) -> tuple[str, ...]:
    """The row of one model."""
    model = make()
    inputs = None if name == PLAIN else zoo.example(model)
    try:
        shipped = verified(make, plan_for(model), inputs)
    except Exception:  # no plan at all
        shipped = Found({}, {})
    start = time.perf_counter()
    try:
        plan = tpplan.suggest(model, 2, inputs)
    except Exception as error:
        seconds = f"{time.perf_counter() - start:.0f}"
        told = f"refused: {reason_of(error)}"
        found = WORSE if shipped.costs else "neither"
        return name, seconds, told, "", "", shipped.cells[0], found
    seconds = f"{time.perf_counter() - start:.0f}"
    suggested = verified(make, plan, inputs)
    return (name, seconds, *suggested.cells, shipped.cells[0], verdict(suggested, shipped))


def _child(writer: Connection, name: str, make: zoo.Maker) -> None:
    torch.set_num_threads(1)
    try:
        row = examine(name, make)
    except Exception as error:
        row = (name, "", f"not built: {reason_of(error)}", "", "", "", "neither")
    writer.send(row)


def in_a_process(name: str, make: zoo.Maker, timeout: float) -> tuple[str, ...]:
    """The row of one model, which may hang or die."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(writer, name, make), daemon=True)
    process.start()
    writer.close()
    row: tuple[str, ...] = (name, "", f"not ready after {timeout:.0f} s", "", "", "", WORSE)
    try:
        if reader.poll(timeout):
            row = reader.recv()
    except EOFError:
        row = (name, "", "the process died", "", "", "", WORSE)
    process.kill()
    process.join()
    return row


def document(rows: Sequence[Sequence[str]], left: int) -> str:
    """The whole page."""
    verdicts = [row[-1] for row in rows]
    with_shipped = [v for v in verdicts if v.startswith((WORSE, EQUAL, BETTER))]
    fine = sum(v in (EQUAL, BETTER) for v in with_shipped)
    four = sum(row[2].startswith("4/4") for row in rows)
    parts = [
        "# Suggested plans",
        f"`python -m benchmarks.suggest`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}.",
        "Tiny models with random weights. A plan is suggested at tp 2 from what the model does; it "
        "and the shipped plan are then verified at tp 2 and 4, TP and TP+SP: in how many of these "
        "four ways each is right, the largest share of the parameters on a rank, and the "
        "collectives forward and backward in each, in that order. Worse is a suggestion that is "
        "wrong where the shipped plan is right, or has a larger share or more collectives in one.",
        f"- {len(rows)} models examined, {left} not yet\n- right in all four ways: {four}\n"
        f"- as good as the shipped plan or better: {fine} of {len(with_shipped)} that have one",
        WHY,
        markdown(HEADS, rows),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Examine, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="", help="only these, separated by commas, anew")
    parser.add_argument("--timeout", type=float, default=240, metavar="S", help="for each model")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no model after so long")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    makers = {PLAIN: GPT, **zoo.makers()}
    asked = [name for name in options.types.split(",") if name]
    unknown = [name for name in asked if name not in makers]
    if unknown:
        raise SystemExit(f"no such models: {', '.join(unknown)}")
    rows, start = kept_rows(RESULTS, HEADS), time.monotonic()
    for name in asked or [name for name in makers if name not in rows]:
        if time.monotonic() - start > options.seconds:
            break
        row = in_a_process(name, makers[name], options.timeout)
        rows[name] = tuple(cell.replace("|", "/") for cell in row)
        print(" | ".join(row), flush=True)
        ordered = [rows[known] for known in makers if known in rows]
        RESULTS.write_text(document(ordered, len(makers) - len(ordered)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
