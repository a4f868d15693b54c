"""A training step of one Mixtral whose experts two data-parallel ranks share.

tpplan's ``ep`` and transformers' own expert parallelism, each with FSDP2 over all else, on two gloo
ranks of one thread each; the two take turns. Every rank has a batch of its own, and in both the
tokens go by all-to-all. The losses of all steps are compared with those of the unsharded model,
trained on the mean of both batches' gradients. CPU: what a rank's process used, also where others
keep the machine busy.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import tpplan
from benchmarks.common import LLAMA, finish, on_ranks, option_parser, parse, table
from benchmarks.step_time import in_turns, medians

RANKS, TOLERANCE = 2, 1e-4
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


def whole() -> Any:
    """The unsharded model, of seeded random weights."""
    torch.manual_seed(0)
    sizes = {**LLAMA, **EXPERTS, "tie_word_embeddings": False}
    return MixtralForCausalLM(MixtralConfig.from_dict(sizes))


def by_tpplan() -> nn.Module:
    """The plan it ships, on a mesh of ep alone."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    model: Any = tpplan.parallelize(whole(), "mixtral.yaml", mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=set(layer.mlp.experts.parameters()))
    shared = {p for layer in model.model.layers for p in layer.mlp.experts.parameters()}
    fully_shard(model, mesh=mesh, ignored_params=shared)
    return model  # type: ignore[no-any-return]


def by_transformers() -> nn.Module:
    """Its own plan for experts, and for FSDP2."""
    wanted = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation="all_to_all")
    sharding, _, meshes = MixtralForCausalLM.prepare_distribute_model(wanted)
    model: nn.Module = MixtralForCausalLM.maybe_distribute_model(whole(), sharding, meshes)
    return model


VARIANTS: Mapping[str, Callable[[], nn.Module]] = {
    "tpplan ep": by_tpplan,
    "transformers ep": by_transformers,
}


class Trainer:
    """A model with its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        groups = [{"params": group} for group in tpplan.by_mesh(model.parameters())]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5, fused=True)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next-token loss."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def step(self, *batches: torch.Tensor) -> list[float]:
        """Forward and backward of each batch, and an update by the mean; the losses."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = [self.loss(tokens) for tokens in batches]
        (torch.stack(losses).sum() / len(losses)).backward()
        self.optimizer.step()
        return [loss.item() for loss in losses]


def compare(names: list[str], batch: int, length: int, rounds: int) -> dict[str, Any]:
    """On a real rank: the seconds of each variant by round, and how far its losses are off."""
    trainers = {name: Trainer(VARIANTS[name]()) for name in names}
    torch.manual_seed(1)
    batches = [torch.randint(0, LLAMA["vocab_size"], (batch, length)) for _ in range(RANKS)]
    mine = dist.get_rank()
    losses: dict[str, list[float]] = {name: [] for name in names}
    computing: dict[str, list[float]] = {name: [] for name in names}

    def step(name: str) -> None:
        start = time.process_time()
        losses[name] += trainers[name].step(batches[mine])
        computing[name].append(time.process_time() - start)

    times = in_turns(step, names, rounds)
    reference = Trainer(whole())
    expected = [reference.step(*batches)[mine] for _ in range(rounds + 1)]
    errors = {
        name: max(abs(a / b - 1) for a, b in zip(own, expected, strict=True))
        for name, own in losses.items()
    }
    return {"step_s": times, "cpu_s": computing, "errors": errors}


def main() -> int:
    """Compare, measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--batch", type=int, default=2, help="of each rank")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parse(parser)
    names = [n for n in VARIANTS if not (options.without_tpplan and n.startswith("tpplan"))]
    sizes = options.batch, options.length, options.rounds
    result: dict[str, Any] = on_ranks(compare, RANKS, names, *sizes)
    times, cpu, errors = medians(result["step_s"]), medians(result["cpu_s"]), result["errors"]
    first = names[0]
    rows = []
    for name in times:
        row = [name]
        for found in (times, cpu):
            row += [f"{found[name] * 1e3:.1f}", f"{found[name] / found[first]:.2f}"]
        rows.append([*row, f"{errors[name]:.1e}"])
    ratio = f"÷ {first}"
    print(table(["training step", "median ms", ratio, "CPU ms", ratio, "error: loss"], rows))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\nPython {platform.python_version()}, {versions}, {RANKS} gloo ranks")
    missed = [
        f"{n}: losses off by {e:.1e} > {TOLERANCE}" for n, e in errors.items() if e > TOLERANCE
    ]
    if len(times) > 1 and times["tpplan ep"] > times["transformers ep"]:
        slower = times["tpplan ep"] / times["transformers ep"]
        missed.append(f"tpplan ep is {slower:.2f} x transformers ep")
    return finish(options, result, missed)


if __name__ == "__main__":
    sys.exit(main())
