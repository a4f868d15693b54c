"""The functions users call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan import adapters, proof
from tpplan.automatic import plan_for
from tpplan.compat import fake_world
from tpplan.compiled import CompiledPlan
from tpplan.kernels.launch import interpreted
from tpplan.language import Diagnostic, FrozenMap, Plan, PlanError
from tpplan.language.styles import CHUNKED, SYMMETRIC, WAITING
from tpplan.observe.examples import with_other_inputs
from tpplan.planner import compile_plan
from tpplan.planner.kernels import implementations
from tpplan.planner.match import fold
from tpplan.proof import Verification
from tpplan.rewrite import apply, device_type, idle, plan_of
from tpplan.rewrite.buffers import buffers_of
from tpplan.rewrite.launch import agreed, require_same_order
from tpplan.rewrite.rehearse import rehearse
from tpplan.rewrite.world import own_mesh
from tpplan.shipped import PlanSource
from tpplan.trainers import introduce, introduce_experts

if TYPE_CHECKING:
    from tpplan.comm.pace import Pace
    from tpplan.cost.hardware import HardwareSource
    from tpplan.render import Advice, Report
    from tpplan.simulate.optimizers import OptimizerSource


@with_other_inputs
def parallelize(
    model: nn.Module,
    plan: PlanSource,
    mesh: DeviceMesh | None = None,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    *,
    inputs: Any = None,
    src_data_rank: int | None = 0,
    prove: bool = True,
    save: str | None = None,
    recompute: Iterable[str] | None = None,
    overlap: str | None = None,
) -> nn.Module:
    """Shard ``model`` in place as ``plan`` says, and return it.

    Everything is checked before anything is changed, and an error leaves the model as it was.

    Args:
        model: real, or on the meta device (then ``to_empty`` and load).
        plan: a ``Plan``, a path, a shipped plan's name, a mapping, or "auto": the shipped plan of
            the model's class, else a suggested one, with a warning.
        mesh: its dimensions "tp" and "ep" (docs/guide.md), or the only one, for tp. None: the whole
            world under torchrun; tp 1 in a single process.
        sequence_parallel, kernels, save, recompute, overlap: override the plan's keys.
        inputs: a call the model accepts (a mapping of keyword arguments, a tuple, or a tensor),
            where token ids of shape (batch, sequence) are not one; or a list of calls. Linears and
            Embeddings that none comes to are sharded too, with a warning, and cannot be run.
        src_data_rank: the rank of the tp group whose values count; None trusts each rank's own.
        prove: whether simulated ranks run it beside the unsharded one first; see docs/proved.md.

    Raises:
        PlanError: with every problem of the plan, the model and their fit.
        ValueError: where the model was parallelized before, or the mesh's dimensions are others; on
            all ranks, where one fails or they were not called alike.
    """
    if plan_of(model) is not None:
        raise ValueError("this model was parallelized before; build a fresh one to shard it anew")
    own, tp_mesh, ep = own_mesh(mesh)
    tp = 1 if tp_mesh is None else tp_mesh.size()

    def compile_here() -> CompiledPlan:
        chosen = plan_for(model, plan, tp, inputs, sequence_parallel)
        loaded = chosen.keeping(save, recompute, overlap)
        return compile_plan(model, loaded, tp, sequence_parallel, kernels, inputs, ep)

    compiled = agreed(model, own, compile_here, {"prove": prove, "src_data_rank": src_data_rank})
    pace = _pace(compiled, own)
    _warn(compiled, own, device_type(model) if own is None else own.device_type)
    with buffers_of(model, own, src_data_rank):
        if own is not None and tp * ep > 1:
            if prove:
                proof.prove_once(model, compiled, own, inputs)
            require_same_order(rehearse(model, compiled, own, inputs), own)
        apply(model, compiled, own, src_data_rank, pace=pace)
    _introduce(model, tp_mesh, ep)
    return model


def _introduce(model: nn.Module, tp_mesh: DeviceMesh | None, ep: int) -> None:
    """Tell the libraries that are loaded what the model is now."""
    adapters.introduce()
    if tp_mesh is not None and tp_mesh.size() > 1:
        introduce(model, tp_mesh)
    elif ep > 1:
        introduce_experts(model, ep)


@with_other_inputs
def dry_run(
    model: nn.Module,
    plan: PlanSource,
    tp: int,
    batch: int = 1,
    seq: int = 2048,
    *,
    ep: int = 1,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    inputs: Any = None,
    loss: bool = False,
    optimizer: OptimizerSource = "adamw",
    max_norm: float | None = 1.0,
    master_weights: bool = True,
    checkpointing: bool = False,
    fold: bool = True,
    hardware: HardwareSource | None = None,
    compare: bool = False,
    save: str | None = None,
    recompute: Iterable[str] | None = None,
    overlap: str | None = None,
) -> Report:
    """What ``plan`` does to ``model`` on ``tp`` ranks: placements, collectives, memory, time.

    One training step is executed abstractly, on no ranks; the model (meta or real) is not changed.

    Args:
        batch, seq: the shape of the token ids it is run with; of each rank of ep.
        ep: how many times ``tp`` ranks there are, with tokens of their own, that share experts.
        inputs: a call the model accepts, where token ids are not one.
        loss: whether the token ids are given as ``labels`` too; else backward starts at the logits.
        optimizer: a name (adamw, adam, adagrad, rmsprop, sgd, sgd-momentum), a function from a
            list of parameters to a ``torch.optim.Optimizer``, or None for no step.
        max_norm: to which gradients are clipped before the step, if at all.
        master_weights: whether 16-bit parameters have float32 copies for the optimizer.
        checkpointing: whether layers are recomputed. The report has both memories.
        fold: whether of equal layers a few are executed, their repetition checked.
        hardware: a shipped profile's name (None: h100-nvlink), a YAML file, or a ``Hardware``.
        compare: whether other tps and modes are run as well, for the curves of ``to_html()``.
        save, recompute, overlap: as of ``parallelize``.

    Raises:
        PlanError: as ``parallelize`` does, and where there is no such hardware.
        ValueError: where there is no such optimizer, or the model takes no labels.
    """
    from tpplan import cost
    from tpplan.render import Report
    from tpplan.simulate.execute import Training
    from tpplan.simulate.optimizers import optimizer_named

    training = Training(optimizer_named(optimizer), max_norm, master_weights, checkpointing)
    if loss:
        inputs = cost.with_labels(model, inputs, batch, seq)
    chosen = plan_for(model, plan, tp, inputs, sequence_parallel)
    chosen = chosen.keeping(save, recompute, overlap)
    setting = cost.Setting(chosen, tp, sequence_parallel, kernels, inputs, ep)
    found = cost.dry_run(model, setting, batch, seq, training, fold, hardware or cost.DEFAULT)
    _warn(found.compiled, None, "cpu")
    return Report.of(cost.with_companions(model, setting, found) if compare else found)


@with_other_inputs
def advise(
    model: nn.Module,
    plan: PlanSource,
    gpus: int | None = None,
    batch: int = 64,
    seq: int = 2048,
    *,
    micro_batch: int = 1,
    kernels: str | Mapping[str, str] | None = None,
    inputs: Any = None,
    loss: bool = False,
    optimizer: OptimizerSource = "adamw",
    max_norm: float | None = 1.0,
    master_weights: bool = True,
    checkpointing: bool = False,
    hardware: HardwareSource | None = None,
    save: str | None = None,
    recompute: Iterable[str] | None = None,
    overlap: str | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Advice:
    """How to share out ``gpus`` GPUs for training ``model``: what fits, what is fastest, and why.

    Each size of the tensor-parallel group is executed abstractly, with and without sequence
    parallelism; the rest of the GPUs goes to data (FSDP) and pipeline parallelism, by formulas.

    Args:
        gpus: a node of the hardware's where it is None.
        batch: sequences in a step, on all GPUs; micro_batch: of them, what a rank runs at once.
        inputs: a call of one microbatch, where token ids are not one.
        told: is told what is being executed.

    The other arguments are those of ``dry_run``.

    Raises:
        PlanError: where the plan does not fit the model, and where there is no such hardware.
        ValueError: where there is no such optimizer, or the model takes no labels.
    """
    from tpplan import cost
    from tpplan.render import Advice
    from tpplan.simulate.execute import Training
    from tpplan.simulate.optimizers import optimizer_named

    timed_on = cost.load_hardware(hardware or cost.DEFAULT)
    training = Training(optimizer_named(optimizer), max_norm, master_weights, checkpointing)
    if loss:
        inputs = cost.with_labels(model, inputs, micro_batch, seq)
    chosen = plan_for(model, plan, 2, inputs)
    loaded = chosen.keeping(save, recompute, overlap)
    setting = cost.Setting(loaded, 1, None, kernels, inputs)
    task = cost.Task(gpus or timed_on.node, batch, seq, micro_batch)
    return Advice.of(cost.advise(model, setting, task, training, timed_on, told))


@with_other_inputs
def check(
    model: nn.Module,
    plan: PlanSource,
    tp: int,
    sequence_parallel: bool | None = None,
    *,
    ep: int = 1,
    inputs: Any = None,
    propose: bool = False,
    told: Callable[[str], None] = lambda _: None,
) -> CompiledPlan:
    """Everything ``parallelize`` checks, without ranks and without touching the model.

    Args:
        ep: how many times as many ranks, with other batches, share the experts of a mixture.
        propose: whether, of a plan that is refused, the rules are looked for that would be right
            in the place of its own, for up to a minute; ``told`` is told what is being done.

    Raises:
        PlanError: with every problem found, and what is proposed.
    """
    loaded = plan_for(model, plan, tp, inputs, sequence_parallel)
    try:
        compiled = _checked(model, loaded, tp, sequence_parallel, ep, inputs)
    except PlanError as error:
        if not propose or ep > 1:
            raise
        from tpplan.suggestion import mended

        raise mended(model, loaded, error, tp, sequence_parallel, inputs, told) from error.__cause__
    _warn(compiled, None)
    return compiled


def _checked(
    model: nn.Module, loaded: Plan, tp: int, sequence_parallel: bool | None, ep: int, inputs: Any
) -> CompiledPlan:
    compiled = compile_plan(model, loaded, tp, sequence_parallel, inputs=inputs, ep=ep)
    if tp * ep > 1:
        proof.prove(model, compiled, inputs)
        with fake_world(tp, ep=ep) as mesh:
            rehearse(model, compiled, mesh, inputs)
    return compiled


def _pace(compiled: CompiledPlan, mesh: DeviceMesh | None) -> Pace | None:
    """By what products are cut into pieces on the GPUs at hand; raises where they cannot be."""
    overlap = compiled.plan.overlap
    if mesh is None or compiled.tp == 1 or overlap == WAITING:
        return None
    if overlap == SYMMETRIC and mesh.device_type != "cuda":
        message = f"overlap: '{SYMMETRIC}' needs GPUs that reach each other's memory"
        hint = f"these ranks are on {mesh.device_type}; take '{CHUNKED}'"
        raise PlanError([Diagnostic(message, hint=hint)])
    from tpplan.cost.pace import hardware_here, pace_of

    return pace_of(hardware_here(mesh.device_type), compiled.tp)


def _warn(compiled: CompiledPlan, mesh: DeviceMesh | None, device: str | None = None) -> None:
    """On a mesh's first rank, of what nothing came to, and of words that do nothing."""
    if mesh is not None and any(mesh.get_coordinate() or ()):
        return
    for message in idle(compiled, device):
        warnings.warn(message, stacklevel=4)
    unreached = [path for path, plan in compiled.modules.items() if plan.unreached]
    if unreached and compiled.tp * compiled.ep > 1:
        message = (
            f"{fold(unreached)}: no call came to it; it is sharded by its rule, and an error where "
            "it is run. To have it proved, add a call that comes to it to the list of inputs="
        )
        warnings.warn(message, stacklevel=4)


def suggest(
    model: nn.Module,
    tp: int,
    inputs: Any = None,
    *,
    batch: int = 1,
    seq: int = 2048,
    hardware: HardwareSource | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Write a plan for a model that has none, found in what it does and proved.

    The plan's ``text`` is a file to keep and to edit. The model, real or on the meta device, is not
    changed; the same model gives the same text.

    Args:
        inputs: a call the model accepts, where token ids of shape (batch, sequence) are not one.
        batch, seq, hardware: what the plans that hold are weighed for, as in ``dry_run``.
        told: is told what is being done.

    Raises:
        PlanError: where no plan can be proved, and where the model changes from call to call.
    """
    from tpplan.suggestion import find

    return find(model, tp, inputs, batch=batch, seq=seq, hardware=hardware, told=told).plan


@with_other_inputs
def verify(
    make_model: nn.Module | Callable[[], nn.Module],
    plan: PlanSource,
    tp: int = 2,
    *,
    ep: int = 1,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    inputs: Any = None,
    processes: bool = False,
    tolerance: float = 1e-5,
    seed: int = 0,
    save: str | None = None,
    recompute: Iterable[str] | None = None,
    overlap: str | None = None,
) -> Verification:
    """Prove ``plan`` numerically: ``tp`` ranks against the unsharded model, every gradient.

    The ranks are simulated in this process. The model runs in evaluation mode (its own randomness
    off) and in float32; parameters that are all alike are stirred, for zero biases and unit norms
    hide mistakes. Needs no process group, and leaves one that is running alone.

    Args:
        make_model: a function that makes the model, or the model; with real weights.
        ep: how many times ``tp`` ranks there are, each time with a batch of their own, which share
            the experts of a mixture: their gradients must be the mean over the batches.
        sequence_parallel: one mode only; None for plain TP and, where the plan has it, TP+SP.
        inputs: a call the model accepts, where token ids are not one; or a list of calls.
        processes: real gloo processes instead of simulated ranks.
        tolerance: of max|difference| / max|reference| of the outputs, and of the gradients'
            max|difference| / max(max|g|, 1e-3 of the largest |g| in the model).
        seed: of the inputs, the objective's weights and what is stirred.
        kernels, save, recompute, overlap: as of ``parallelize``.

    Raises:
        PlanError: as ``parallelize`` does; and where Triton's kernels are asked for, and not its
            interpreter, which alone runs them on a CPU.
        VerificationError: naming the first module whose output or gradient differs.
    """
    model = make_model if isinstance(make_model, nn.Module) else make_model()
    chosen = plan_for(model, plan, tp, inputs, sequence_parallel)
    loaded = chosen.keeping(save, recompute, overlap)
    wanted = implementations(loaded.kernels, kernels)
    if "triton" in wanted.values() and not interpreted():
        message = "kernels: verify runs on the CPU, and Triton's run there in its interpreter only"
        hint = "set TRITON_INTERPRET=1 before Python starts, or give kernels as 'torch'"
        raise PlanError([Diagnostic(message, hint=hint)])
    if kernels is not None:
        loaded = replace(loaded, kernels=FrozenMap(wanted))
    return proof.verify(
        model,
        loaded,
        tp,
        sequence_parallel=sequence_parallel,
        inputs=inputs,
        processes=processes,
        tolerance=tolerance,
        seed=seed,
        ep=ep,
    )
