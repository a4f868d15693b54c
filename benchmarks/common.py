"""What the benchmarks share: options, ranks, the gradient metric, tables."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

TOLERANCE = 1e-5
"""The largest gradient error, by the metric of `gradient_error`, of a correct float32 sharding."""


LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
"""The Llama that runs on gloo ranks, small enough for two cores."""


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 where a bar is missed"
    )
    parser.add_argument("--without-tpplan", action="store_true", help="measure only the peers")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line."""
    options = parser.parse_args()
    if options.check and options.without_tpplan:
        parser.error("--check judges tpplan: it cannot be combined with --without-tpplan")
    if options.without_tpplan:
        print("tpplan is missing from this run (--without-tpplan): peers only\n")
    return options


def on_ranks(work: Callable[..., Any], size: int, *arguments: Any) -> Any:
    """Call ``work(*arguments)`` on ``size`` gloo ranks of one thread each; the first's result."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(size, folder, work, arguments), nprocs=size)
        return torch.load(Path(folder, "result"), weights_only=False)


def _rank(
    rank: int, size: int, folder: str, work: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    result = work(*arguments)
    if rank == 0:
        torch.save(result, Path(folder, "result"))
    dist.barrier()
    dist.destroy_process_group()


def gradient_error(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest max|Δ| / max(max|g|, 1e-3 · the largest |g| of the model).

    Some true gradients are zero: the second term keeps their rounding from counting as an error.
    """
    if got.keys() != expected.keys():
        raise ValueError(f"gradients of other names: {sorted(got.keys() ^ expected.keys())}")
    floor = 1e-3 * max(g.abs().max().item() for g in expected.values())
    return max(
        (got[name] - g).abs().max().item() / max(g.abs().max().item(), floor)
        for name, g in expected.items()
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their heads: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([line(heads), "  ".join("-" * w for w in widths), *map(line, rows)])


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a page in ``results``."""
    return "\n".join("| " + " | ".join(c) + " |" for c in (heads, ["---"] * len(heads), *rows))


def kept_rows(page: Path, heads: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The rows of the table that a page has, by their first cell."""
    if not page.exists():
        return {}
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    rows = [tuple(line[2:-2].split(" | ")) for line in lines[2:]]
    return {row[0]: row for row in rows if len(row) == len(heads)}


def finish(options: argparse.Namespace, figures: Mapping[str, Any], missed: Sequence[str]) -> int:
    """Write the figures where asked, print the bars missed; the exit status."""
    if options.json is not None:
        options.json.write_text(json.dumps({"version": 1, **figures, "missed": missed}, indent=2))
    for bar in missed:
        print(f"missed: {bar}")
    return 1 if options.check and missed else 0
