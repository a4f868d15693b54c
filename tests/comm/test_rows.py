"""The placement ``Rows`` and the tensors that have it: every op is right, or it raises."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tpplan import compat
from tpplan.comm.distribute import distributed
from tpplan.comm.rows import RowsTensor
from tpplan.layout import Part, Rows, rows_of

SIZE = 4
SHAPE = (24, 6)
# q of 4 heads, k and v of 2: at tp 4, two ranks hold each KV head
GROUPED = rows_of([Part("q", 12, 4), Part("k", 6, 2), Part("v", 6, 2)], 1, SIZE)
# one KV head for all: the last rank's query head and the KV head follow each other
SINGLE = rows_of([Part("q", 16, 4), Part("k", 4, 1), Part("v", 4, 1)], 1, SIZE)
PACKED = rows_of([Part(name, 8, 4) for name in "qkv"], 1, SIZE)
KINDS = {"grouped": GROUPED, "single": SINGLE, "packed": PACKED}


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(t: Any) -> Any:
    if isinstance(t, DTensor):
        return t.full_tensor()
    return [whole(x) for x in t] if isinstance(t, list | tuple) else t


# --- the placement


@pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)
def test_rows_are_cut_and_put_back(rows: Rows) -> None:
    given, made = values(0), torch.empty(SHAPE)
    counted = torch.zeros(SHAPE[0])
    for rank in range(SIZE):
        local = rows.take(given, rank)
        assert local.shape[0] == rows.length(rank)
        rows.put(made, local, rank)
        for start, stop in rows.owned(rank):
            counted += torch.isin(given[:, 0], local[start:stop, 0])
        covered = [row for cell in rows.cells[rank] for row in range(*cell)]
        assert covered == [row for piece in rows.pieces[rank] for row in range(*piece)]
        shared = torch.cat([given[start:stop] for start, stop in rows.shared()] or [given[:0]])
        for here, there, length in rows.overlaps(rank):
            assert torch.equal(local[here : here + length], shared[there : there + length])
    assert torch.equal(given, made)
    assert torch.equal(counted, torch.ones(SHAPE[0]))  # each row is owned once
    for cells, others in itertools.combinations(rows.cells, 2):
        for (a, b), (c, d) in itertools.product(cells, others):
            assert (a, b) == (c, d) or b <= c or d <= a


def test_shared_rows() -> None:
    assert GROUPED.shared() == ((12, 24),)
    assert SINGLE.shared() == ((16, 24),)
    assert PACKED.shared() == ()
    copied = pickle.loads(pickle.dumps(SINGLE))
    assert copied == SINGLE
    assert hash(copied) == hash(SINGLE)


# --- ops: the same on a tensor of rows as on the whole

Op = Callable[..., Any]
LOCAL: dict[str, Op] = {  # results stay rows
    "add": lambda p, q: p + q,
    "add a number": lambda p, q: p + 2,
    "number minus": lambda p, q: 1.5 - p,
    "mul a scalar tensor": lambda p, q: p * torch.tensor(3.0),
    "addcmul": lambda p, q: torch.addcmul(p, p, q, value=0.5),
    "lerp": lambda p, q: p.lerp(q, 0.25),
    "where": lambda p, q: torch.where(p > 0, p, q),
    "clamp": lambda p, q: p.clamp(-0.5, 0.5),
    "sqrt of abs": lambda p, q: p.abs().sqrt(),
    "clone": lambda p, q: p.clone(),
    "detach": lambda p, q: p.detach(),
    "double": lambda p, q: p.double(),
    "bfloat16": lambda p, q: p.to(torch.bfloat16),
    "zeros_like": lambda p, q: torch.zeros_like(p),
    "ones_like": lambda p, q: torch.ones_like(p, dtype=torch.float64),
    "full_like": lambda p, q: torch.full_like(p, 3),
    "add_": lambda p, q: p.add_(q, alpha=0.5),
    "mul_ twice itself": lambda p, q: p.mul_(p),
    "copy_": lambda p, q: p.copy_(q),
    "zero_": lambda p, q: p.zero_(),
    "fill_": lambda p, q: p.fill_(2.5),
    "lerp_": lambda p, q: p.lerp_(q, 0.1),
    "addcdiv_": lambda p, q: p.addcdiv_(q, q.abs() + 1),
    "sub out": lambda p, q: torch.sub(p, q, out=torch.empty_like(p)),
    "contiguous": lambda p, q: p.contiguous(),
    "view of the same shape": lambda p, q: p.view(p.shape),
    "foreach add": lambda p, q: torch._foreach_add([p, q], [q, p]),
    "foreach mul a scalar tensor": lambda p, q: torch._foreach_mul([p, q], torch.tensor(2.0)),
    "foreach sqrt": lambda p, q: torch._foreach_sqrt([p.abs(), q.abs()]),
    "data": lambda p, q: p.data,
}
IN_PLACE: dict[str, Op] = {  # what they leave behind in their arguments
    "add_": lambda p, q: p.add_(q),
    "foreach": lambda p, q: torch._foreach_lerp_([p, q], [q.clone(), p.clone()], 0.5),
    "foreach mul_": lambda p, q: torch._foreach_mul_([p, q], 2.0),
    "foreach zero_": lambda p, q: torch._foreach_zero_([p, q]),
    "broadcast": lambda p, q: p.mul_(q.sum(0)),
    "masked_fill_": lambda p, q: p.masked_fill_(p > 0, 7.0),
    "index_fill_": lambda p, q: p.index_fill_(0, index(p, [1, 20]), 5.0),
    "index_put_": lambda p, q: p.index_put_((index(p, [3, 17]),), q.sum()),
    "clamp out=": lambda p, q: torch.clamp(q, 0, 1, out=p),
    "unscale": lambda p, q: torch._amp_foreach_non_finite_check_and_unscale_(
        [p, q], torch.zeros(()), torch.tensor(0.25)
    ),
}
WHOLE: dict[str, Op] = {  # results are whole
    "sum": lambda p, q: p.sum(),
    "sum over rows": lambda p, q: p.sum(0),
    "mean over columns": lambda p, q: p.mean(1),
    "max": lambda p, q: p.max(),
    "min of negative": lambda p, q: (-p.abs()).max(),
    "foreach max": lambda p, q: torch._foreach_max([-p.abs(), q]),
    "foreach onto another shape": lambda p, q: torch._foreach_add([q.sum(0)], [p]),
    "norm": lambda p, q: p.norm(),
    "norm 1": lambda p, q: torch.linalg.vector_norm(p, 1),
    "norm 3": lambda p, q: torch.linalg.vector_norm(p, 3),
    "norm 0": lambda p, q: torch.linalg.vector_norm(p, 0),
    "norm inf": lambda p, q: torch.linalg.vector_norm(p, float("inf")),
    "norm -inf": lambda p, q: torch.linalg.vector_norm(p, float("-inf")),
    "norm of columns": lambda p, q: torch.linalg.vector_norm(p, 2, dim=0),
    "norm of rows": lambda p, q: p.norm(dim=1),
    "norm of both, kept": lambda p, q: torch.linalg.vector_norm(p, dim=(0, 1), keepdim=True),
    "frobenius": lambda p, q: torch.linalg.matrix_norm(p),
    "foreach norm": lambda p, q: torch._foreach_norm([p, q]),
    "foreach norm 1": lambda p, q: torch._foreach_norm([p, q], 1),
    "foreach norm inf": lambda p, q: torch._foreach_norm([p, q], float("inf")),
    "transposed product": lambda p, q: p.t() @ q,
    "product": lambda p, q: p @ q.t(),
    "cat": lambda p, q: torch.cat([p, q]),
    "stack": lambda p, q: torch.stack([p, q]),
    "a row": lambda p, q: p[3],
    "some rows": lambda p, q: p[5:17],
    "indexed rows": lambda p, q: p[index(p, [0, 23, 7])],
    "columns": lambda p, q: p[:, 1:3],
    "chunks": lambda p, q: p.chunk(3),
    "flattened": lambda p, q: p.view(-1),
    "reshaped": lambda p, q: p.reshape(6, -1),
    "outer broadcast": lambda p, q: p * q.sum(0),
    "softmax": lambda p, q: p.softmax(0),
    "cumsum": lambda p, q: p.cumsum(0),
    "sorted": lambda p, q: p.sort(0).values,
    "new_zeros": lambda p, q: p.new_zeros(3, 5),
    "any nan": lambda p, q: p.isnan().any(),
    "view of a view": lambda p, q: p.t().unsqueeze(0).sum(1),
}


def index(like: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Indices as DTensors want them: of the same kind."""
    made = torch.tensor(rows)
    if isinstance(like, DTensor):
        return DTensor.from_local(made, like.device_mesh, [Replicate()], run_check=False)
    return made


def pair(mesh: DeviceMesh, rows: Rows) -> tuple[DTensor, DTensor]:
    first, second = (distributed(values(i), mesh, rows, None) for i in range(2))
    return first, second


def close(expected: Any, got: Any) -> None:
    expected, got = whole(expected), whole(got)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected)
    else:
        for e, g in zip(expected, got, strict=True):
            close(e, g)


@pytest.mark.turns(4)
@pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)
def test_ops(rows: Rows) -> None:
    def job(mesh: DeviceMesh) -> list[str]:
        wrong = []
        tables = {"local": LOCAL, "in place": IN_PLACE, "whole": WHOLE}
        for table, ops in tables.items():
            for name, op in ops.items():
                plain, ours = (values(0), values(1)), pair(mesh, rows)
                try:
                    expected, got = op(*plain), op(*ours)
                    if table != "in place":
                        close(expected, got)
                    close(plain, ours)
                    results = got if isinstance(got, list | tuple) else [got]
                    if table == "local":
                        assert all(type(t) is RowsTensor for t in results)
                    if table == "whole":
                        assert not any(isinstance(t, RowsTensor) for t in results)
                except Exception as e:
                    wrong.append(f"{table}, {name}: {type(e).__name__}: {str(e)[:300]}")
        return wrong

    assert not compat.simulate(SIZE, job)[0]


VIEWED: dict[str, Op] = {
    "a row": lambda p: p[0].fill_(1),
    "set rows": lambda p: p.__setitem__(slice(0, 2), 0.0),
    "set by a mask": lambda p: p.__setitem__(p > 0, 0.0),
    "transposed": lambda p: p.t().mul_(2),
    "flattened": lambda p: p.view(-1).zero_(),
    "a chunk": lambda p: p.chunk(3)[1].add_(1),
    "a view of a view": lambda p: p[2:9].t()[0].add_(1),
    "out": lambda p: torch.clamp(p[0], 0, 1, out=p[1]),
    "of a copy": lambda p: p.copy_(p.clone().t().div_(3).t()),
    "twice": lambda p: [view.add_(1) for view in [p[3]] for _ in range(2)],
    "one after the other": lambda p: [p[i].mul_(i + 2) for i in range(4)],
    "views of one": lambda p: [chunk.mul_(2) for chunk in p.split(2)],
    "views of one, in a list": lambda p: torch._foreach_mul_(list(p.split(2)), 2),
    "what it gives": lambda p: p[0].add_(1).mul_(3),
}
LOST: dict[str, Op] = {
    "changed since": lambda p: (lambda view: (p.mul_(1), view.zero_()))(p[0]),
    "changed in a list": lambda p: (lambda view: (torch._foreach_mul_([p], 2), view.zero_()))(p[0]),
    "changed by another view": lambda p: [view.mul_(2) for view in (p[0], p[1])],
    "changed together": lambda p: torch._foreach_zero_([p[0], p[1]]),
}


@pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)
def test_writes_through_views(rows: Rows) -> None:
    def job(mesh: DeviceMesh) -> None:
        for name, write in VIEWED.items():
            p, _ = pair(mesh, rows)
            write(p)
            whole = values(0)
            write(whole)
            assert torch.equal(p.full_tensor(), whole), name
        for write in LOST.values():
            p, _ = pair(mesh, rows)
            with pytest.raises(RuntimeError, match="would be lost"):
                write(p)
        p = torch.nn.Parameter(pair(mesh, rows)[0])
        with pytest.raises(RuntimeError, match=r"leaf Variable|would be lost"):
            p[0].zero_()
        with torch.no_grad():
            p[0].zero_()
        assert not p.full_tensor()[0].any()  # type: ignore[attr-defined]

    compat.simulate(SIZE, job)


def test_muon() -> None:
    """Which writes to the transpose of a copy of a tall gradient."""

    def job(mesh: DeviceMesh) -> None:
        for rows in KINDS.values():
            ours, whole = nn.Parameter(pair(mesh, rows)[0]), nn.Parameter(values(0))
            for p in (ours, whole):
                p.grad = p.detach().sin()
                optimizer = torch.optim.Muon([p], lr=0.1, weight_decay=0.1)
                optimizer.step()
                optimizer.step()
            assert not torch.equal(whole, values(0))
            assert torch.equal(ours.full_tensor(), whole)  # type: ignore[attr-defined]

    compat.simulate(SIZE, job)


def test_refused() -> None:
    """What torch refuses for other DTensors, or cannot be: nothing is changed."""
    refused: dict[str, Op] = {
        "plain tensor": lambda p: p.add_(values(1)),
        "plain tensor, out of place": lambda p: p + values(1),
        "foreach plain tensor": lambda p: torch._foreach_add_([p], [values(1)]),
        "foreach onto plain": lambda p: torch._foreach_lerp_([values(1)], [p], 0.5),
        "foreach of plain": lambda p: torch._foreach_add([values(1)], [p]),
        "other shape": lambda p: p.t_(),
        "squeezed": lambda p: p.unsqueeze_(0),
    }

    def job(mesh: DeviceMesh) -> None:
        for name, op in refused.items():
            p, _ = pair(mesh, GROUPED)
            with pytest.raises((RuntimeError, NotImplementedError)) as caught:
                op(p)
            if "plain" in name:
                assert "mixed torch.Tensor and DTensor" in str(caught.value), name
            assert p.shape == SHAPE, name
            assert torch.equal(p.full_tensor(), values(0)), name

    compat.simulate(SIZE, job)


def test_mixed_placements() -> None:
    """Beside whole tensors, shards, and other rows of the same shape."""

    def job(mesh: DeviceMesh) -> None:
        for kind in ([Replicate()], [Shard(0)], [Shard(1)], [SINGLE]):

            def other(kind: Any = kind) -> DTensor:
                if isinstance(kind[0], Rows):
                    return distributed(values(1), mesh, kind[0], None)
                return distribute_tensor(values(1), mesh, kind, src_data_rank=None)

            for name, op in {
                "add": lambda p, q: p + q,
                "add_": lambda p, q: p.add_(q),
                "foreach": lambda p, q: torch._foreach_add([p], [q])[0],
                "foreach_": lambda p, q: (torch._foreach_addcmul_([p], [q], [p]), p)[1],
                "copy_": lambda p, q: p.copy_(q),
            }.items():
                for swapped in (False, True):
                    plain = [values(0), values(1)]
                    ours: list[DTensor] = [distributed(values(0), mesh, GROUPED, None), other()]
                    if swapped:
                        plain, ours = plain[::-1], ours[::-1]
                    before = ours[0].placements
                    close(op(*plain), op(*ours))
                    close(plain, ours)
                    assert ours[0].placements == before, (name, kind, swapped)

    compat.simulate(SIZE, job)


def test_numbers_that_are_sums_of_parts() -> None:
    """Beside one number of a sharded tensor, of which each rank has a part."""
    ops: dict[str, Op] = {
        "mul": lambda p, s: p * s,
        "sub": lambda p, s: p - p * s,
        "from it": lambda p, s: s - p,
        "div": lambda p, s: p / s,
        "maximum": lambda p, s: torch.maximum(p, s),
        "where": lambda p, s: torch.where(p > 0, p, s),
        "addcmul": lambda p, s: torch.addcmul(p, p, s),
        "mul_": lambda p, s: p.clone().mul_(s),
        "out": lambda p, s: torch.mul(p, s, out=torch.empty_like(p)),
        "foreach": lambda p, s: torch._foreach_mul([p, p.clone()], s),
        "foreach_": lambda p, s: (torch._foreach_mul_([t := p.clone()], s), t)[1],
        "a list of them": lambda p, s: torch._foreach_div([p], [s])[0],
        "as weights": lambda p, s: torch._foreach_lerp([p], [p * 2], [s])[0],
    }
    numbers: dict[str, Op] = {
        "sum": lambda q: q.sum(),
        "mean": lambda q: q.mean(),
        "norm": lambda q: q.norm(),
        "max": lambda q: q.max(),
    }

    def job(mesh: DeviceMesh) -> None:
        p, q = values(0), values(1)
        for kind in (GROUPED, Shard(0)):
            for (op_name, op), (name, of) in itertools.product(ops.items(), numbers.items()):
                ours = distributed(p, mesh, GROUPED, None)
                got = op(ours, of(distributed(q, mesh, kind, None)))
                close(op(p, of(q)), got)
                made = got if isinstance(got, list | tuple) else [got]
                assert all(type(t) is RowsTensor for t in made), (op_name, name)

    compat.simulate(SIZE, job)


def test_random_values_agree() -> None:
    """Ranks that hold the same rows get the same values, whatever their generators say."""
    lock = threading.Lock()

    def job(mesh: DeviceMesh) -> Any:
        rank = mesh.get_local_rank()
        locals_ = []
        for fill in (
            lambda t: nn.init.normal_(t),
            lambda t: nn.init.xavier_uniform_(t),
            lambda t: nn.init.trunc_normal_(t),
            lambda t: torch.randn_like(t),
            lambda t: torch.rand_like(t),
            lambda t: torch.bernoulli(t.clone().fill_(0.5)),
            lambda t: nn.functional.dropout(t.clone().fill_(1.0)),
        ):
            p, _ = pair(mesh, GROUPED)
            with lock:  # threads have one generator
                torch.manual_seed(rank)
            made = fill(p)
            assert type(made) is RowsTensor
            locals_.append((made.to_local().clone(), made.full_tensor()))
        return locals_

    results = compat.simulate(SIZE, job)
    for drawn in zip(*results, strict=True):
        for rank, (local, full) in enumerate(drawn):
            assert torch.equal(full, drawn[0][1])
            assert torch.equal(local, GROUPED.take(full, rank))
        full = drawn[0][1]
        assert not torch.equal(full[:3], full[3:6])  # not one rank's values on all


def test_gradients() -> None:
    """Of ops on the whole, on the rows, and of ``full_tensor`` and ``to_local``."""

    def objective(p: Any, q: Any) -> Any:
        return (p * q).sum() + (p.t() @ q).sum() + p[3].sum() * 2 + (p.sigmoid()).norm()

    def job(mesh: DeviceMesh) -> None:
        p, q = (nn.Parameter(t) for t in (values(0), values(1)))
        ours = [nn.Parameter(t) for t in pair(mesh, GROUPED)]
        for _ in range(2):
            objective(p, q).backward()
            objective(*ours).backward()
            close([p.grad, q.grad], [t.grad for t in ours])
        weight = values(3)
        for t, plain in zip(ours, (p, q), strict=True):
            t.grad = plain.grad = None
            (t.full_tensor() * weight).sum().backward()
            assert type(t.grad) is RowsTensor
            close(weight, t.grad)
            local = t.to_local()
            (got,) = torch.autograd.grad(local.sum() * 3, t)
            assert type(got) is RowsTensor
            close(torch.full(SHAPE, 3.0), got)

    compat.simulate(SIZE, job)


def test_redistribute() -> None:
    def job(mesh: DeviceMesh) -> None:
        p, _ = pair(mesh, SINGLE)
        for kind in (Replicate(), Shard(0), Shard(1)):
            made = p.redistribute(mesh, [kind])
            assert type(made) is DTensor
            assert made.placements == (kind,)
            assert torch.equal(made.full_tensor(), values(0))
        assert p.redistribute(mesh, [SINGLE]) is p

    compat.simulate(SIZE, job)


def test_copied_and_saved() -> None:
    def job(mesh: DeviceMesh) -> None:
        p = nn.Parameter(distributed(values(0), mesh, SINGLE, None))
        compat.as_parameter(p)  # type: ignore[arg-type]
        (p * 2).sum().backward()
        twin = copy.deepcopy(p)
        assert isinstance(twin, RowsTensor) and twin.grad is None and p.grad is not None
        with torch.no_grad():
            twin.zero_()
        assert torch.equal(p.full_tensor(), values(0))
        buffer = io.BytesIO()
        torch.save({"p": p, "t": p.detach()}, buffer)
        for safe in (True, False):
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=safe)
            for t in (*loaded.values(), pickle.loads(pickle.dumps(p.detach()))):
                assert isinstance(t, RowsTensor)
                assert t.placements == p.placements
                assert torch.equal(t.full_tensor(), values(0))
            assert isinstance(loaded["p"], nn.Parameter)

    compat.simulate(SIZE, job)


@pytest.mark.parametrize("kind", [SINGLE, Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("source", [0, None])
def test_nothing_keeps_the_whole(kind: Any, source: int | None) -> None:
    def job(mesh: DeviceMesh) -> None:
        given = values(0, (24, 8))
        made = distributed(given, mesh, kind, source)
        local = made.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
        assert local.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        assert torch.equal(made.full_tensor(), given)

    compat.simulate(SIZE, job)


@pytest.mark.parametrize("kind", [Shard(0), Shard(1), Shard(-1), Replicate()], ids=str)
@pytest.mark.parametrize("shape", [(24, 8), (10, 6)], ids=["even", "uneven"])
def test_parts_are_those_that_torch_makes(kind: Any, shape: tuple[int, int]) -> None:
    def job(mesh: DeviceMesh) -> None:
        for given in (values(0, shape), values(0, shape[::-1]).t()):
            made = distributed(given, mesh, kind, None)
            due = distribute_tensor(given, mesh, [kind], src_data_rank=None)
            assert torch.equal(made.to_local(), due.to_local())
            assert made.to_local().stride() == due.to_local().stride()
            assert compat.spec_of(made) == compat.spec_of(due)

    compat.simulate(SIZE, job)
