"""``CompiledPlan``: what will become of a model, decided and checked before anything is touched.

Immutable data, and the only thing the later rooms read: every parameter's placement, every
boundary, every kernel. Module paths are those of ``named_modules()`` ("" is the model itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat import Site
from tpplan.kernels.forms import Form
from tpplan.kernels.gated_norm import GatedForm
from tpplan.language import FrozenMap, Plan, Rule
from tpplan.layout import Rows
from tpplan.places import Argument, Place


@dataclass(frozen=True)
class KernelChoice:
    """Which implementation runs a module that a fused kernel could serve, and why.

    Attributes:
        implementation: triton; torch, which is the module's own forward; or auto: Triton on a
            GPU, the module's own forward elsewhere.
        form: how the kernel has to compute; None where it cannot stand for the module.
    """

    kind: str
    implementation: str
    reason: str
    form: Form | None = None


@dataclass(frozen=True)
class ParameterPlan:
    """What becomes of one parameter; a tied one appears once, under its first name.

    Attributes:
        shape: global; local_shape: of the first rank, which has the most rows.
        summed: whether its gradient is summed over the ranks, because each rank's is only a part.
        over_ep: its placement over the ranks of a mesh's dimension ep, where it is not whole there.
        aliases: its other names where it is tied.
        rule: the rule that decided, or None where it is small and was left replicated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    local_shape: tuple[int, ...]
    summed: bool = False
    over_ep: Placement | None = None
    aliases: tuple[str, ...] = ()
    rule: Rule | None = None

    @property
    def shares_rows(self) -> bool:
        """Whether several ranks hold the same rows: heads of which there are fewer than ranks."""
        return isinstance(self.placement, Rows) and bool(self.placement.shared())

    @property
    def placed(self) -> str:
        """The placement in a few characters, for reports."""
        own = _short(self.placement)
        return own if self.over_ep is None else f"{_short(self.over_ep)} over ep, {own}"


def _short(placement: Placement) -> str:
    short = isinstance(placement, Rows)
    return str(placement) if short else repr(placement).replace("(dim=", "(")


@dataclass(frozen=True)
class Boundary:
    """Where the stream enters a sharded region: gathered under SP, copied (f) without.

    Attributes:
        arguments: those of the module that are the tensor that enters; usually one.
        consumers: the column-parallel modules it serves.
        number: of the tensor in the trace; boundaries of one number share a collective.
        shared: all modules, in order of execution, that enter with this same tensor object and
            share one collective; just the module itself where nothing is shared.
        whole: whether the tensor is whole also inside the stack (states a decoder attends to).
        narrowed: whether the module's code, which computes with the tensor's width, is shown a
            rank's share of it.
    """

    arguments: tuple[Argument, ...]
    consumers: tuple[str, ...]
    number: int
    shared: tuple[str, ...]
    whole: bool = False
    narrowed: bool = False


@dataclass(frozen=True)
class Element:
    """An element of the layer stack: where the stream goes local and comes back.

    Attributes:
        argument: the argument that carries the stream.
        output: where the stream is in what the element gives.
        others: arguments whose rows meet those of the stream, and go local with it.
    """

    argument: Argument
    output: Place
    others: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class Summed:
    """What a module that multiplies by its own cut parameters gives a part of.

    Attributes:
        outputs: where, in what it gives, each rank has a part of the sum.
        added: parameters of its own that it adds to the sum: once, not on every rank.
    """

    outputs: tuple[Place, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class ThinExperts:
    """Stacked experts with few rows and columns, on which a plan for large ones is proved.

    Attributes:
        hidden: the width of what they are given and give.
        shapes, cut: of their parameters, by name: all of it, and what a rank has of it.
        attributes: the numbers in the module's code: name -> (whole, per rank).
    """

    hidden: int
    shapes: Mapping[str, tuple[int, ...]]
    cut: Mapping[str, Placement]
    attributes: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Detour:
    """What a replicated module in the stack, which needs the whole sequence, takes and gives.

    Attributes:
        arguments: what it is given of the stream, gathered for it.
        outputs: where, in what it gives, is what goes on as a rank's rows.
    """

    arguments: tuple[Argument, ...]
    outputs: tuple[Place, ...]


@dataclass(frozen=True)
class Spread:
    """What a module in the stack has whole, and what meets a rank's rows of the stream.

    Of its gradient each rank has a part.

    Attributes:
        arguments: those that it is given; outputs: where, in what it gives, such values are.
    """

    arguments: tuple[Argument, ...] = ()
    outputs: tuple[Place, ...] = ()


# What random numbers are drawn for: activations of a sharded region (columns, heads), the stream
# (rows of its own on each rank under sequence parallelism), what every rank holds whole, or
# several of these, of which some ask for masks that agree and some for masks that do not: which is
# for which is told by the place in the code then.
DrawnFor = Literal["region", "stream", "whole", "mixed"]
DrawnAt = tuple[tuple[Site, DrawnFor], ...]


@dataclass(frozen=True)
class WidthNorm:
    """An RMSNorm or LayerNorm over a width that is sharded.

    Attributes:
        centred: whether it takes the mean away, as LayerNorm.
        offset: whether its scale is stored less one.
        gated: how it gates, if it does; takes: its arguments then, what it normalises and the gate.
    """

    width: int
    eps: float
    offset: bool
    centred: bool = False
    gated: GatedForm | None = None
    takes: tuple[Argument, Argument] | None = None


@dataclass(frozen=True)
class ModulePlan:
    """What becomes of one module; a module without an entry is left exactly as it is.

    Attributes:
        style: its rule's style, or None where it has no rule but parameters of its own, or runs
            rewritten modules.
        parameters: names of its own parameters that become DTensors.
        ran: of an element, a digest of what ran inside: another one's where they do the same.
        rows: whether it is to run on a rank's rows of the stream.
        stream: the argument that carries the stream, of a module that takes its rows of it, or all
            of it; None where it was not called.
        projection: whether it is column-parallel and multiplies its input by its weight.
        multihead: whether it is torch's own attention, computed anew from the rank's heads.
        transposed: whether its weight is stored (in, out).
        norm: where it normalises over columns of which each rank holds a part.
        together: the row-parallel layers, in order of execution, whose sum is reduced once.
        head_inputs: arguments of which each rank takes its heads: (argument, dimension).
        heads: how many there are on all ranks.
        partial: whether it is row-parallel and the module around it reduces what it gives.
        detour: of a replicated module that runs on the whole sequence.
        spread: what it has for all rows of the sequence, under sequence parallelism.
        escaping: where, in what it gives, is what a block of experts has besides its sum: whole on
            every rank, each of which sends the same gradient back into the block.
        handed: where, in what it gives, is a rank's part of what leaves the model, and the
            dimension that is cut.
        given: of the model itself: what it is given of which each rank has a part of the gradient.
        kept: attributes in which it keeps a rank's part of something, or what has a part of its
            gradient on each rank; whether it is only the gradient.
        summed: of a module that multiplies by its own cut parameters.
        thin: of a module of large experts.
        dispatched: whether it holds whole experts of a rank of ep, to which tokens are sent.
        container: whether the stream passes through it in its global form.
        draws: what it draws random numbers for in training (dropout), None where it draws none.
        drawn_at: where that is "mixed", what is drawn for at each place in the code; a place that
            draws for several is not there.
        read: whether other modules' code computes with its parameters (a vocabulary's table, say).
        widened: whether it projects what its region's code is shown a part of.
        unreached: whether none of the calls came to it: it has its part, and cannot be run.
        attributes: per-rank values of hard-coded attributes: name -> (present, per rank).
        cut: tensors of which each rank has its heads (caches): name -> (dimension, heads).
        buffers: what each rank computes with of a buffer, which it has the whole of.
        options: the rule's remaining options.
    """

    path: str
    style: str | None
    rule: Rule | None = None
    parameters: tuple[str, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    element: Element | None = None
    ran: str = ""
    rows: bool = False
    stream: Argument | None = None
    projection: bool = False
    multihead: bool = False
    transposed: bool = False
    norm: WidthNorm | None = None
    together: tuple[str, ...] = ()
    head_inputs: tuple[tuple[Argument, int], ...] = ()
    heads: int = 0
    partial: bool = False
    detour: Detour | None = None
    spread: Spread | None = None
    escaping: tuple[Place, ...] = ()
    handed: tuple[tuple[Place, int], ...] = ()
    given: tuple[Argument, ...] = ()
    kept: tuple[tuple[str, bool], ...] = ()
    summed: Summed | None = None
    thin: ThinExperts | None = None
    dispatched: bool = False
    container: bool = False
    draws: DrawnFor | None = None
    drawn_at: DrawnAt = ()
    read: bool = False
    widened: bool = False
    unreached: bool = False
    attributes: Mapping[str, tuple[int, int]] = field(default_factory=FrozenMap)
    cut: Mapping[str, tuple[int, int]] = field(default_factory=FrozenMap)
    buffers: Mapping[str, Rows] = field(default_factory=FrozenMap)
    options: Mapping[str, object] = field(default_factory=FrozenMap)
    kernel: KernelChoice | None = None


@dataclass(frozen=True)
class CompiledPlan:
    """A plan compiled onto one model, for one tp and ep.

    Attributes:
        ep: by how many ranks, each with tokens of its own, whole experts are shared.
        modules: by path, in the order of ``named_modules()``.
        parameters: by name, in the order of ``named_parameters()``.
        kernels: the implementation asked for, by kind of kernel: triton, torch or auto.
        unmatched: optional patterns that matched nothing.
        draws: from which other random numbers than torch's its code draws: "Python", "numpy".
    """

    plan: Plan
    tp: int
    sequence_parallel: bool
    modules: Mapping[str, ModulePlan]
    parameters: Mapping[str, ParameterPlan]
    kernels: Mapping[str, str] = field(default_factory=FrozenMap)
    unmatched: tuple[str, ...] = ()
    ep: int = 1
    draws: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterPlan:
        """The entry of a parameter under any of its names; KeyError where there is none."""
        if name in self.parameters:
            return self.parameters[name]
        for entry in self.parameters.values():
            if name in entry.aliases:
                return entry
        raise KeyError(name)
