"""Activations that a layer keeps for backward, in every way, by the dry run and by a real run.

Of Llama-3-70B at tp 8 and 8192 tokens by the dry run, in units of b·s·h/t bytes, beside the
textbook's 34 (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4, without what attention keeps of its scores). Then of a small Llama: what its
forward leaves allocated on a rank of two, by PyTorch's own profiler, beside what the dry run says.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels run on a CPU then

import torch
from torch.profiler import ProfilerActivity, profile

import tpplan
from benchmarks.common import finish, option_parser, parse, table
from tpplan.compat import fake_world
from tpplan.models import build

CONFIG = Path(__file__).parent / "configs" / "llama-3-70b.json"
TEXTBOOK = 34.0
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
RANKS, LENGTH, LAYERS = 2, 64, (1, 3)
CLOSE = 0.05


@dataclass(frozen=True)
class Way:
    """How a model is sharded, and the most that a layer of the large one may keep."""

    name: str
    sequence_parallel: bool
    save: str = "gathered"
    recompute: tuple[str, ...] = ()
    bar: float | None = None

    def options(self) -> dict[str, Any]:
        """As ``parallelize`` and ``dry_run`` take them."""
        chosen = {"save": self.save, "recompute": self.recompute}
        return {"sequence_parallel": self.sequence_parallel, "kernels": "triton", **chosen}


BOTH = ("norms", "activations")
WAYS = (
    Way("TP", False),
    Way("TP, recomputed", False, recompute=BOTH),
    Way("TP+SP", True),
    Way("TP+SP, rows kept", True, "shard", bar=TEXTBOOK),
    Way("TP+SP, rows kept, norms recomputed", True, "shard", ("norms",)),
    Way("TP+SP, rows kept, recomputed", True, "shard", BOTH, bar=23.0),
)


def by_dry_run(model: Any, way: Way, tp: int, length: int) -> float:
    """Bytes that a layer in the middle keeps."""
    report = tpplan.dry_run(model, "auto", tp, 1, length, optimizer=None, **way.options())
    steps = [s for s in report.run.steps if s.phase == "forward" and s.element is not None]
    middle = max(s.element.index for s in steps if s.element) // 2
    return sum(s.net for s in steps if s.element and s.element.index == middle)


def small(layers: int, device: str = "cpu") -> Any:
    """A Llama with so many layers, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=layers)).bfloat16()  # type: ignore[arg-type]


def allocated(way: Way) -> float:
    """Bytes that one layer's forward leaves allocated on the first of two ranks.

    Real tensors and kernels, on a group that sends nothing: gloo frees in threads of its own, which
    PyTorch's profiler does not see.
    """
    ids = torch.arange(LENGTH)[None] % SMALL["vocab_size"]
    left = []
    for layers in LAYERS:
        with fake_world(RANKS) as mesh:
            model = tpplan.parallelize(
                small(layers), "auto", mesh, src_data_rank=None, prove=False, **way.options()
            )
            model(input_ids=ids, use_cache=False)  # what is kept for all forwards is made now
            gc.collect()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                out = model(input_ids=ids, use_cache=False)
            left.append(sum(e.self_cpu_memory_usage for e in seen.key_averages()))
            del out
    return float(left[1] - left[0]) / (LAYERS[1] - LAYERS[0])


def main() -> int:
    """Measure, print; the exit status."""
    parser = option_parser(__doc__)
    options = parse(parser)
    missed, figures, rows = [], {}, []
    large: Any = build(str(CONFIG))
    config, tp, length = large.config, 8, 8192
    unit = length * config.hidden_size / tp
    for way in WAYS:
        kept = by_dry_run(large, way, tp, length) / unit
        figures[way.name] = {"large": kept}
        whole = kept * unit * config.num_hidden_layers / 2**30
        bar = "" if way.bar is None else f"{way.bar:.0f}"
        rows.append([way.name, f"{kept:.1f}", bar, f"{whole:.1f}"])
        if way.bar is not None and kept > way.bar:
            missed.append(f"{way.name}: {kept:.1f} b·s·h/t a layer > {way.bar}")
    heads = ["Llama-3-70B, tp 8, 8192 tokens", "b·s·h/t a layer", "at most", "GiB in all"]
    print(table(heads, rows) + f"\n\nthe textbook's for TP+SP: {TEXTBOOK:.0f}\n")

    rows = []
    for way in WAYS:
        real = allocated(way)
        said = by_dry_run(small(LAYERS[1], "meta"), way, RANKS, LENGTH)
        ratio = real / said
        figures[way.name] |= {"small": said, "allocated": real}
        rows.append([way.name, f"{said / 1024:.0f}", f"{real / 1024:.0f}", f"{ratio:.3f}"])
        if abs(ratio - 1) > CLOSE:
            missed.append(f"{way.name}: allocated {ratio:.3f} of what the dry run says")
    heads = [f"small Llama, tp {RANKS}, KiB a layer", "dry run", "allocated", "ratio"]
    print(table(heads, rows))
    return finish(options, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
