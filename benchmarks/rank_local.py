"""One rank of eight of a Llama-3-70B cut to two layers, forward and backward, on one GPU.

The process group is fake: collectives cost their dispatch and the copies they make, and nothing
is sent. What remains is a rank's own work and memory, under tpplan with its kernels, under tpplan
without them, and under torch's own styles.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

if not torch.cuda.is_available():
    # before anything imports Triton: its own functions are interpreted as well then
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import finish, option_parser, parse, table
from benchmarks.models import torch_plan
from benchmarks.timing import device, environment, header, synchronize

RANKS = 8
SLICE: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    **SLICE,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "vocab_size": 128,
}
LENGTH, TINY_LENGTH = 8192, 8
MODES = {"TP": False, "TP+SP": True}
WAYS = ("tpplan", "tpplan, PyTorch's ops", "torch")
TOLERANCE = 2**-7
"""Between the losses with tpplan's kernels and with PyTorch's own ops, in bfloat16."""
NOISE = 1.02
"""By how much the slower of two equal variants may seem slower."""


@dataclass
class Variant:
    """A sharded model, its loss and backward, and what they took by round."""

    model: nn.Module
    step: Callable[[], Tensor]
    wall_ms: list[float] = field(default_factory=list)
    gpu_ms: list[float] = field(default_factory=list)
    peak: int = 0

    def run(self) -> Tensor:
        """One step, from no gradients; its loss."""
        self.model.zero_grad(set_to_none=True)
        return self.step()

    def time(self) -> None:
        """Add the time of a step until the device is done."""
        synchronize()
        start = time.perf_counter()
        self.run()
        synchronize()
        self.wall_ms.append((time.perf_counter() - start) * 1e3)

    def profile(self) -> None:
        """Add the time that the GPU was busy in a step; waiting for the host is no part of it."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as found:
            self.run()
            synchronize()
        kernels = [
            event.time_range.elapsed_us()
            for event in found.events()
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        self.gpu_ms.append(sum(kernels) / 1e3)

    def measure_memory(self) -> None:
        """The parameters of this model, and what a step adds to them at its peak."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run()
        synchronize()
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters()]
        own = sum(p.numel() * p.element_size() for p in parameters)
        self.peak = torch.cuda.max_memory_allocated() - before + own
        self.model.zero_grad(set_to_none=True)

    def parameters(self) -> list[nn.Parameter]:
        """Those of the model, on all ranks."""
        return list(self.model.parameters())


def build(config: Mapping[str, Any]) -> LlamaForCausalLM:
    """The unsharded model, the same at each call."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device()):
            return LlamaForCausalLM(LlamaConfig.from_dict(dict(config)))
    finally:
        torch.set_default_dtype(before)


def by_tpplan(
    model: LlamaForCausalLM, mesh: DeviceMesh, sp: bool, kernels: str, tokens: Tensor
) -> Variant:
    """tpplan and the plan it ships; the model's own loss."""
    import tpplan

    sharded = tpplan.parallelize(
        model, "llama.yaml", mesh, sequence_parallel=sp, kernels=kernels, src_data_rank=None
    )

    def step() -> Tensor:
        loss: Tensor = sharded(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return Variant(sharded, step)


def by_torch(model: LlamaForCausalLM, mesh: DeviceMesh, sp: bool, tokens: Tensor) -> Variant:
    """torch's styles and its parallel loss, as PyTorch's tutorial has them.

    The logits are taken to float32 as transformers' own loss does.
    """
    plan = torch_plan(model.config.num_hidden_layers, sp)
    plan["lm_head"] = ColwiseParallel(
        input_layouts=Shard(1) if sp else Replicate(), use_local_output=False
    )
    sharded = parallelize_module(model, mesh, plan, src_data_rank=None)
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100).flatten()

    def step() -> Tensor:
        with loss_parallel():
            logits = sharded(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets)
            loss.backward()
        whole = loss.detach()
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    return Variant(sharded, step)


def variant(way: str, mode: str, config: Mapping[str, Any], mesh: DeviceMesh, x: Tensor) -> Variant:
    """The model sharded in one way, for rank 0."""
    model, sp = build(config), MODES[mode]
    if way == "torch":
        return by_torch(model, mesh, sp, x)
    kernels = "triton" if way == "tpplan" else "torch"
    return by_tpplan(model, mesh, sp, kernels, x)


class Scattering(TorchDispatchMode):
    """Within it, a reduce-scatter gives what this rank has of its own part of the sum.

    Before torch 2.13 the fake group leaves the memory of the result as it was.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            given, _, ranks, _ = args
            return given.chunk(ranks)[0].clone()
        return func(*args, **(kwargs or {}))


def disagreement(variants: Mapping[str, Variant]) -> dict[str, float]:
    """How far the losses with kernels are from those of PyTorch's ops, as shares of these.

    Without real ranks the loss is not the model's, but the same work has the same result; torch's
    styles ask for other collectives, so theirs is another. ``step_time`` compares them on ranks.
    """
    found = {}
    for mode in MODES:
        names = [f"{way} {mode}" for way in WAYS[:2]]
        if all(name in variants for name in names):
            with Scattering():
                ours, plain = (variants[name].run().item() for name in names)
            found[mode] = abs(ours / plain - 1)
    return found


def measure(variants: Mapping[str, Variant], rounds: int) -> None:
    """Time and memory of all variants, which take turns: each round begins with another."""
    names = list(variants)
    for one in variants.values():
        one.run()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            variants[name].time()
            if torch.cuda.is_available():
                variants[name].profile()
    if torch.cuda.is_available():
        for one in variants.values():
            one.model.zero_grad(set_to_none=True)
        for one in variants.values():
            one.measure_memory()


def figures(variants: Mapping[str, Variant]) -> dict[str, dict[str, float]]:
    """The medians of each variant; without a GPU there is wall time only."""
    found = {}
    for name, one in variants.items():
        found[name] = {"wall_ms": statistics.median(one.wall_ms)}
        if one.gpu_ms:
            found[name] |= {"gpu_ms": statistics.median(one.gpu_ms), "peak_GB": one.peak / 1e9}
    return found


def base_of(name: str, found: Mapping[str, Any]) -> str:
    """What a variant is compared with: tpplan in its mode, or torch where that is missing."""
    mode = next(m for m in MODES if name.endswith(f" {m}"))
    ours = f"tpplan {mode}"
    return ours if ours in found else f"torch {mode}"


def print_figures(found: Mapping[str, Mapping[str, float]]) -> None:
    """Times and memory with their ratios, one variant a row."""
    units = {"gpu_ms": "GPU ms", "wall_ms": "wall ms", "peak_GB": "peak GB"}
    rows = []
    for name, own in found.items():
        base = found[base_of(name, found)]
        row = [name]
        for unit in units:
            row += (
                [f"{own[unit]:.2f}", f"{own[unit] / base[unit]:.2f}"] if unit in own else ["-"] * 2
            )
        rows.append(row)
    heads = [head for unit in units.values() for head in (unit, "÷ tpplan")]
    print(table(["forward + backward", *heads], rows))


def missed_bars(found: Mapping[str, Mapping[str, float]], errors: Mapping[str, float]) -> list[str]:
    """Where kernels change the loss, and where tpplan needs more than another way does."""
    missed = [
        f"{mode}: losses differ by {error:.1e} > {TOLERANCE:.1e}"
        for mode, error in errors.items()
        if not error <= TOLERANCE
    ]
    for name, own in found.items():
        ours = found[base_of(name, found)]
        missed += [
            f"tpplan's {unit} is {ours[unit] / own[unit]:.2f} x that of {name}"
            for unit in own
            if ours[unit] > NOISE * own[unit]
        ]
    return missed


def main() -> int:
    """Shard, compare, measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter, any place")
    parser.add_argument("--rounds", type=int, default=10, help="turns each variant takes")
    options = parse(parser)
    if not torch.cuda.is_available():
        if not options.tiny:
            parser.error("there is no GPU: only --tiny can run, which measures nothing of use")
        print("no GPU: the kernels are interpreted, and no figure below means anything")
    where = environment()
    print(header(where))
    config, length = (TINY, TINY_LENGTH) if options.tiny else (SLICE, LENGTH)
    torch.manual_seed(1)
    tokens = torch.randint(0, config["vocab_size"], (1, length), device=device())
    ways = [way for way in WAYS if not (options.without_tpplan and way.startswith("tpplan"))]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = init_device_mesh(device().type, (RANKS,), mesh_dim_names=("tp",))
        variants = {
            f"{way} {mode}": variant(way, mode, config, mesh, tokens)
            for mode in MODES
            for way in ways
        }
        errors = disagreement(variants)
        measure(variants, options.rounds)
    finally:
        dist.destroy_process_group()
    found = figures(variants)
    print_figures(found)
    rounds = {name: {"wall_ms": v.wall_ms, "gpu_ms": v.gpu_ms} for name, v in variants.items()}
    result = {"environment": where, "figures": found, "rounds": rounds, "errors": errors}
    return finish(options, result, missed_bars(found, errors))


if __name__ == "__main__":
    sys.exit(main())
