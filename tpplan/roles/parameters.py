"""How a rewritten module reads its DTensor parameters: as local tensors, still in the graph.

Each module keeps the local tensors of its own parameters. They are made by one autograd function
for a whole group of modules (an element of the stack; all parameters with summed gradients), and
kept for as long as every parameter is the very object, with the very storage, they were made
from. Under FSDP2, which swaps parameters in and out, they are made anew for each forward; so are
those of whatever else stands in a parameter's place (``functional_call``, a parametrization, a
parameter of the unsharded model), which is placed as planned first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from tpplan import compat
from tpplan.comm import Group, Site, localize
from tpplan.comm.distribute import placed
from tpplan.comm.stream import version_of

# a parameter's name, itself, what it held and whether it was trained when it was localized
_Source = tuple[str, Any, torch.Tensor | None, bool]
_NO_SOURCE: _Source = ("", "", None, False)  # no module has that
_Asked = tuple[nn.Module, "Own", int]  # the parameter of a module, by its number
_Placed = tuple[tuple[_Asked, ...], list[DTensor]]  # mates' parameters, or one by itself


# On the parameters themselves: FSDP2 puts others in their place, whose memory it takes away and
# fills again under the local tensors, and these are to be let go then.
_INSTALLED = "_tpplan_installed"


def is_installed(parameter: Any) -> bool:
    """Whether it is a parameter that tpplan made, or found in the place of one it made."""
    return isinstance(parameter, DTensor) and _INSTALLED in vars(parameter)


class Own:
    """The parameters of one module, and the local tensors it computes with.

    Attributes:
        names: of the parameters, in the order computation wants them.
        specs: for each, how it was planned to be placed.
        summed: for each, whether its gradient is summed over the ranks.
        group: the tensor-parallel ranks.
        site: what a summing collective is reported under when the module is on its own.
        mates: the modules of which each rank runs one, in the order of the ranks, this one among
            them (a module for each head); none where every rank runs this one.
        apart: whether each parameter has a graph node of its own.
        means: of how many ranks with tokens of their own the gradients are the mean.
    """

    group: Group
    apart: bool = False
    mates: tuple[tuple[nn.Module, Own], ...] = ()

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        summed: Sequence[bool],
        site: Site,
        group: Group,
        means: int = 1,
    ) -> None:
        self.names = tuple(names)
        self.specs = tuple(compat.spec_of(module._parameters[name]) for name in names)  # type: ignore[arg-type]
        self.summed = tuple(summed)
        self.site, self.group, self.means = site, group, means
        self.adopt(module)

    def adopt(self, module: nn.Module) -> None:
        """Take the parameters the module holds now for those whose local tensors can be kept."""
        for name in self.names:
            parameter: Any = module._parameters[name]
            vars(parameter)[_INSTALLED] = True
            compat.as_parameter(parameter)
        self.drop()

    def drop(self) -> None:
        """Forget the local tensors (and let go of the graph nodes that hold the parameters)."""
        for index, group in enumerate(getattr(self, "_groups", ())):
            if group:
                self.disband(index)
        self._kept: list[Any] = [None] * len(self.names)
        self._sources = [_NO_SOURCE] * len(self.names)
        self._groups: list[tuple[_Asked, ...]] = [()] * len(self.names)
        self._passing: dict[int, tuple[Any, int, torch.Tensor]] = {}

    def part(self) -> None:
        """From now on, make each local tensor by an autograd function of its own.

        Where backward runs in two (a pipeline's), a node that parameters of several layers share
        would have the second run go through all that lies between these layers once more, and
        torch lets go of that after the first parameter.
        """
        self.apart = True
        self.drop()

    def disband(self, index: int) -> tuple[_Asked, ...]:
        """Forget all local tensors that were made together with one: they have one graph node.

        It holds on to each of their parameters, and torch lets no gradient pass by one that was
        converted since.
        """
        group = self._groups[index]
        for _, own, i in group:
            own._kept[i], own._sources[i], own._groups[i] = None, _NO_SOURCE, ()
        return group

    def __getstate__(self) -> dict[str, Any]:
        # local tensors are of the graph, and of this process
        own = "_kept", "_sources", "_groups", "_passing"
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.names, twin.specs, twin.site = self.names, self.specs, self.site
        twin.summed = self.summed
        twin.group, twin.means = self.group, self.means
        twin.drop()
        twin.mates = copy.deepcopy(self.mates, memo)
        return twin

    def read(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """The local tensors of the module's parameters, in the order of ``names``."""
        return self._kept if self._is_current(module) else self._renewed(module)

    def current(self, module: nn.Module) -> Sequence[torch.Tensor] | None:
        """What ``read`` gives where all of it is at hand."""
        return self._kept if self._is_current(module) else None

    def kept(self, index: int) -> torch.Tensor | None:
        """The local tensor of a parameter that is kept for the next forwards, if there is one."""
        return self._kept[index]  # type: ignore[no-any-return]

    def _is_current(self, module: nn.Module) -> bool:
        """Whether all that is kept is of what the module and its mates hold now."""
        held: Any = module._parameters
        for name, parameter, local, trained in self._sources:
            if (
                held.get(name) is not parameter
                or parameter._local_tensor is not local
                or parameter.requires_grad is not trained
            ):
                return False
        # not "not": TorchDynamo cannot negate a tuple
        return len(self._outdated(module)) == 0 if self.mates else True

    def together(self, module: nn.Module) -> tuple[tuple[nn.Module, Own], ...]:
        """The module's mates; itself alone where it has none.

        What is kept or made of the one is of the others: every rank decides for all of them, so
        that all ranks decide alike.
        """
        return self.mates or ((module, self),)

    def stale(self, module: nn.Module) -> list[int]:
        """Which of the parameters have no local tensor, or one that is no longer theirs.

        Without those that the module computes, which are left until it runs; but what was kept
        of them before must not be used any more by any module.
        """
        if self._is_current(module):
            return []
        tables = [mate._parameters for mate, _ in self.together(module)]
        return [
            i
            for i in self._outdated(module)
            if all(self.names[i] in held for held in tables) or self._groups[i]
            if not self._waits(i, module)
        ]

    def _outdated(self, module: nn.Module) -> list[int]:
        if not self.mates:
            return self._changed(module)
        found = [own._changed(mate) for mate, own in self.mates]
        return [i for i in range(len(self.names)) if any(i in changed for changed in found)]

    def _changed(self, module: nn.Module) -> list[int]:
        held: Any = module._parameters
        return [
            i
            for i, (name, parameter, local, trained) in enumerate(self._sources)
            if held.get(name) is not parameter
            or parameter._local_tensor is not local
            or parameter.requires_grad is not trained
        ]

    def _waits(self, index: int, module: nn.Module) -> bool:
        """Whether a local tensor of what the module holds now was made, and not read yet."""
        for mate, own in self.together(module):
            made, now = own._passing.get(index), mate._parameters.get(self.names[index])
            if made is None or now is None or made[0] is not now or made[1] != _version(now):
                return False
        return True

    def _renewed(self, module: nn.Module) -> Sequence[torch.Tensor]:
        outdated = self._outdated(module)
        missing = [i for i in outdated if not self._waits(i, module)]
        if missing:
            make([(module, self, i) for i in missing], self.site)
        passing = self._passing
        for _, own in self.together(module):
            own._passing = {}
        # what was made for good just now is among the kept; what FSDP2 holds back is nowhere
        due = {i: passing[i][2] if i in passing else self._kept[i] for i in outdated}
        for i, local in due.items():
            if local is None:
                raise self._sharded_further(i)
        return [due.get(i, kept) for i, kept in enumerate(self._kept)]

    def whole(self, index: int, parameter: DTensor) -> torch.Tensor:
        """All of a parameter, of whose gradient each rank takes its own part."""
        if compat.spec_of(parameter).mesh != self.specs[index].mesh:
            raise self._sharded_further(index)
        return parameter.full_tensor()

    def _sharded_further(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"{self.title(index)} is sharded by FSDP at this moment; call the module that "
            "fully_shard was applied to, or its unshard() first"
        )

    def title(self, index: int) -> str:
        """The name of a parameter, for messages."""
        return ".".join(filter(None, (self.site.module, self.names[index])))

    def placed(self, index: int, held: Any) -> DTensor | None:
        """``held``, which stands in a parameter's place, as planned; None: FSDP2 shards it now."""
        spec = self.specs[index]
        if not isinstance(held, torch.Tensor):
            raise RuntimeError(f"{self.title(index)} is gone: the module has {held!r} in its place")
        if held.shape != spec.shape:
            raise RuntimeError(
                f"{self.title(index)} has the shape {tuple(held.shape)} now, where "
                f"{tuple(spec.shape)} is due; give it whole, each rank takes its own part"
            )
        if isinstance(held, DTensor):
            given = compat.spec_of(held)
            if given.mesh != spec.mesh:
                return None
            if given.placements == spec.placements:
                return held
        with torch.inference_mode(False), torch.enable_grad():
            return placed(held, spec)


class Marks:
    """What users have put on a parameter: attributes and hooks, for the one that succeeds it."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.attributes, self.hooks = dict(vars(parameter)), compat.hooks_of(parameter)

    def put(self, parameter: torch.Tensor) -> None:
        """Put them on another one; the handles of hooks that users hold are then of that one."""
        vars(parameter).update(self.attributes)
        compat.set_hooks(parameter, self.hooks)


def successor(parameter: nn.Parameter, place: Callable[[torch.Tensor], DTensor]) -> nn.Parameter:
    """The parameter that takes another's place, with its gradient and all that users put on it."""
    new = nn.Parameter(place(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        new.grad = place(parameter.grad.detach())
    Marks(parameter).put(new)
    return new


def make(asked: Iterable[_Asked], site: Site) -> None:
    """Make the local tensors of parameters of several modules together.

    A parameter that is not on the mesh it was placed on at this moment (FSDP2 has not unsharded it
    yet) is left out; its module will ask again when it runs.
    """
    compiling = torch.compiler.is_compiling()
    installed: list[_Placed] = []
    passing: list[_Placed] = []
    for jobs in _with_mates(asked if compiling else _with_company(asked)):
        found = [own.placed(i, _held(module, own.names[i])) for module, own, i in jobs]
        parameters = [p for p in found if p is not None]
        if len(parameters) == len(jobs):
            keep = not compiling and all(is_installed(p) for p in parameters)
            (installed if keep else passing).append((jobs, parameters))
    made = list(_localized(installed, site, keep=True))
    group = tuple(job for job, _, local in made if local.requires_grad)
    for (_, own, index), origin, local in made:
        own._kept[index] = local
        own._groups[index] = group if local.requires_grad else ()
        source = (own.names[index], origin, compat.local_of(origin), origin.requires_grad)
        own._sources[index] = source
    for (module, own, index), _, local in _localized(passing, site, keep=False):
        held = module._parameters.get(own.names[index])
        # a new table: of one that was there before, torch.compile would return what was in it
        own._passing = {**own._passing, index: (held, _version(held), local)}


def _with_mates(asked: Iterable[_Asked]) -> list[tuple[_Asked, ...]]:
    """Each parameter with those of its module's mates, in the order of the ranks."""
    found: list[tuple[_Asked, ...]] = []
    met: set[tuple[Own, int]] = set()
    for module, own, index in asked:
        if (own, index) in met:
            continue
        found.append(tuple((mate, other, index) for mate, other in own.together(module)))
        if own.mates:
            met.update((other, i) for _, other, i in found[-1])
    return found


def _with_company(asked: Iterable[_Asked]) -> Iterable[_Asked]:
    """With the parameters whose local tensors were made together with theirs the last time.

    Not those for which local tensors stand in at this moment: their modules are running.
    """
    found = dict.fromkeys(asked)
    for jobs in _with_mates(tuple(found)):
        for _, own, index in jobs:
            for job in own.disband(index):
                module, other, i = job
                mates = other.together(module)
                if all(is_installed(m._parameters.get(o.names[i])) for m, o in mates):
                    found[job] = None
    return found


def _held(module: nn.Module, name: str) -> Any:
    """What a module has in a parameter's place, which it may compute.

    A parametrization meets whole parameters, of which it is right whatever it does.
    """
    held = module._parameters.get(name)
    if held is not None:
        return held
    if not parametrize.is_parametrized(module, name):
        return getattr(module, name, None)
    computed: Any = module.parametrizations[name]  # type: ignore[index, union-attr]
    whole = {}
    for inner, parameter in computed.named_parameters():
        if isinstance(parameter, DTensor):
            if any(kind.is_partial() for kind in parameter.placements):
                raise RuntimeError(
                    f"{type(module).__name__}.parametrizations.{name}.{inner} was made of a "
                    "sharded parameter and is a partial sum, which no optimizer can change"
                )
            whole[inner] = parameter.full_tensor()
    return torch.func.functional_call(computed, whole, ())


def _version(held: Any) -> int:
    """How often what a module holds was changed in place, where that can be asked."""
    return 0 if held is None or torch.compiler.is_compiling() else version_of(held)


def _localized(
    due: Sequence[_Placed], site: Site, keep: bool
) -> list[tuple[_Asked, DTensor, torch.Tensor]]:
    """With one autograd function for the parameters of each group of ranks, or for each."""
    frozen: list[_Placed] = []
    trained: dict[tuple[str, int], list[_Placed]] = {}
    for n, one in enumerate(due):
        own = one[0][0][1]
        key = own.group.name, n if own.apart else -1
        wanted = any(p.requires_grad for p in one[1])
        (trained.setdefault(key, []) if wanted else frozen).append(one)
    made: list[tuple[_Asked, DTensor, torch.Tensor]] = []
    # what is kept outlives this forward, which may be one without gradients
    with torch.inference_mode(False), torch.enable_grad():
        if frozen:
            jobs, parameters = _flat(frozen)
            made += zip(jobs, parameters, compat.shards_of(parameters), strict=True)
        for found in trained.values():
            jobs, parameters = _flat(found)
            summed = [own.summed[index] for _, own, index in jobs]
            divided = [bool(own.mates) for _, own, _ in jobs]
            means = [own.means for _, own, _ in jobs]
            of = jobs[0][1]
            locals_ = localize(
                parameters, summed, of.group, site, divided, means, deferring=not of.apart
            )
            if keep:
                compat.run_when_ready(locals_[0].grad_fn)
            made += zip(jobs, parameters, locals_, strict=True)
    return made


def _flat(found: Sequence[_Placed]) -> tuple[list[_Asked], list[DTensor]]:
    return [job for jobs, _ in found for job in jobs], [p for _, own in found for p in own]
