"""Products whose weights' gradients are deferred, and which keep of their input what is asked."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpplan import compat
from tpplan.comm.collectives import Group, Site, start_all_gather, unviewed
from tpplan.comm.conjugates import Transition, copy_in, gather_in
from tpplan.comm.deferred import ACCOUNT, Account, Later, defer, weight_gradient
from tpplan.comm.stream import version_of

# from how many multiplications on a weight's gradient is deferred: the host needs about 15
# microseconds more for it, in which a core computes some millions of them
WORTH = 1 << 24
# on a gathered tensor: what it was gathered from, and what was multiplied while it came; on any:
# what it was computed of
_ROWS = "_tpplan_rows"
READY = "_tpplan_ready"
_MADE = "_tpplan_made"


@contextlib.contextmanager
def deferring(least: int) -> Iterator[None]:
    """Within it, gradients of products of so many multiplications are deferred, or more.

    In all threads; not while a model is trained.
    """
    global WORTH
    before, WORTH = WORTH, least
    try:
        yield
    finally:
        WORTH = before


class _Once:
    """What is made at most once in a backward pass, for all products that wait for it."""

    def __init__(self) -> None:
        self._task = -1
        self._current: weakref.ref[Later] | None = None

    def get(self, start: Callable[[], Callable[[], torch.Tensor]]) -> Later:
        """It, begun with ``start``, which gives what waits for it, where no product has."""
        task = compat.backward_pass()
        found = None if self._current is None or self._task != task else self._current()
        if found is None:
            found = Later(start())
            self._task, self._current = task, weakref.ref(found)
        return found


class Again(_Once):
    """How an input is gathered a second time, in backward."""

    def __init__(
        self, group: Group, site: Site, dim: int, length: int, dtype: torch.dtype | None
    ) -> None:
        """``dtype``: that was gathered, where it is not that of the rows."""
        super().__init__()
        self._group, self._site, self._dtype = group, site, dtype
        self._along = dim, length

    def start(self, rows_of: Callable[[], torch.Tensor]) -> Later:
        """Begin to gather the rows."""

        def begin() -> Callable[[], torch.Tensor]:
            rows = rows_of()
            rows = rows if self._dtype is None else rows.to(self._dtype)
            return start_all_gather(rows, *self._along, self._group, self._site).wait

        return self.get(begin)

    def differentiably(self, rows: torch.Tensor) -> torch.Tensor:
        """All of it, at once, for a backward that is itself differentiated."""
        transition = Transition(self._group, self._site, self._site)
        return gather_in(rows, *self._along, transition, self._dtype)


class Recipe(_Once):
    """How an input is computed a second time, in backward."""

    def __init__(self, how: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.how = how

    def start(self, of: Sequence[torch.Tensor | None]) -> Later:
        """Compute it of these, when it is asked for."""
        return self.get(lambda: lambda: self.how(*of))


class _Rows(NamedTuple):
    rows: torch.Tensor
    again: Again
    versions: tuple[int, int]


def keep_rows(whole: torch.Tensor, rows: torch.Tensor, again: Again) -> None:
    """Have products that are given ``whole`` keep the ``rows`` it was gathered from, not itself."""
    setattr(whole, _ROWS, _Rows(rows, again, (version_of(rows), version_of(whole))))


class Ready(NamedTuple):
    """A product that was made before it is asked for.

    ``when``: the versions of the input and the weight, and all that the product would hang on.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool
    made: torch.Tensor
    when: tuple[object, ...]

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        made: torch.Tensor,
    ) -> Ready:
        """The product of ``x``, which was ``made`` now."""
        return cls(weight, bias, transposed, made, cls.now(x, weight))

    @staticmethod
    def now(x: torch.Tensor, weight: torch.Tensor) -> tuple[object, ...]:
        """What ``when`` is at present.

        Code that is checkpointed by itself has hooks of its own on what is saved, and must do the
        same when it is recomputed, when nothing is ready.
        """
        autocast = torch.is_autocast_enabled(x.device.type)
        modes = torch.is_grad_enabled(), autocast, compat.saved_tensors_hooks()
        return version_of(x), version_of(weight), *modes

    def serves(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
    ) -> bool:
        """Whether this is what is asked for, but for a bias that is still to be added."""
        if self.weight is not weight or self.transposed is not transposed:
            return False
        return (self.bias is bias or self.bias is None) and self.when == self.now(x, weight)


class _Made(NamedTuple):
    recipe: Recipe
    of: tuple[torch.Tensor | None, ...]
    versions: tuple[int, ...]
    entry: Transition | None = None


def keep_origin(
    x: torch.Tensor, how: Callable[..., torch.Tensor], *of: torch.Tensor | None
) -> torch.Tensor:
    """``x``; products that are given it keep what it was computed ``of``, and compute it again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        setattr(x, _MADE, _Made(Recipe(how), of, _versions(x, of)))
    return x


def entered(x: torch.Tensor, transition: Transition) -> torch.Tensor:
    """``x``, whole, in a sharded region (f); with its origin."""
    copy = copy_in(x, transition)
    made = _origin_of(x)
    if made is not None:
        versions = _versions(copy, made.of)
        setattr(copy, _MADE, made._replace(versions=versions, entry=transition))
    return copy


def _versions(x: torch.Tensor, of: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if t is None else version_of(t) for t in (x, *of))


def _origin_of(x: torch.Tensor) -> _Made | None:
    """What ``x`` was computed of, where neither was changed since."""
    made: _Made | None = getattr(x, _MADE, None)
    return None if made is None or made.versions != _versions(x, made.of) else made


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    /,
    transposed: bool = False,
) -> torch.Tensor:
    """``x`` (..., in) times a weight (out, in), or ``transposed``: (in, out), and the bias.

    The gradient of the weight is deferred where it has an account and takes long enough.
    """
    if torch.compiler.is_compiling():  # which neither cuts nor keeps anything
        return F.linear(x, weight.t() if transposed else weight, bias)
    told = x.__dict__  # to ask a tensor for what it has not takes many times as long
    ready: list[Ready] | None = told.get(READY)
    if ready:
        asked = x, weight, bias, transposed
        found = next((i for i, r in enumerate(ready) if r.serves(*asked)), None)
        if found is not None:
            one = ready.pop(found)
            return one.made if bias is None or one.bias is bias else one.made + bias
    if torch.is_grad_enabled():
        account = weight.__dict__.get(ACCOUNT)
        if account is not None and x.dim() > 1:
            large = x.numel() * weight.size(-1 if transposed else 0) >= WORTH
            if large or _ROWS in told or _MADE in told:
                own, rows, made = _kept(x)
                device = x.device.type
                if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
                    x = x.to(torch.get_autocast_dtype(device))
                    own = x if rows is None and made is None else own
                again = None if rows is None else rows.again
                kept: tuple[Any, ...] = (None, (own,), None)
                if made is not None:
                    kept = (made.recipe, made.of, made.entry)
                return _Product.apply(x, weight, bias, transposed, account, again, *kept)  # type: ignore[no-any-return]
    return F.linear(x, weight.t() if transposed else weight, bias)


def _kept(x: torch.Tensor) -> tuple[torch.Tensor, _Rows | None, _Made | None]:
    """What backward needs of ``x``: it or its rows; these rows; what either was computed of."""
    rows: _Rows | None = getattr(x, _ROWS, None)
    if rows is not None and rows.versions != (version_of(rows.rows), version_of(x)):
        rows = None
    kept = x if rows is None else rows.rows
    return kept, rows, _origin_of(kept)


def origin(x: torch.Tensor) -> tuple[Recipe | None, tuple[torch.Tensor | None, ...]]:
    """What backward needs of a product's input: it, or how it is computed and of what."""
    made = _origin_of(x)
    return (None, (x,)) if made is None or made.entry is not None else (made.recipe, made.of)


class _Product(compat.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        account: tuple[Account, int],
        again: Again | None,
        recipe: Recipe | None,
        of: tuple[torch.Tensor | None, ...],
        entry: Transition | None,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, *of)
        ctx.transposed, ctx.account, ctx.again = transposed, account, again
        ctx.recipe, ctx.entry = recipe, entry
        ctx.whole = x.is_contiguous()
        flat = x if ctx.whole else x.reshape(-1, x.size(-1))
        ctx.columns = not ctx.whole and flat.stride() == (1, flat.size(0))
        return unviewed(F.linear(x, weight.t() if transposed else weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 9
        weight, *of = ctx.saved_tensors
        x = None if compat.differentiates_backward() else given(of, ctx.again, ctx.recipe)
        for_x = for_weight = for_bias = None
        flat = grad.reshape(-1, grad.size(-1))
        # in the order in which autograd adds up, which hangs on how the input lies in memory
        if ctx.needs_input_grad[0]:
            # autocast, which is over, made the product of another dtype than the weight's
            matrix = (weight.t() if ctx.transposed else weight).to(grad.dtype)
            by_rows = (matrix.t() @ flat.t()).t() if ctx.columns else flat @ matrix
            for_x = by_rows.view(*grad.shape[:-1], by_rows.size(-1))
        if ctx.needs_input_grad[2]:
            for_bias = flat.sum(0) if ctx.whole else grad.sum([*range(grad.dim() - 1)])
        if x is None:
            whole = differentiable(of, ctx.again, ctx.recipe, ctx.entry)
            for_weight = weight_gradient(grad, whole, ctx.transposed)
        else:
            account, index = ctx.account
            defer(account, index, (flat, x, ctx.transposed, weight))
        return for_x, for_weight, for_bias, None, None, None, None, None, None


def given(
    of: Sequence[torch.Tensor], again: Again | None, recipe: Recipe | None
) -> torch.Tensor | Later:
    """The product's input, or what makes it; a second gather begins before anything is computed."""
    if again is not None:
        return again.start(lambda: of[0] if recipe is None else recipe.how(*of))
    return of[0] if recipe is None else recipe.start(of)


def differentiable(
    of: Sequence[torch.Tensor],
    again: Again | None,
    recipe: Recipe | None,
    entry: Transition | None = None,
) -> torch.Tensor:
    """The product's input, as a function of what was saved of it."""
    x: torch.Tensor = of[0] if recipe is None else recipe.how(*of)
    x = x if entry is None else copy_in(x, entry)
    return x if again is None else again.differentiably(x)
