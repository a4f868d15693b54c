"""Layers that are given the stream inside of an argument: in a tuple, a mapping, a dataclass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, joined
from tests.ranks import Ranks

WIDTH, WORDS = 16, 32
RULES = {
    "table": "vocab",
    "blocks.*.norm": "sequence_parallel",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "last": "sequence_parallel",
    "head": "vocab",
}


class Named(NamedTuple):
    depth: int
    x: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    depth: int = 0


class Way(NamedTuple):
    """How the stream is given on: what is made of it, where it is, and how it is replaced."""

    made: Callable[[torch.Tensor], Any]
    taken: Callable[[Any], torch.Tensor]
    given: Callable[[Any, torch.Tensor], Any]


WAYS = {
    "tuple": Way(lambda x: (x, 0), lambda s: s[0], lambda s, x: (x, s[1] + 1)),
    "list": Way(lambda x: [0, x], lambda s: s[1], lambda s, x: [s[0] + 1, x]),
    "mapping": Way(
        lambda x: {"start": x.sum() * 0.1, "x": x}, lambda s: s["x"], lambda s, x: {**s, "x": x}
    ),
    "a skip": Way(
        lambda x: {"skip": x.sigmoid(), "x": x},
        lambda s: s["x"] * s["skip"],
        lambda s, x: {**s, "x": x},
    ),
    "named tuple": Way(lambda x: Named(0, x), lambda s: s.x, lambda s, x: s._replace(x=x)),
    "dataclass": Way(Record, lambda s: s.x, lambda s, x: dataclasses.replace(s, x=x)),
}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: Any) -> Any:
        _, taken, given = WAYS[self.way]
        x = taken(state)
        return given(state, x + self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, way: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.way, self.checkpointed = way, checkpointed
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made, taken, _ = WAYS[self.way]
        state = made(self.table(ids))
        for block in self.blocks:
            if self.checkpointed:
                state = checkpoint(block, state, use_reentrant=False)
            else:
                state = block(state)
        out: torch.Tensor = self.head(self.last(taken(state)))
        return out


def plan(sequence_parallel: bool) -> dict[str, Any]:
    return {"tpplan": 1, "sequence_parallel": sequence_parallel, "rules": RULES}


def ids(length: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(length))


def accumulated(reference: nn.Module, model: nn.Module, lengths: tuple[int, ...]) -> Errors:
    """The errors of outputs at several lengths, and of the gradients that accumulate."""
    errors: Errors = {}
    for length in lengths:
        due, got = reference(ids(length)), joined(model(ids(length)))
        errors[f"at {length}"] = error(due, got)
        for out in (due, got):
            out.square().sum().backward()
    return errors | compare_gradients(reference, model)


def trained(mesh: DeviceMesh, sequence_parallel: bool, checkpointed: bool) -> Errors:
    """Every way that layers may be given the stream."""
    found = Findings()
    for way in WAYS:
        torch.manual_seed(0)
        reference = Model(way, checkpointed).double()
        model = copy.deepcopy(reference)
        tpplan.parallelize(model, plan(sequence_parallel), mesh)
        found.add(way, accumulated(reference, model, (8, 5, 3)))
    return found.errors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.turns(48)
def test_streams_inside(ranks: Ranks, sequence_parallel: bool, checkpointed: bool, tp: int) -> None:
    assert beyond(ranks.run(tp, trained, sequence_parallel, checkpointed), 1e-12) == {}


def compiled(mesh: DeviceMesh, sequence_parallel: bool, layers: bool) -> Errors:
    found = Findings()
    for way in ("a skip", "dataclass"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = Model(way).double()
        model = copy.deepcopy(reference)
        tpplan.parallelize(model, plan(sequence_parallel), mesh, prove=False)
        for module in model.blocks if layers else (model,):
            module.compile(backend="aot_eager")
        found.add(way, accumulated(reference, model, (8, 6)))
    return found.errors


@pytest.mark.parametrize("layers", [False, True], ids=["model", "layers"])
@pytest.mark.turns(32)
def test_compiled(ranks: Ranks, layers: bool) -> None:
    assert beyond(ranks.run(2, compiled, True, layers), 1e-12) == {}


class WritingBlock(Block):
    """Changes what it is given, and gives that."""

    def forward(self, state: Any) -> Any:
        state["x"] = state["x"] + self.down(F.gelu(self.up(self.norm(state["x"]))))
        return state


class Writing(Model):
    """``used``: what its blocks give, or what they were given."""

    def __init__(self, used: bool) -> None:
        super().__init__("mapping")
        self.used = used
        self.blocks = nn.ModuleList(WritingBlock("mapping") for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = {"x": self.table(ids)}
        for block in self.blocks:
            given = block(state)
            state = given if self.used else state
        out: torch.Tensor = self.head(self.last(state["x"]))
        return out


def test_what_is_written_into_what_is_given() -> None:
    """It is right, or refused: never another result."""
    tpplan.check(Writing(used=True), plan(True), tp=2, inputs=ids(8))
    with pytest.raises(tpplan.PlanError, match=r"computes something else|fails"):
        tpplan.check(Writing(used=False), plan(True), tp=2, inputs=ids(8))
    tpplan.check(Writing(used=False), plan(False), tp=2, inputs=ids(8))
    rules = {**plan(True), "layers": "blocks.*.norm"}
    tpplan.check(Writing(used=False), rules, tp=2, inputs=ids(8))


class MuteBlock(WritingBlock):
    def forward(self, state: Any) -> None:
        super().forward(state)


class Mute(Writing):
    def __init__(self) -> None:
        super().__init__(used=False)
        self.blocks = nn.ModuleList(MuteBlock("mapping") for _ in range(3))


def test_layers_that_give_nothing_are_told_from_those_to_name() -> None:
    with pytest.raises(tpplan.PlanError, match=r"name what runs on rows.*'blocks\.\*\.norm'"):
        tpplan.check(Mute(), plan(True), tp=2, inputs=ids(8))


class Mixing(nn.Module):
    """Of the whole sequence, without what a mask for its rows hides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        return (x * masks["rows"][..., None]).cumsum(1) @ self.weight


class MaskedBlock(Block):
    def __init__(self) -> None:
        super().__init__("tuple")
        self.mixing = Mixing()

    def forward(self, state: Any) -> Any:
        x, masks = state
        x = x + self.mixing(x, masks)
        return x + self.down(F.gelu(self.up(self.norm(x)))), masks


class Masked(Model):
    """Its layers are given masks in a mapping, of which one is read beside the whole sequence."""

    def __init__(self) -> None:
        super().__init__("tuple")
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = self.table(ids), {"rows": (ids % 3 > 0).to(self.table.weight.dtype)}
        for block in self.blocks:
            state = block(state)
        out: torch.Tensor = self.head(self.last(state[0]))
        return out


def masked(mesh: DeviceMesh) -> Errors:
    torch.manual_seed(0)
    reference = Masked().double()
    model = copy.deepcopy(reference)
    rules = {**RULES, "blocks.*.mixing": {"style": "replicate", "input": "gather"}}
    tpplan.parallelize(model, {**plan(True), "rules": rules}, mesh)
    return accumulated(reference, model, (8, 5, 3))


@pytest.mark.turns(4)
def test_masks_of_what_is_given_the_whole_sequence(ranks: Ranks) -> None:
    assert beyond(ranks.run(2, masked), 1e-12) == {}
