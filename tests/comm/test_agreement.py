"""Ranks that are given other inputs than the first one are told so, at once or soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.compare import Errors, Findings, beyond, same
from tests.models import hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan.comm import Group, Randomness, Site
from tpplan.comm.agreement import SWITCH, Schedule, compare_gradients, require_same_inputs
from tpplan.comm.fingerprints import fingerprint

ALONE = Group(None, "", 1, 0)
DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128,
)  # fmt: skip


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Many different ones."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if dtype == torch.bool:
        return numbers > 0
    return (100 * numbers).to(dtype) if not dtype.is_floating_point else numbers.to(dtype)


def said(tensor: torch.Tensor) -> int:
    """The fingerprint."""
    return int(fingerprint(tensor, ALONE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_and_its_place_count(dtype: torch.dtype) -> None:
    x = values(dtype, 5, 7)
    before = x.clone()
    assert said(x) == said(x.clone())
    assert torch.equal(x.to(torch.complex128), before.to(torch.complex128))
    found = {said(x), said(x.reshape(7, 5)), said(x.reshape(-1)), said(x[:, :6])}
    found |= {said(x.to(torch.complex64 if dtype != torch.complex64 else torch.int8))}
    assert len(found) == 5
    flat = x.reshape(-1)
    for i in range(len(flat)):
        for j in range(i):
            other = flat.clone()
            other[i], other[j] = flat[j], flat[i]
            alike = bool(flat[i].to(torch.complex128) == flat[j].to(torch.complex128))
            assert (said(other) == said(flat)) == alike
    for i in range(len(flat)):
        other = flat.clone()
        other[i] = True ^ flat[i] if dtype == torch.bool else 42
        assert said(other) != said(flat)


def test_what_has_few_elements() -> None:
    kinds = [torch.empty(0), torch.empty(0, 3), torch.empty(3, 0), torch.tensor(0.0)]
    kinds += [torch.tensor(1.0), torch.tensor([0.0]), torch.tensor(False), torch.empty(0).int()]
    assert len({said(x) for x in kinds}) == len(kinds)


def test_the_layout_does_not_count() -> None:
    x = values(torch.float32, 300, 500)
    assert said(x) == said(x.t().contiguous().t())
    assert said(x[:1].expand(400, 500)) == said(x[:1].repeat(400, 1))
    assert said(x.bool()[0, 1:]) == said(x.bool()[0, 1:].clone())
    assert said(torch.complex(x, x).conj()) == said(torch.complex(x, -x))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("shape", [(2**24,), (2, 2**12, 2**11)])
def test_little_memory_is_taken(shape: tuple[int, ...]) -> None:
    for x in (torch.ones(shape, dtype=torch.float32), torch.ones(shape).transpose(0, -1)):
        with Largest() as largest:
            said(x)
        assert largest.bytes <= 0.04 * x.untyped_storage().nbytes()


def test_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    schedule = Schedule()
    due = [n for n in range(1, 1025) if schedule.due("training")]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert [schedule.due(kind) for kind in "paaapaab"] == [1, 1, 0, 0, 1, 1, 0, 1]
    schedule = Schedule()
    counted = [schedule.counted for kind in "aababababababab" if schedule.due(kind)]
    assert counted == [1] * 5 + [0, 0, 1, 1] + [0] * 6
    monkeypatch.setenv(SWITCH, "0")
    schedule = Schedule()
    assert not any(schedule.due(kind) for kind in "aabb")
    monkeypatch.setenv(SWITCH, "every")
    schedule = Schedule()
    assert all(schedule.due(kind) for kind in "aaaaa")
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(ValueError, match="0, 1 or every"):
        Schedule()


# --- on ranks


def complaint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of what a call raises."""
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def inputs_job(mesh: DeviceMesh) -> Errors:
    """What differs between ranks, and what may."""
    found = Findings()
    group, rank = Group.of(mesh), mesh.get_local_rank()
    a, b = token_ids(2, 8, 0), token_ids(2, 8, 1)
    mine, other = (a, b) if rank else (b, a)

    def told(inputs: Any, randomness: Randomness | None = None) -> str:
        return complaint(
            require_same_inputs,
            inputs,
            group,
            Site("", ""),
            mesh.device_type,
            randomness,
            {"torch"},
        )

    whole = torch.arange(6.0) + rank
    replica = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    shard = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
    wrong = {
        "other ids": mine,
        "two swapped between ranks": {"x": mine, "y": other},
        "two swapped, in a list": [mine, other],
        "one more": [a, a] if rank else [a],
        "none": [] if rank else a,
        "bool": a > 40 + 40 * rank,
        "dtype": a.int() if rank else a,
        "nested": {"batch": {"x": mine.bfloat16()}},
        "replicas": replica,
        "placements": shard if rank else replica,
    }
    right = {
        "the same": {"x": a, "y": [b, (a,)], "z": None, "n": rank},
        "keys and values": {"x": a, "past": [(mine.float(), mine.float())]},
        "shards": shard,
        "nothing": (),
    }
    for name, inputs in wrong.items():
        found.add(name, same("same inputs" in told({"given": inputs})))
    found.add("directly", same("same inputs" in told(mine.double())))
    for name, inputs in right.items():
        found.add(f"right: {name}", same(not told(inputs)))
    torch.manual_seed(rank)
    found.add("seeds", same("manual_seed" in told(a, Randomness(rank, "cpu"))))
    torch.manual_seed(0)
    found.add("right: seeds", same(not told(a, Randomness(rank, "cpu"))))
    return found.errors


def later_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Ranks that part after the first batch."""
    found = Findings()
    model: nn.Module = sharded(hf("Llama", num_hidden_layers=1), mesh, sp)
    rank = mesh.get_local_rank()
    told = [complaint(model, token_ids(2, 8, 0 if n < 3 else rank)) for n in range(8)]
    found.add("at the fourth", same([bool(t) for t in told] == [n in (3, 7) for n in range(8)]))
    model.eval()
    for n in range(4):
        with torch.no_grad():
            found.add(f"evaluated {n}", same(not complaint(model, token_ids(2, 8, n))))
    generate: Any = model.generate
    greedy = {"max_new_tokens": 6, "do_sample": False}
    found.add("greedy", same(not complaint(generate, token_ids(1, 5, 3), **greedy)))
    prompts = complaint(generate, token_ids(1, 5, rank), **greedy)
    found.add("prompts", same("same inputs" in prompts))
    torch.manual_seed(rank)
    sampled = complaint(generate, token_ids(1, 5, 3), max_new_tokens=40, do_sample=True)
    found.add("sampling", same("manual_seed" in sampled))
    torch.manual_seed(0)
    sampled = complaint(generate, token_ids(1, 5, 3), max_new_tokens=40, do_sample=True)
    found.add("sampling alike", same(not sampled))
    return found.errors


def gradients_job(mesh: DeviceMesh) -> Errors:
    """Gradients that differ between ranks, and what rounding makes of equal ones."""
    found = Findings()
    rank = mesh.get_local_rank()

    def told(grad: torch.Tensor) -> str:
        given = torch.zeros_like(grad, requires_grad=True)
        compare_gradients({"bias": given}, Group.of(mesh), Site("", ""), mesh.device_type)
        try:
            (2 * given).backward(grad)
        except RuntimeError as error:
            return str(error)
        return ""

    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        grad = values(dtype, 300, 500)
        wrong = {
            "of the same values": grad.flip(1) if rank else grad,
            "of the same sums": grad.roll(7, 0) if rank else grad,
            "with another sign": -grad if rank else grad,
            "of other columns": grad * (torch.arange(500) % 2 == rank),
            "a tenth": 0.1 * values(dtype, 300, 500).t().reshape(300, 500) * rank + grad,
            "none on one": grad * rank,
        }
        noise = 1 + rank * 2**-8 * torch.rand(300, 500)
        right = {
            "the same": grad,
            "rounded": (grad * noise).to(dtype),
            "zero": 0 * grad,
            "empty": grad[:0],
        }
        for name, one in wrong.items():
            found.add(f"{dtype} {name}", same("gradient of 'bias'" in told(one)))
        for name, one in right.items():
            found.add(f"{dtype} right: {name}", same(not told(one)))
    return found.errors


def test_gradients(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, gradients_job))


def test_inputs(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, inputs_job))


@MODES
def test_later_batches(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, later_job, sp))
