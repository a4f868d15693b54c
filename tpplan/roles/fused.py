"""Modules for which a fused kernel stands, in a sharded model and in a whole one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpplan import compat
from tpplan.comm.products import keep_origin
from tpplan.compiled import KernelChoice
from tpplan.kernels.forms import GatedForm, GeluForm, NormForm, UnbiasedForm
from tpplan.kernels.gated import gated, gated_packed
from tpplan.kernels.gelu import gelu
from tpplan.kernels.norm import norm
from tpplan.roles.lowered import State, looks
from tpplan.roles.projection import Projection


@dataclass
class Swapped:
    """What a module of a model that is not sharded knows.

    Attributes:
        kernel: that stands for it; None where it only contains such modules.
        partner: what else the kernel needs, see ``partner_of``.
        running: how often the module is being called at present.
    """

    kernel: KernelChoice | None
    partner: Any = None
    running: int = 0

    @property
    def transposed(self) -> bool:
        """Whether the module's weight is stored (in, out)."""
        form = None if self.kernel is None else self.kernel.form
        return isinstance(form, UnbiasedForm) and form.transposed


@dataclass
class Link:
    """From a layer without its bias to the activation that adds it.

    Attributes:
        above: the module that contains both; None in a copy of the layer alone.
        names: of the modules from there down to the activation.
        fused: whether the layer left its bias out when it ran last; due: and nothing added it yet.
    """

    above: nn.Module | None
    names: tuple[str, ...]
    fused: bool = False
    due: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return Link(memo.get(id(self.above)), self.names)

    def holds(self, layer: nn.Module) -> bool:
        """Whether the activation stands where it stood, and nobody looks at what lies between."""
        module = self.above
        for name in self.names:
            module = None if module is None else module._modules.get(name)
        if not isinstance(module, FusedGelu) or module._tpplan.partner is not layer:
            return False
        return not (_is_hooked(layer) or _is_hooked(module))


@dataclass
class Activation:
    """What the activation of a gated MLP was when its kernel was proved: modules and functions."""

    held: dict[str, Any] = field(default_factory=dict)

    def hold(self, module: nn.Module) -> bool:
        """Whether all of it is still there, and nobody looks at what it is given."""
        for name, part in self.held.items():
            if isinstance(part, nn.Module):
                if module._modules.get(name) is not part or _is_hooked(part):
                    return False
            elif vars(module).get(name) is not part:
                return False
        return True


def _is_hooked(module: nn.Module) -> bool:
    """Whether hooks see what goes into ``module``, or its gradients."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return looks(module._forward_hooks) or looks(module._forward_pre_hooks)


class Fused(nn.Module):
    """Base of the classes that modules with a fused kernel take on."""

    _tpplan: State | Swapped
    _tpplan_project: Projection

    @property
    def _form(self) -> Any:
        state = self._tpplan
        choice = state.kernel if isinstance(state, Swapped) else state.plan.kernel
        assert choice is not None
        return choice.form

    @classmethod
    def _tpplan_partner(cls, path: str, module: nn.Module, form: Any, model: nn.Module) -> Any:
        """What the kernel of the module at ``path`` needs to know of other modules."""
        return None


ROLES: dict[type, type[Fused]] = {}
"""The class that a module takes on, by the form of its kernel."""


def stands_for(form: type) -> Callable[[type[Fused]], type[Fused]]:
    """A class as the role of the modules whose kernel has such a form."""

    def register(role: type[Fused]) -> type[Fused]:
        ROLES[form] = role
        return role

    return register


def _own(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """The parameters of a module with a fused kernel, as local tensors."""
    state = module._tpplan
    if isinstance(state, State):
        return dict(zip(state.own.names, state.own.read(module), strict=True))
    return module._parameters


def _again(module: Fused) -> bool:
    """Whether what the module makes is made again in backward, and not kept for products."""
    state = module._tpplan
    return isinstance(state, State) and type(module._form) in state.stream.recomputed


@stands_for(NormForm)
class FusedNorm(Fused):
    """LayerNorm or RMSNorm of local rows by the kernel that was proved to equal the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, which runs where it is given more, in float64, and under autocast.

        The module may compute in float32 whatever it is given; PyTorch's autocast wants it to.
        """
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        x: torch.Tensor = args[0]
        state = self._tpplan
        alone = isinstance(state, State) and state.stream.shared is None and state.alone
        if alone or x.dtype == torch.float64 or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        form: NormForm = self._form
        own = _own(self)
        weight, bias = (None if name is None else own[name] for name in form.names)
        how = functools.partial(
            norm, eps=form.eps, centred=form.centred, offset=form.offset, early=form.early
        )
        out: torch.Tensor = how(x, weight, bias)
        return keep_origin(out, how, x, weight, bias) if _again(self) else out


class Around(Fused):
    """Contains, in a model that is not sharded, a layer and the activation that adds its bias."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        state = self._tpplan
        assert isinstance(state, Swapped)
        state.running += 1
        try:
            return super().forward(*args, **kwargs)
        finally:
            state.running -= 1


@stands_for(UnbiasedForm)
class Unbiased(Fused):
    """A column-parallel layer without its bias, which the activation after it adds.

    It adds it itself where the user calls it, where hooks see its output, and where another
    activation has been put in the place of that one.
    """

    _tpplan_adds_bias = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The columns of ``input``, biases left out."""
        link: Link = self._tpplan.partner
        link.fused = link.due = self._tpplan_is_run() and link.holds(self)
        if not link.fused:
            return super().forward(input)  # type: ignore[no-any-return, misc]
        weight = _own(self)["weight"]
        assert weight is not None
        return self._tpplan_project(input, weight)

    @classmethod
    def _tpplan_partner(cls, path: str, module: nn.Module, form: Any, model: nn.Module) -> Link:
        """The way to the activation."""
        above = common(path, form.activation)
        names = form.activation.removeprefix(above).lstrip(".").split(".")
        return Link(model.get_submodule(above), tuple(names))

    def _tpplan_is_run(self) -> bool:
        """Whether the module that contains the activation as well calls the layer."""
        state = self._tpplan
        if isinstance(state, State):
            return state.stream.shared is not None or not state.alone
        link: Link = state.partner
        if link.above is None:
            return False
        around: Swapped = link.above._tpplan  # type: ignore[assignment]
        return around.running > 0 or (link.fused and compat.in_backward())


@stands_for(GeluForm)
class FusedGelu(Fused):
    """GeLU of what the layer before it made without its bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """GeLU of ``x`` and the other layer's bias, where that layer left it out."""
        form: GeluForm = self._form
        partner = self._tpplan.partner
        link: Link = partner._tpplan.partner
        due, link.due = link.due, None
        if due is None and compat.in_backward():
            due = link.fused  # activation checkpointing of the activation alone
        if not due:
            return super().forward(x)  # type: ignore[no-any-return, misc]
        bias, how = _own(partner)["bias"], functools.partial(gelu, tanh=form.tanh)
        out: torch.Tensor = how(x, bias)
        return keep_origin(out, how, x, bias) if _again(self) else out

    @classmethod
    def _tpplan_partner(cls, path: str, module: nn.Module, form: Any, model: nn.Module) -> Any:
        """The layer whose bias it adds."""
        return model.get_submodule(form.linear)


@stands_for(GatedForm)
class FusedGated(Fused):
    """A gated MLP whose activation and product are one kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, which runs where it is called with more than the stream."""
        if len(args) != 1 or kwargs or not self._tpplan.partner.hold(self):
            return super().forward(*args, **kwargs)
        form: GatedForm = self._form
        first = self._modules[form.gate](*args)  # type: ignore[misc]
        how: Callable[..., torch.Tensor]
        given: tuple[torch.Tensor, ...]
        if form.up is None:
            how = functools.partial(gated_packed, kind=form.activation, gate_first=form.gate_first)
            given = (first,)
        else:
            how = functools.partial(gated, kind=form.activation)
            given = (first, self._modules[form.up](*args))  # type: ignore[misc]
        product = how(*given)
        if _again(self):
            product = keep_origin(product, how, *given)
        return self._modules[form.down](product)  # type: ignore[misc]

    @classmethod
    def _tpplan_partner(
        cls, path: str, module: nn.Module, form: Any, model: nn.Module
    ) -> Activation:
        """The activation that the kernel stands for."""
        called = {form.gate, form.up, form.down}
        own = {n: f for n, f in vars(module).items() if callable(f) and not n.startswith("_")}
        return Activation({**own, **{n: m for n, m in module._modules.items() if n not in called}})


def partner_of(path: str, module: nn.Module, choice: KernelChoice | None, model: nn.Module) -> Any:
    """What the kernel of the module at ``path``, if any, needs to know of other modules."""
    form = None if choice is None else choice.form
    return None if form is None else ROLES[type(form)]._tpplan_partner(path, module, form, model)


def common(path: str, other: str) -> str:
    """The path of the innermost module that contains both."""
    shared: list[str] = []
    for a, b in zip(path.split(".")[:-1], other.split(".")[:-1], strict=False):
        if a != b:
            break
        shared.append(a)
    return ".".join(shared)
