"""Weight gradients that are computed while a collective is under way.

A product's backward gives the gradient of its input at once, which others wait for; that of its
weight only the optimizer waits for. It is *deferred*: noted with what it is to be computed of, and
computed at the next collective, between its start and its wait (Narayanan et al. 2021, "Efficient
large-scale language model training on GPU clusters using Megatron-LM", overlap the input
gradient's all-reduce so); at the latest where the gradients of parameters are handed to autograd,
in the function that made the local tensors (``gradients.localize``). Autograd runs that one
after every product that took its tensors, so that no gradient is ever left behind.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tpplan import compat

# on a local tensor: the account of what made it, and its number there
ACCOUNT = "_tpplan_account"
# backward passes of which it is known what waits: one that failed leaves its own behind
_PASSES = 8


class Later:
    """An input of products that is made, or gathered, again for their weights' gradients."""

    __slots__ = ("__weakref__", "_how", "_whole")

    def __init__(self, how: Callable[[], torch.Tensor]) -> None:
        self._how: Callable[[], torch.Tensor] | None = how
        self._whole: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """All of it, once it has arrived."""
        if self._how is not None:
            self._whole, self._how = self._how(), None
        assert self._whole is not None
        return self._whole


# a product's gradient, its input, and whether its weight is (in, out); the weight
Of = tuple[torch.Tensor, torch.Tensor | Later, bool, torch.Tensor]


class Deferred:
    """The gradient of one weight that is still to be computed.

    Attributes:
        owner: its account; index: of the weight there.
        work: multiplications.
    """

    __slots__ = ("__weakref__", "_of", "_value", "index", "owner", "work")

    def __init__(self, owner: Account, index: int, of: Of) -> None:
        grad, _, _, weight = of
        self.owner, self.index = owner, index
        self.work = grad.numel() // grad.size(-1) * weight.numel()
        self._of: Of | None = of
        self._value: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        """The gradient, of the weight's shape and dtype; what it is made of is let go."""
        if self._of is not None:
            grad, x, transposed, weight = self._of
            x = x if isinstance(x, torch.Tensor) else x.whole()
            self._value = weight_gradient(grad, x, transposed).to(weight.dtype)
            self._of = None
        assert self._value is not None
        return self._value


class Account:
    """Stands for the tensors that one autograd function made, some gradients of which are due."""

    __slots__ = ()

    def settle(self, grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """``grads``, of all the tensors, with what was deferred in this backward pass."""
        running = _passes.get(compat.backward_pass())
        due = () if running is None else running.due.pop(self, ())
        if not due:
            return grads
        complete = list(grads)
        for one in due:
            value, other = one.compute(), complete[one.index]
            complete[one.index] = value if other is None else other + value
        return complete


class _Pass:
    """What one backward pass owes, by account; reentrant checkpointing has one inside another.

    ``total``: the multiplications of what an account had deferred since nothing of it waited.

    Autograd alone holds on to it, so that it goes with the pass, however that ends: passes fail,
    and are asked for some gradients only.
    """

    __slots__ = ("__weakref__", "due", "total")

    def __init__(self) -> None:
        self.due: dict[Account, list[Deferred]] = {}
        self.total: Counter[Account] = Counter()

    def over(self) -> None:
        """Called by autograd."""


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


class _Waiting(threading.local):
    """What waits for a collective, by backward pass, which holds on to it."""

    def __init__(self) -> None:
        self.passes: dict[int, list[weakref.ref[Deferred]]] = {}


_waiting = _Waiting()


def work(collectives: int) -> None:
    """Compute of what is deferred in the backward pass that runs what came first.

    That is, of all that the newest account has had since nothing of it waited, the part of one of
    an element's ``collectives``: its weights are in one account, and those that come last are left
    to the element before it. (Weights outside of its regions, whole on each rank, are in one for
    all elements, each of which must do as the others do.) And all of other accounts, which have
    nothing else to come.
    """
    if torch.compiler.is_compiling():
        return  # where nothing is deferred: its graph is scheduled as a whole
    task = compat.backward_pass()
    waiting, running = _waiting.passes.get(task), _passes.get(task)
    if not waiting or running is None:
        return
    due = [one for one in (found() for found in waiting) if one is not None]
    if not due:
        waiting.clear()
        return
    newest = due[-1].owner
    left, done = running.total[newest] / collectives, 0
    while done < len(due) and (due[done].owner is not newest or left > 0):
        left -= due[done].work if due[done].owner is newest else 0
        due[done].compute()
        done += 1
    still = {newest: running.total[newest]} if done < len(due) else {}
    running.total = Counter(still)
    waiting[:] = [weakref.ref(one) for one in due[done:]]


def defer(account: Account, index: int, of: Of) -> None:
    """Leave the gradient of the weight of that ``index`` to the next collective."""
    task, passes = compat.backward_pass(), _waiting.passes
    one = Deferred(account, index, of)
    running = _passes.get(task)
    if running is None:
        running = _passes[task] = _Pass()
        compat.at_end_of_backward(running.over)
    running.due.setdefault(account, []).append(one)
    running.total[account] += one.work
    if task not in passes:
        while len(passes) >= _PASSES:  # of which nothing but the overlap is lost
            del passes[next(iter(passes))]
        passes[task] = []
    passes[task].append(weakref.ref(one))


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Of a weight (out, in), or ``transposed``, that ``x`` (..., in) was multiplied by.

    ``grad``: of the product, (..., out).
    """
    grad, x = grad.reshape(-1, grad.size(-1)), x.reshape(-1, x.size(-1))
    x = x.to(grad.dtype)  # autocast, which is over, may have cast what is made again
    return x.t() @ grad if transposed else grad.t() @ x
