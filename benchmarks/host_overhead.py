"""Host time of one transformer block, forward and backward, against hand-lowered code and torch.

The process group is fake and the tensors are tiny, so what remains is the time Python, dispatch
and autograd need. Before anything is timed, each variant is compared with the unsharded block on
two gloo ranks.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.blocks import SHARDED_DIM, Block, HandLoweredBlock
from benchmarks.common import (
    TOLERANCE,
    finish,
    gradient_error,
    on_ranks,
    option_parser,
    parse,
    table,
)

WIDTH, HEADS, INNER, SEQUENCE, RANKS = 64, 4, 128, 16, 2
HAND_BAR, LAYER_BAR, TORCH_BAR = 1.4, 1.3, 4.2
LAYERS = (1, 5)
MORE = "a block more, tpplan ÷ hand"
MODES = {"TP": False, "TP+SP": True}
RULES = {
    "input_norm": "sequence_parallel",
    "attn.{q,k,v}_proj": "colwise",
    "attn.o_proj": "rowwise",
    "post_norm": "sequence_parallel",
    "mlp.{gate,up}_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


@dataclass(frozen=True)
class Case:
    """A block on this rank, the stream that enters it and the gradient that comes back."""

    module: nn.Module
    x: Tensor
    grad: Tensor
    parameters: tuple[nn.Parameter, ...]

    def step(self) -> Tensor:
        """Forward and backward; gradients start from none."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None
        y: Tensor = self.module(self.x)
        y.backward(self.grad)
        return y


Lowering = Callable[[Block, DeviceMesh, bool], nn.Module]


def by_hand(block: Block, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """Raw collectives and plain local parameters."""
    return HandLoweredBlock(block, mesh, sequence_parallel)


def by_torch(block: Block, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """The styles of torch.distributed.tensor.parallel, as PyTorch's tutorial uses them."""
    return _by_torch_styles(block, mesh, sequence_parallel, shared=sequence_parallel)


def by_torch_shared(block: Block, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """The same, with one hand-placed input for the layers that share it under plain TP too."""
    return _by_torch_styles(block, mesh, sequence_parallel, shared=True)


def _by_torch_styles(
    block: Block, mesh: DeviceMesh, sequence_parallel: bool, shared: bool
) -> nn.Module:
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        **{f"attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if sequence_parallel:
        plan |= {"input_norm": SequenceParallel(), "post_norm": SequenceParallel()}
    if shared:
        for name in ("attn", "mlp"):
            plan[name] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
    return parallelize_module(block, mesh, plan, src_data_rank=None)


def by_tpplan(
    block: nn.Module, mesh: DeviceMesh, sequence_parallel: bool, prefix: str = "", **options: Any
) -> nn.Module:
    """The same unmodified block under a plan; ``prefix``: of its modules' paths."""
    import tpplan

    rules = {prefix + path: style for path, style in RULES.items()}
    options = {"inputs": torch.zeros(1, SEQUENCE, WIDTH), "src_data_rank": None, **options}
    return tpplan.parallelize(
        block,
        {"tpplan": 1, "rules": rules},
        mesh=mesh,
        sequence_parallel=sequence_parallel,
        **options,
    )


LOWERINGS: Mapping[str, Lowering] = {
    "hand": by_hand,
    "torch": by_torch,
    "torch-shared": by_torch_shared,
    "tpplan": by_tpplan,
}


def variants_of(mode: str, without_tpplan: bool) -> list[str]:
    """What is measured in a mode; with sequence parallelism the tutorial shares inputs itself."""
    left_out = {"torch-shared": MODES[mode], "tpplan": without_tpplan}
    return [variant for variant in LOWERINGS if not left_out.get(variant)]


def new_block() -> Block:
    """The block every variant starts from."""
    torch.manual_seed(0)
    return Block(WIDTH, HEADS, INNER)


def stream_and_gradient() -> tuple[Tensor, Tensor]:
    """What enters the block and the gradient of what leaves it, whole."""
    torch.manual_seed(1)
    return torch.randn(1, SEQUENCE, WIDTH), torch.randn(1, SEQUENCE, WIDTH)


def case(variant: str, mesh: DeviceMesh, sequence_parallel: bool) -> Case:
    """A variant ready to run; tpplan's stream between blocks is a DTensor, the others' is plain."""
    module = LOWERINGS[variant](new_block(), mesh, sequence_parallel)
    x, grad = stream_and_gradient()
    if sequence_parallel:
        rank = mesh.get_local_rank()
        x, grad = (t.chunk(mesh.size(), 1)[rank].contiguous() for t in (x, grad))
        if variant == "tpplan":
            x, grad = (DTensor.from_local(t, mesh, [Shard(1)], run_check=False) for t in (x, grad))
    return Case(module, x.detach().requires_grad_(), grad, tuple(module.parameters()))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(variant: str, count: int, mesh: DeviceMesh, sequence_parallel: bool) -> Case:
    """So many blocks, ready to run: by hand, or under the same plan."""
    one = case(variant, mesh, sequence_parallel)
    if variant == "hand":
        blocks = (by_hand(new_block(), mesh, sequence_parallel) for _ in range(count))
        module: nn.Module = Stack(blocks)
    else:
        module = by_tpplan(
            Stack(new_block() for _ in range(count)), mesh, sequence_parallel, "layers.*."
        )
    return Case(module, one.x, one.grad, tuple(module.parameters()))


def slope(times: Mapping[str, list[float]]) -> float:
    """What one block more costs under tpplan, by hand 1: the median over the rounds."""
    few, many = LAYERS
    ours, hand = (
        [b - a for a, b in zip(times[f"{v} {few}"], times[f"{v} {many}"], strict=True)]
        for v in ("tpplan", "hand")
    )
    return statistics.median(a / b for a, b in zip(ours, hand, strict=True))


def verify(variant: str, sequence_parallel: bool) -> float:
    """On a real rank: the largest error of the output and of all gradients, over the ranks."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    x, grad = stream_and_gradient()
    reference = Case(new_block(), x.requires_grad_(), grad, ())
    whole = {"output": reference.step().detach(), "input": _gradient(reference.x)}
    rank = mesh.get_local_rank()
    if sequence_parallel:
        whole = {name: t.chunk(RANKS, 1)[rank] for name, t in whole.items()}
    expected = {n: _gradient(p) for n, p in reference.module.named_parameters()}

    sharded = case(variant, mesh, sequence_parallel)
    output = sharded.step().detach()
    got = {"output": _local(output), "input": _local(_gradient(sharded.x))}
    gradients = {}
    for name, parameter in sharded.module.named_parameters():
        gradient = _gradient(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif name in SHARDED_DIM and variant == "hand":
            expected[name] = expected[name].chunk(RANKS, SHARDED_DIM[name])[rank]
        gradients[name] = gradient
    error = torch.tensor([gradient_error(got, whole), gradient_error(gradients, expected)]).max()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return error.item()


def verify_all(variants: Mapping[str, list[str]]) -> dict[str, float]:
    """The error of each variant in each mode, by a readable name."""
    return {f"{v} {m}": verify(v, MODES[m]) for m in variants for v in variants[m]}


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(cases: Mapping[str, Case], rounds: int, calls: int) -> dict[str, list[float]]:
    """µs of processor time per step, by case and round; the cases take turns within a round.

    Everything runs on this thread, so what other processes do to the clock does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for one in cases.values():
        for _ in range(calls):
            one.step()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, one in cases.items():
            start = time.process_time()
            for _ in range(calls):
                one.step()
            times[name].append((time.process_time() - start) / calls * 1e6)
    gc.enable()
    return times


def summary(times: Mapping[str, list[float]]) -> dict[str, Any]:
    """The best and the median round of each variant; the median of its rounds' ratios to hand's."""
    ratios = {
        f"{name} ÷ hand": statistics.median(a / b for a, b in zip(t, times["hand"], strict=True))
        for name, t in times.items()
        if name != "hand"
    }
    return {
        "best_us": {name: min(t) for name, t in times.items()},
        "median_us": {name: statistics.median(t) for name, t in times.items()},
        "ratios": ratios,
    }


def add(result: dict[str, Any], ours: Mapping[str, Any]) -> None:
    """Put tpplan's times beside those of the others, each over hand's in the same rounds."""
    for kind in ("best_us", "median_us"):
        result[kind] |= {"hand, in turn with tpplan": ours[kind]["hand"]}
        result[kind] |= {"tpplan": ours[kind]["tpplan"]}
    ratios = result["ratios"]
    ratios |= ours["ratios"]
    ratios["torch ÷ tpplan"] = ratios["torch ÷ hand"] / ratios["tpplan ÷ hand"]


def missed_bars(mode: str, ratios: Mapping[str, float]) -> list[str]:
    """What is worse than it should be."""
    missed = []
    if ratios.get("tpplan ÷ hand", 0.0) > HAND_BAR:
        missed.append(f"{mode}: tpplan ÷ hand {ratios['tpplan ÷ hand']:.2f} > {HAND_BAR}")
    if ratios.get("torch ÷ tpplan", TORCH_BAR) < TORCH_BAR:
        missed.append(f"{mode}: torch ÷ tpplan {ratios['torch ÷ tpplan']:.2f} < {TORCH_BAR}")
    if ratios.get(MORE, 0.0) > LAYER_BAR:
        missed.append(f"{mode}: {MORE} {ratios[MORE]:.2f} > {LAYER_BAR}")
    return missed


def main() -> int:
    """Verify, measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--verify", action="store_true", help="compare values, measure nothing")
    parser.add_argument("--rounds", type=int, default=60, help="turns each variant takes")
    parser.add_argument("--calls", type=int, default=20, help="steps in a turn")
    options = parse(parser)
    variants = {mode: variants_of(mode, options.without_tpplan) for mode in MODES}

    errors: dict[str, float] = on_ranks(verify_all, RANKS, variants)
    rows = [[name, f"{error:.1e}"] for name, error in errors.items()]
    print(table(["against the unsharded block", "error"], rows))
    wrong = [f"{name}: error {e:.1e} > {TOLERANCE}" for name, e in errors.items() if e > TOLERANCE]
    if wrong or options.verify:
        return max(finish(options, {"errors": errors}, wrong), int(bool(wrong)))

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake collective's result is whatever the memory held
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    results: dict[str, Any] = {}
    missed: list[str] = []
    # without tpplan, whose import makes torch's own DTensors quicker as well
    for mode, sequence_parallel in MODES.items():
        found = {v: case(v, mesh, sequence_parallel) for v in variants[mode] if v != "tpplan"}
        results[mode] = summary(measure(found, options.rounds, options.calls))
    for mode, sequence_parallel in MODES.items():
        result = results[mode]
        if not options.without_tpplan:
            found = {v: case(v, mesh, sequence_parallel) for v in ("hand", "tpplan")}
            add(result, summary(measure(found, options.rounds, options.calls)))
            stacks = {
                f"{v} {n}": stack(v, n, mesh, sequence_parallel)
                for v in ("hand", "tpplan")
                for n in LAYERS
            }
            # few steps in a turn: what disturbs one then disturbs those it is compared with
            result["ratios"][MORE] = slope(measure(stacks, 3 * options.rounds, 3))
        missed += missed_bars(mode, result["ratios"])
        best, median = result["best_us"], result["median_us"]
        rows = [[v, f"{best[v]:.0f}", f"{median[v]:.0f}"] for v in best]
        print("\n" + table([f"{mode}, µs forward+backward", "best", "median"], rows))
        print("  ".join(f"{name} = {value:.2f}" for name, value in result["ratios"].items()))
    dist.destroy_process_group()
    return finish(options, {"errors": errors, "modes": results}, missed)


if __name__ == "__main__":
    sys.exit(main())
