"""What every style can be asked; each of the others is one file beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import parametrize

from tpplan.compiled import ModulePlan
from tpplan.language import FrozenMap, Rule
from tpplan.layout import MisfitError, Part, Rows, rows_of
from tpplan.roles.lowered import LocalParameters, Lowered
from tpplan.roles.reads import Lent
from tpplan.roles.summing import Summing

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.sizes import Sizes
    from tpplan.planner.walk import Walk

Roles = tuple[list[type[nn.Module]], type[Lowered] | None]
"""The outermost first; and the one in torch's class's place, inside of the module's own."""
Factor = tuple[str, dict[str, object]]
"""The style of a factor of a low-rank matrix, and its options."""
Misfits = dict[str, dict[str, str]]
"""The values of tp that would fit -> module path -> what does not."""


class Style:
    """What becomes of a module by its rule; as it is here: nothing, its parameters whole.

    Attributes:
        name: what plans call it.
        columns: whether its outputs are sharded: each rank computes columns of its own.
        sums: whether its inputs are sharded, and its outputs the sum over the ranks.
        vocabulary: whether each rank has a range of a vocabulary.
        rows: whether it runs on a rank's rows of the sequence-sharded stream.
        heads: whether it states how many heads there are, for what is inside of it.
        stacked: whether it holds the experts of a mixture, of which each rank has a part.
        apart: whether it computes with the whole of what it is given, also of the stream.
        bare: the options of such a rule for a parameter; None: a parameter cannot have one.
        probed: whether what it computes is found by running it.
        inner: the styles of its children by name, where the module as a whole has a style.
        hf: what transformers calls it.
    """

    name = ""
    columns = sums = vocabulary = stacked = rows = heads = apart = probed = False
    bare: frozenset[str] | None = None
    inner: Mapping[str, str] = FrozenMap()
    hf: tuple[str, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether a forward that never calls it shows too little of it."""
        return self.columns or self.sums or self.vocabulary or self.stacked

    @property
    def answers(self) -> bool:
        """Whether it computes nothing but a product with its weight, or a look-up in it."""
        return self.sums or self.vocabulary

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """What stands in the way of the style on a module; None where nothing does."""
        return None

    def is_region(self, module: nn.Module) -> bool:
        """Whether the module is a sharded region by itself, entry and exit included."""
        return False

    def is_list(self, module: nn.Module) -> bool:
        """Whether each rank runs some of the module's members, in the place of all."""
        return False

    def is_head(self, module: nn.Module) -> bool:
        """Whether the stream enters it as it enters a region, and its columns are the result."""
        return False

    def scatters(self, options: Mapping[str, object]) -> bool:
        """Whether of a sum each rank gets its columns."""
        return False

    def keeps_whole(self, options: Mapping[str, object]) -> bool:
        """Whether of stacked experts each rank has whole ones."""
        return False

    def ways(self) -> Mapping[str, Mapping[str, object]]:
        """Options between which only the cost decides, each by a word for it."""
        return {}

    def stays(self, options: Mapping[str, object]) -> bool:
        """Whether a sum is for the code of the region that it is made in, which goes on."""
        return False

    def closes(self, options: Mapping[str, object]) -> bool:
        """Whether the sums of the row-parallel layers inside are reduced where it gives them."""
        return False

    def low_rank(self, options: Mapping[str, object]) -> tuple[Factor, Factor] | None:
        """What becomes of A and B where x A B is added to what such a module makes of x."""
        return None

    def placement(
        self, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
    ) -> Placement:
        """Where the module's parameter ``leaf`` goes.

        Args:
            transposed: whether the weight is stored (in, out).
            rows: of a module that is not simply cut evenly.
        """
        return Replicate()

    def place(self, parameter: torch.Tensor, rule: Rule, tp: int) -> Placement:
        """Where a parameter goes that has a rule of its own.

        Raises:
            MisfitError: where tp does not fit it, or the rule does not say enough; with a hint.
        """
        return Replicate()

    def lay_out(self, sizes: Sizes, path: str, rule: Rule, misfits: Misfits) -> None:
        """Find what each rank has of a module, and note where tp does not fit.

        Raises:
            MisfitError: where the module's heads do not.
        """

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """What must hold of the first activation that a call is given, in the flow of tensors."""

    def leave(self, walk: Walk, call: Call) -> None:
        """What a call gives: sharded columns, the stream, or something whole."""

    def multiplies(self, plan: ModulePlan, module: nn.Module) -> bool:
        """Whether a module that is whole is run as a product with its weight."""
        return False

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """The classes that a module takes on, beside those that go by where it is.

        Args:
            fused: the one whose kernel stands for the module's own forward, if any.
        """
        own: list[type[nn.Module]] = [Lent] if plan.read else []
        own += [Summing] if plan.summed else [LocalParameters] if plan.parameters else []
        return ([] if fused is None else [fused]) + own, None

    def reasons(self, plan: ModulePlan) -> tuple[str, str]:
        """What its collectives are for, forward and backward."""
        return "a whole tensor where the stream is sharded", "gradient of a whole tensor"


def cut_along(parameter: torch.Tensor, dim: object, tp: int) -> Shard:
    """A cut of a bare parameter along a dimension, which may be counted from the end.

    Raises:
        MisfitError: where it has no such dimension, or tp does not divide it; with a hint.
    """
    shape = tuple(parameter.shape)
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        hint = "state one of these with 'dim:'"
        raise MisfitError(f"its shape {shape} has no dimension {dim}", hint)
    if shape[dim] % tp:
        hint = f"tp may be {divisors(shape[dim])}"
        raise MisfitError(f"tp {tp} does not divide the {shape[dim]} of its dimension {dim}", hint)
    return Shard(dim % len(shape))


def kept(options: Mapping[str, object], name: str) -> dict[str, object]:
    """One of a rule's options, where it is stated."""
    return {name: options[name]} if name in options else {}


def equal_parts(packed: Mapping[str, object], size: int, tp: int, dim: int) -> Rows:
    """The cut of each of several parts of one size that lie side by side.

    Raises:
        MisfitError: where they are not, or repeat; with a hint.
    """
    names = packed["parts"]
    assert isinstance(names, Sequence)
    if "repeat" in packed:
        hint = "name the parts as they lie in the whole, in their order"
        raise MisfitError("packed: equal parts do not repeat", hint)
    if size % (len(names) * tp):
        message = f"packed: the {size} of dimension {dim} are not {len(names)} parts for tp {tp}"
        raise MisfitError(message, "name parts of equal size, for every rank")
    return rows_of([Part(name, size // len(names), tp) for name in names], 1, tp, dim)


def adds_to_embedding(module: nn.Module) -> bool:
    """Whether an embedding's class adds something to torch's (a scale, an offset of positions).

    Such a one keeps its own forward; only the look-up inside it is replaced.
    """
    own = type(module).forward is not nn.Embedding.forward
    return isinstance(module, nn.Embedding) and own


def divisors(*numbers: int) -> str:
    """The values of tp up to 64 that divide every one of ``numbers``, for messages."""
    fit = [n for n in range(1, 65) if all(number % n == 0 for number in numbers)]
    return ", ".join(map(str, fit))


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` computes exactly what torch's ``kind`` does."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def without_weight(module: nn.Module) -> str | None:
    """What is said of a module that has no weight to shard; None of one that has."""
    if module._parameters.get("weight") is not None:
        return None
    makers = made_weight(module)
    if makers:
        return (
            f"its weight is made of other parameters by {makers}, which needs the whole of it; "
            "fold that into the weight first"
        )
    held = [name for name, p in module._parameters.items() if p is not None]
    parts = [name for name, _ in module.named_children()]
    if held:
        inside = f"; its parameters take rules of their own: {', '.join(held[:6])}"
    else:
        inside = f"; its parts are {', '.join(parts[:6])}" if parts else ""
    return f"{type(module).__name__} has no weight of its own to shard{inside}"


def made_weight(module: nn.Module) -> str:
    """What makes a module's weight anew at every call; nothing of one that holds its weight."""
    if parametrize.is_parametrized(module, "weight"):
        made = module.parametrizations["weight"]  # type: ignore[index]
        return ", ".join(type(one).__name__ for one in made)
    held = module._parameters.keys()
    if {"weight_g", "weight_v"} <= held:
        return "weight_norm"
    return "a hook of torch.nn.utils" if "weight_orig" in held else ""


def is_matrix(module: nn.Module, leaf: str) -> bool:
    """Whether a parameter is the weight of a product."""
    parameter = module._parameters[leaf]
    return parameter is not None and parameter.dim() >= 2 and leaf == "weight"
