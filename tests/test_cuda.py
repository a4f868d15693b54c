"""Everything that depends on the device, on fake CUDA tensors: it runs, and stays where it is."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

import tpplan
from benchmarks import zoo
from tests.cuda import Context, Cuda, cuda_mesh, devices, fakes
from tests.gpt import GPT
from tests.kernels.bodies import bodies
from tests.models import hf
from tpplan.comm import (
    Group,
    Site,
    Stream,
    Transition,
    agreement,
    collectives,
    conjugates,
    fingerprints,
    gradients,
    pieces,
    sharded,
)
from tpplan.comm import cross_entropy as sharded_loss
from tpplan.comm.parts import scattered
from tpplan.comm.randomness import Randomness
from tpplan.kernels import launch, norm
from tpplan.layout import Rows
from tpplan.observe.calls import call_for
from tpplan.observe.shadow import shadow_of
from tpplan.observe.trace import fake_inputs
from tpplan.planner import compile_plan
from tpplan.rewrite import apply, world
from tpplan.rewrite.rehearse import rehearse
from tpplan.roles.draws import part_of_dropout
from tpplan.simulate import Recorder

HERE = "cuda:0"
SITE = Site("a.module", "for a reason")


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    yield Cuda(monkeypatch)
    launch.processors.cache_clear()


# --- whole models

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "Llama": (hf, "llama.yaml"),
    "GPT": (GPT, "gpt.yaml"),
    # packed weights; heads that ranks share
    "GPT-2": (zoo.makers()["gpt2"], "gpt2.yaml"),
    "Qwen3": (lambda: hf("Qwen3", num_key_value_heads=2), "llama.yaml"),
}


@pytest.mark.turns(24)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("name", MODELS)
def test_rehearsed(name: str, sequence_parallel: bool, kernels: str) -> None:
    make, plan = MODELS[name]
    model = make()
    compiled = compile_plan(model, tpplan.load_plan(plan), 4, sequence_parallel, kernels)
    with cuda_mesh(4) as mesh:
        rehearse(model.requires_grad_(False), compiled, mesh)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_in_training(sequence_parallel: bool, cuda: Cuda) -> None:
    """Dropout draws from the device's generator; every parameter and buffer is there."""
    model = GPT(dropout=0.1)
    compiled = compile_plan(model, tpplan.load_plan("gpt.yaml"), 2, sequence_parallel)
    with cuda_mesh(2) as mesh, fakes() as mode:
        shadow = shadow_of(model.requires_grad_(False), mode).train()
        args, kwargs = fake_inputs(mode, call_for(model, None), device="cuda")
        apply(shadow, compiled, mesh, src_data_rank=None)
        held = [t.to_local() if isinstance(t, DTensor) else t for t in shadow.parameters()]
        assert devices(held, list(shadow.buffers())) == {HERE}
        out = shadow(*args, **kwargs)
        assert devices(out.to_local() if isinstance(out, DTensor) else out) == {HERE}
    assert cuda.generator.offset > 0


@pytest.mark.parametrize("source", [None, 0, 1])
def test_rows_are_cut_onto_the_device(source: int | None) -> None:
    rows = Rows(0, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]])
    with cuda_mesh(2) as mesh, fakes():
        local = scattered(torch.empty(8, 3), mesh, rows, source)
        assert (devices(local), local.shape) == ({HERE}, (4, 3))


# --- collectives and what is differentiated around them


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("length", [8, 7])
def test_boundaries(length: int, fuse: bool) -> None:
    with cuda_mesh(2) as mesh, fakes():
        crossing = Transition(Group.of(mesh, fuse), SITE, SITE)
        whole = torch.empty(3, length, 6, device=HERE)
        part, bias = torch.empty(3, 4, 6, device=HERE), torch.empty(6, device=HERE)
        for function, given, args in (
            (conjugates._CopyIn, whole, (crossing,)),
            (conjugates._ReduceOut, whole, (crossing, False)),
            (conjugates._ReduceOut, whole, (crossing, True)),
            (conjugates._GatherIn, part, (1, length, crossing, torch.bfloat16)),
            (conjugates._ScatterOut, whole, (1, crossing, bias)),
            (conjugates._Split, whole, (1, crossing)),
            (conjugates._Join, part, (1, length, crossing)),
        ):
            context = Context()
            out = function.forward(context, given, *args)
            back = function.backward(context, torch.empty_like(out))
            assert devices(out, back) == {HERE}
            assert back[0].shape == given.shape


@pytest.mark.parametrize("count", [0, 2], ids=["fused", "chunked"])
@pytest.mark.parametrize("length", [8, 7])
def test_pieces(length: int, count: int) -> None:
    """Products beside their collectives, in pieces and by torch's fused ops."""
    with cuda_mesh(2) as mesh, fakes():
        crossing = Transition(Group.of(mesh), SITE, SITE)
        weights = [torch.empty(5, 6, device=HERE), torch.empty(9, 6, device=HERE)]
        biases = [torch.empty(5, device=HERE), None]
        each = [pieces.Projecting(w, b, False) for w, b in zip(weights, biases, strict=True)]
        part, whole = torch.empty(3, 4, 6, device=HERE), torch.empty(3, length, 6, device=HERE)
        many = pieces._Many.of(each)
        at = pieces._Cut(crossing, 1, length, 2, pieces.spans(4, count), many)
        context = Context()
        out = pieces._Gathered.forward(context, part, at, (part,), *weights, *biases)
        assert devices(*out) == {HERE}
        assert [tuple(y.shape) for y in out] == [(3, length, n) for n in (6, 5, 9)]
        back = pieces._Gathered.backward(context, *map(torch.empty_like, out))
        assert back[0].shape == part.shape
        assert devices(*back) == {HERE}

        at = pieces._Cut(crossing, 1, length, 2, at.spans, pieces._Many.of(each[:1]))
        context = Context()
        out = pieces._Scattered.forward(context, whole, at, (whole,), weights[0], biases[0])
        assert (tuple(out.shape), str(out.device)) == ((3, 4, 5), HERE)
        assert pieces._Scattered.backward(context, out)[0].shape == whole.shape

        flat = pieces._Cut(crossing, 0, 3 * length, 1, pieces.spans(3 * length, 2), at.many)
        context = Context()
        out = pieces._Reduced.forward(context, whole, flat, (whole,), weights[0])
        assert (tuple(out.shape), str(out.device)) == ((3, length, 5), HERE)
        assert pieces._Reduced.backward(context, out)[0].shape == whole.shape


def test_the_stream() -> None:
    with cuda_mesh(2) as mesh, fakes():
        whole = Stream(mesh, True, 1)
        context, local = Context(), torch.empty(3, 4, 6, device=HERE)
        x = sharded._WholeOf.forward(context, local, whole.source, 7, 1)
        assert devices(x.to_local(), sharded._WholeOf.backward(context, x)) == {HERE}
        context = Context()
        local = sharded._RowsOf.forward(context, x, 4, None)
        back = sharded._RowsOf.backward(context, local)[0]
        assert devices(local, back.to_local()) == {HERE}


def test_ranks_are_compared_on_the_device(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the inputs lie; never while a CUDA graph is captured."""
    with cuda_mesh(2) as mesh:
        group, randomness = Group.of(mesh), Randomness(0, "cuda")
        with fakes():
            inputs = [torch.empty(3, 4, device=device) for device in (HERE, "cpu")]
            mine = agreement._fingerprints(inputs, group, "cuda", [1, 2])
            assert devices(mine) == {HERE}
            assert devices(collectives.all_gather(mine, 0, 2, group, SITE)) == {HERE}
            sums = [fingerprints.projections(x) for x in inputs]
            assert devices(sums) == {HERE, "cpu"}
            found = fingerprints.are_apart(torch.stack([sums[0]] * 2))
            assert devices(found) == {HERE}
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        agreement.require_same_inputs({"ids": torch.zeros(3)}, group, SITE, "cuda", randomness)


def test_summed_gradients() -> None:
    with cuda_mesh(2) as mesh, fakes():
        ones = [DTensor.from_local(torch.empty(n, device=HERE), mesh) for n in (3, 4, 5)]
        context = Context()
        # summed, trained, of modules that only some of the ranks run, and the mean over ranks of ep
        known = (True, True, False), (True,) * 3, (False, True, True), (1, 2, 1)
        locals_ = gradients._Localize.forward(context, known, Group.of(mesh), SITE, None, *ones)
        grads = gradients._Localize.backward(context, locals_[0], None, locals_[2])[4:]
        assert devices(locals_, [g.to_local() for g in grads]) == {HERE}


@pytest.mark.parametrize("fuse", [False, True])
def test_the_loss(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_: lambda *_, **__: None)
    # as of real tensors: what is out of bounds is asserted without waiting for the device
    monkeypatch.setattr(sharded_loss, "FakeTensor", ())
    with cuda_mesh(2) as mesh, fakes():
        group = Group.of(mesh)
        vocabulary = sharded_loss.Vocabulary(10, 0, group, SITE, SITE, SITE)
        logits = torch.empty(7, 5, device=HERE)
        target, weight = (
            torch.zeros(7, dtype=torch.long, device=HERE),
            torch.ones(10, device=HERE),
        )
        for smoothing in (0.0, 0.1):
            loss = sharded_loss.cross_entropy(
                logits, target, vocabulary, weight, label_smoothing=smoothing, fuse=fuse
            )
            context = Context()
            args = (logits, target, weight[:5], smoothing > 0, vocabulary, fuse)
            out = sharded_loss._Statistics.forward(context, *args)
            grad = sharded_loss._Statistics.backward(context, *out)[0]
            assert devices(loss, out, grad) == {HERE}


def test_where_a_collective_comes_from_when_another_thread_runs_backward() -> None:
    """Autograd gives its threads the modes of the one that called it, and nothing else of ours."""
    with cuda_mesh(2) as mesh:
        group, recorder = Group.of(mesh), Recorder()

        def device_thread() -> None:
            _push_mode(recorder)
            try:
                collectives.all_reduce(torch.ones(3), group, SITE)
            finally:
                _pop_mode()

        thread = threading.Thread(target=device_thread)
        thread.start()
        thread.join()
        with recorder:
            dist.all_reduce(torch.ones(2))
    modules = [collective.module for collective in recorder.collectives]
    assert modules == [SITE.module, ""]


# --- kernels


class Launched:
    """Stands for ``launch.start``: keeps where it was called, and where the tensors are."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.seen = cuda, set[tuple[str, int, frozenset[str]]]()
        self.count = 0

    def __call__(self, _: Any, grid: tuple[int, ...], device: int, args: Any, __: Any) -> None:
        assert len(grid) == 3
        assert all(n > 0 for n in grid)
        self.count += 1
        self.seen.add((f"cuda:{self.cuda.device}", device, frozenset(devices(args))))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_kernels_run_where_their_tensors_are(
    device: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = Launched(cuda)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "start", launched)
    with fakes():
        made = [call() for call in _bodies(device)]
    assert launched.seen == {(device, int(device[-1]), frozenset({device}))}
    # the gradient of a wide norm takes two
    assert launched.count == len(made) + 1
    assert devices(made) == {device}
    assert cuda.device == 0


def _bodies(device: str) -> list[Callable[[], Any]]:
    """A call of every op's own body, as on a GPU."""

    def new(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    wide, row = new(6, 65536), new(6)
    backward = norm._norm_backward._body
    return [
        *bodies(new, 6, 32),
        lambda: backward(wide, wide, wide[0], row, row, None, 0.0, False, True, True),
    ]


def test_kernels_by_themselves_on_a_gpu_only() -> None:
    assert launch.chosen("auto", "cuda")
    assert not launch.chosen("auto", "cpu")
    with fakes():
        assert launch.fused(torch.empty(3, device=HERE))
        assert launch.processors(torch.device(HERE)) == 132


def test_dropout_in_compiled_graphs_stays_on_the_device() -> None:
    with cuda_mesh(2) as mesh, fakes():
        assert devices(part_of_dropout(torch.empty(3, 4, device=HERE), 0.1, Group.of(mesh))) == {
            HERE
        }


# --- where it runs


def test_local_tensors_are_of_the_queue_that_a_forward_runs_on(cuda: Cuda) -> None:
    with cuda_mesh(2) as mesh, fakes():
        whole = Stream(mesh, False, 1)
    whole.moved()  # the first forward
    assert not whole.moved()
    cuda.queue = 7
    assert [whole.moved(), whole.moved()] == [True, False]


class _Asked:
    """What a mesh was to be made of."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args


@pytest.mark.parametrize(("current", "chosen"), [(0, [3]), (2, [])])
def test_each_rank_takes_its_own_device(
    current: int, chosen: list[int], cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of LOCAL_RANK, where nobody chose another one."""
    cuda.device, taken, started = current, list[int](), list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "init_process_group", started.append)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "group", types.SimpleNamespace(WORLD=torch.nn.Identity()))
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "init_device_mesh", _Asked)
    mesh: Any = world.world_mesh()
    assert (taken, started, mesh.args) == (chosen, ["nccl"], ("cuda", (4,)))
