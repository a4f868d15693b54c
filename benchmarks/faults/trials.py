"""The fixed models and what is looked at of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from benchmarks.random_models.judge import (
    EXAMPLE,
    RIGHT,
    TOLERANCE,
    Verdict,
    built,
    inputs,
    judge,
    plan_of,
)
from benchmarks.random_models.model import Case, case_of
from benchmarks.random_models.recipe import Recipe, settled
from tpplan.planner import compile_plan

Check = Callable[[DeviceMesh, Case, bool], Verdict]


@dataclass(frozen=True)
class Trial:
    """A model, the ranks and the mode it runs in, how it is looked at, and what must be seen.

    Attributes:
        guard: who must refuse it; what the planner alone refuses, the proof may refuse as well.
    """

    case: Case
    tp: int
    sequence_parallel: bool
    check: Check = judge
    expected: str = "right"
    guard: str = "proof"


def planned(mesh: DeviceMesh, case: Case, tp: int, sequence_parallel: bool) -> Verdict | None:
    """What the planner alone refuses of a case."""
    model, space = built(case)
    example = inputs(case, space, *EXAMPLE, False)
    try:
        compile_plan(model, plan_of(case), tp, sequence_parallel, inputs=example)
    except tpplan.PlanError as error:
        return Verdict("refused", str(error).splitlines()[0])
    return None


def masks(mesh: DeviceMesh, case: Case, sequence_parallel: bool) -> Verdict:
    """Whether dropout masks are independent where each rank has a part, and agree elsewhere."""
    model, space = built(case)
    tpplan.parallelize(model, plan_of(case), mesh, sequence_parallel)
    zeros: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, out: torch.Tensor) -> None:
            local = out.to_local() if isinstance(out, DTensor) else out
            zeros.setdefault(name, local.detach() == 0)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
            module.register_forward_hook(note(name))
    torch.manual_seed(3)
    model.train()(**inputs(case, space, *EXAMPLE, False))
    for name, mine in zeros.items():
        every: list[Any] = [None] * mesh.size()
        dist.all_gather_object(every, mine, mesh.get_group())
        agree = all(torch.equal(mine, other) for other in every)
        whole = not sequence_parallel and not name.endswith(("drop_inner", "drop_weights"))
        if agree is not whole:
            return Verdict("wrong", f"the masks of {name} {'agree' if agree else 'do not agree'}")
    return Verdict(RIGHT)


def told(mesh: DeviceMesh, case: Case, sequence_parallel: bool) -> Verdict:
    """Whether ranks that are fed, or hold, other numbers are told so, each by its own message."""
    rank, ids = mesh.get_local_rank(), torch.full((2, 8), 3)

    def scaled(model: nn.Module) -> nn.Module:
        embedding = model.get_submodule("embed_tokens")
        embedding.register_forward_hook(lambda module, given, out: out * (1 + rank))
        return model

    def sharded(model: nn.Module) -> nn.Module:
        return tpplan.parallelize(model, plan_of(case), mesh, sequence_parallel)

    def drift(model: nn.Module) -> nn.Module:
        replicas = (p for p in model.parameters() if p.placements[0].is_replicate())  # type: ignore[attr-defined]
        with torch.no_grad():
            next(replicas).to_local().mul_(1 + rank)  # type: ignore[attr-defined]
        return model

    def recast(model: nn.Module) -> nn.Module:
        mlp = model.get_submodule("layers.0.mlp")
        kind = type(mlp)
        sharded(model)
        mlp.__class__ = kind
        return model

    misuses: dict[str, Callable[[nn.Module], Any]] = {
        "was given another batch": lambda model: sharded(model)(ids=ids + rank),
        "computes something else than": lambda model: sharded(scaled(model)),
        "(input of": lambda model: scaled(sharded(model))(ids=ids),
        "(parameter) is another": lambda model: drift(sharded(model))(ids=ids),
        "its class was replaced": lambda model: recast(model)(ids=ids),
        "the same loss": lambda model: (_weighed(sharded(model)(ids=ids)) * (1 + rank)).backward(),
    }
    for words, misuse in misuses.items():
        said = "nothing"
        try:
            misuse(built(case)[0])
        except (ValueError, RuntimeError) as error:
            said = str(error)
        if words not in said:
            return Verdict("wrong", f"ranks that differ were told {said}, not '{words}'")
    model = built(case)[0]
    model.register_buffer("own", torch.tensor(1.0 + rank))
    if float(sharded(model).get_buffer("own")) != 1.0:
        return Verdict("wrong", "a buffer is not that of the first rank")
    return Verdict(RIGHT)


def float32(mesh: DeviceMesh, case: Case, sequence_parallel: bool) -> Verdict:
    """As ``judge``, in the precision that fused kernels take, which must be in their places."""
    model, space = built(case)
    example = inputs(case, space, *EXAMPLE, False)
    plan = compile_plan(model, plan_of(case), mesh.size(), sequence_parallel, inputs=example)
    fused = {m.kernel.kind for m in plan.modules.values() if m.kernel and m.kernel.form}
    if not {"rms_norm", "swiglu"} <= fused:
        return Verdict("wrong", f"no kernel but of {', '.join(fused) or 'no kind'} is used")
    return judge(mesh, case, sequence_parallel, double=False)


def dispatched(mesh: DeviceMesh, case: Case, sequence_parallel: bool) -> Verdict:
    """Whether ranks with other batches, which share experts, train as one with all of them."""
    reference, space = built(case)
    model = copy.deepcopy(reference)
    group = mesh.get_group()
    ep = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    example = inputs(case, space, *EXAMPLE, False)
    tpplan.parallelize(model, plan_of(case), ep, inputs=example, prove=False)
    reference, model = reference.double(), model.double()
    for rank in range(mesh.size()):
        given = inputs(case, space, 2, 5 + 3 * rank, True)
        out = reference(**given)
        (_weighed(out) / mesh.size()).backward()
        if rank == mesh.get_local_rank():
            got = model(**given)
            _weighed(got).backward()
            far = {"outputs": float((got - out).abs().max())}
    for name, due in reference.named_parameters():
        own = model.get_parameter(name)
        assert own.grad is not None and due.grad is not None
        if isinstance(own, DTensor):  # of experts, a mean as it is
            whole = own.grad.full_tensor()  # type: ignore[attr-defined]
        else:
            dist.all_reduce(own.grad, group=group)
            whole = own.grad / mesh.size()
        far[name] = float((whole - due.grad).abs().max())
    wrong = {name: error for name, error in far.items() if not error <= TOLERANCE}
    return Verdict("wrong", f"off: {wrong}") if wrong else Verdict(RIGHT)


def _weighed(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


_IMPORTS = """import torch
import torch.nn.functional as F
from torch import nn


"""
_STACK = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make():
    return Model()


def call(batch, length, generator):
    return {"ids": torch.randint(0, 32, (batch, length), generator=generator)}
"""
_EXPERTS = (
    _IMPORTS
    + """class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(0.3 * torch.randn(4, 16, 32))
        self.narrow = nn.Parameter(0.3 * torch.randn(4, 32, 16))

    def forward(self, x, chosen, factors):
        out = torch.zeros_like(x)
        for expert in range(len(self.wide)):
            rows, places = torch.where(chosen == expert)
            y = (x[rows] @ self.wide[expert]).relu() @ self.narrow[expert]
            out = out.index_add(0, rows, y * factors[rows, places, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), Experts()

    def forward(self, x):
        rows = x.reshape(-1, 16)
        factors, chosen = self.router(rows).softmax(-1).topk(2)
        return self.experts(rows, chosen, factors).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(16), Mixture()

    def forward(self, x):
        return x + self.mixture(self.norm(x))
"""
    + _STACK
)
_EXPERTS_PLAN = """tpplan: 1
rules:
  embed: vocab
  head: vocab
  layers.*.norm: sequence_parallel
  layers.*.mixture.router: replicate
  layers.*.mixture.experts: {style: experts, shard: experts}
"""
_IN_PLACE = (
    _IMPORTS
    + """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))
"""
    + _STACK.replace("x = layer(x)", "x = layer(x)\n            x.mul_(0.5)").replace(
        "return self.head(x)", "return self.head(x).mul_(0.5)"
    )
)
_IN_PLACE_PLAN = """tpplan: 1
rules:
  embed: vocab
  head: vocab
  layers.*.norm: sequence_parallel
  layers.*.up: colwise
  layers.*.down: rowwise
"""
_TORCHS = (
    _IN_PLACE.replace(
        "x + self.down(F.relu(self.up(self.norm(x))))",
        "x + self.attn(h, h, h, need_weights=False)[0]",
    )
    .replace(
        "self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)",
        "self.norm, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)",
    )
    .replace(
        "        return x + self.attn", "        h = self.norm(x)\n        return x + self.attn"
    )
)
_TORCHS_PLAN = """tpplan: 1
rules:
  embed: vocab
  head: vocab
  layers.*.norm: sequence_parallel
  layers.*.attn: attention
"""
_GPT = Recipe(
    positions="learned", vocabulary=37, final_norm=True, mlp_bias=True, qkv_bias=True,
    out_bias=True, kv="half", rotary="inside", mlp="gated",
)  # fmt: skip
_PACKED = Recipe(packing="qkv", bias="alibi", core="masked sdpa", merge="width", qkv_bias=True)
_TOGETHER = Recipe(order="parallel", qk_norm="width", out_bias=True, mlp_extra="centred norm")
_FUSED = Recipe(norm="RMSNorm", mlp="gated", activation="silu", mlp_bias=False, kv="half")


def _of(r: Recipe) -> Case:
    return case_of(settled(r))


def _edited(r: Recipe, old: str, new: str) -> Case:
    case = _of(r)
    assert old in case.plan
    return replace(case, plan=case.plan.replace(old, new), right=False)


def _fused(case: Case) -> Case:
    return replace(case, plan=case.plan + "kernels: triton\n")


def _in_pieces(case: Case) -> Case:
    return replace(case, plan=case.plan + "overlap: chunked\n")


TRIALS: Mapping[str, Trial] = {
    "gpt": Trial(_of(_GPT), 2, False),
    "gpt sp": Trial(_of(_GPT), 2, True),
    "packed": Trial(_of(_PACKED), 2, True),
    "shared heads": Trial(_of(replace(_GPT, kv="one", head="tied")), 4, True),
    "two heads shared": Trial(_of(_GPT), 4, False),
    "loss": Trial(_of(replace(_GPT, output="loss, dict")), 2, False),
    "together": Trial(_of(_TOGETHER), 4, False),
    "bare sp": Trial(_of(Recipe(entry="bare", final_norm=False)), 2, True),
    "in place sp": Trial(Case(_IN_PLACE, _IN_PLACE_PLAN), 2, True),
    "torch's attention": Trial(Case(_TORCHS, _TORCHS_PLAN), 2, False),
    "pieces": Trial(_in_pieces(_of(_GPT)), 2, False),
    "pieces sp": Trial(_in_pieces(_of(_GPT)), 2, True),
    "experts": Trial(Case(_EXPERTS, _EXPERTS_PLAN), 2, False),
    "ep": Trial(Case(_EXPERTS, _EXPERTS_PLAN), 2, False, dispatched),
    "masks": Trial(_of(Recipe(dropout=True, core="where")), 2, False, masks),
    "masks sp": Trial(_of(Recipe(dropout=True, core="where")), 2, True, masks),
    "told": Trial(_of(Recipe()), 2, False, told),
    "kernels": Trial(_fused(_of(_FUSED)), 2, False, float32),
    "kernels sp": Trial(_fused(_of(_FUSED)), 2, True, float32),
    "mixed columns": Trial(
        _of(Recipe(habit="unit columns in training")), 2, False, expected="refused"
    ),
    "second step": Trial(
        _of(Recipe(habit="unit columns from the second step")), 2, False, expected="refused"
    ),
    "mixed positions": Trial(
        _of(Recipe(habit="positions shifted")), 2, True, expected="refused", guard="planner"
    ),
    "unmentioned": Trial(
        _edited(Recipe(), "  embed_tokens: vocab\n", ""),
        2, False, expected="refused", guard="planner",
    ),
    "tied apart": Trial(
        _edited(Recipe(head="tied"), "lm_head: vocab", "lm_head: replicate"),
        2, False, expected="refused", guard="planner",
    ),
}  # fmt: skip
"""All trials, by name."""
