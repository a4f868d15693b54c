"""What a run computes and allocates, step by step, seen from below autograd."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import (
    addmm_flop,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from tpplan.compat import (
    FakeTensor,
    Uncompiled,
    answers,
    local_of,
    memory_of,
    rehearsed_in,
    running_node,
    sequence_number,
)
from tpplan.roles.lowered import passive
from tpplan.simulate import flops as flops
from tpplan.simulate.recorder import KINDS, Recorder, tensors_in
from tpplan.simulate.steps import Collective, Matmul, Member, Step

_aten = torch.ops.aten
_device, _wait = torch.ops.prim.device.default, torch.ops._c10d_functional.wait_tensor.default
# what torch's own table leaves out
_FLOPS: Mapping[Any, tuple[int, Callable[..., int]]] = {
    _aten.addmm_: (3, addmm_flop),
    _aten._scaled_dot_product_flash_attention_for_cpu: (3, sdpa_flop_count),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (4, sdpa_backward_flop_count),
}
"""The formula, and of how many first arguments it takes the shapes."""


class _Open:
    """The step that is being recorded; see ``Step``."""

    def __init__(self, phase: str, module: str, element: Member | None) -> None:
        self.phase, self.module, self.element = phase, module, element
        self.matmuls: Counter[Matmul] = Counter()
        self.moved = self.ops = self.net = self.peak = self.gradients = 0
        self.later = False
        self.awaited: int | None = None

    def closed(self, collective: Collective | None) -> Step:
        told = {**vars(self), "matmuls": tuple(self.matmuls.items())}
        return Step(**told, collective=collective)


class _Aside:
    """A context, which may be entered again and again: whether it is active."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


class Tracker(Uncompiled, Recorder):
    """Records a run of one model: every op's FLOPs and bytes, every allocation, every collective.

    Memory is what storages hold: a storage counts from the op that made it until nothing refers
    to it any more. What was allocated before, the parameters for instance, does not count, nor
    what an op uses inside.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Mapping[str, nn.Module],
        dimensions: Mapping[str, str] | None = None,
        each: Collection[Any] = (),
    ) -> None:
        """Nothing has run so far.

        Args:
            stacks: lists of modules by path, whose elements the steps are told apart by.
            each: ops that are run each time, and are not what their like was.
        """
        super().__init__(dimensions)
        self._each = each
        self._aside, self._stack = _Aside(), contextlib.ExitStack()
        self._open = _Open("forward", "", None)
        self._closed: list[tuple[_Open, Collective | None]] = []
        # the steps that issued collectives, and which it was of those that none has waited for
        self._issues: list[_Open] = []
        self._sent: dict[int, int] = {}
        self._storages: dict[int, tuple[weakref.ref[Any], int, _Open]] = {}
        # where the modules' calls begin, by the numbers of their autograd nodes
        self._numbers: list[int] = []
        self._places: list[tuple[str, Member | None]] = []
        self._running: list[str] = []
        self._element: Member | None = None
        elements = {
            id(child): Member(path, index)
            for path, stack in stacks.items()
            for index, child in enumerate(stack.children())
        }
        for path, module in model.named_modules():
            self._watch(path, module, elements.get(id(module)))

    def __enter__(self) -> Tracker:
        self._stack.enter_context(rehearsed_in(self._aside))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    # --- where ops come from

    def _watch(self, path: str, module: nn.Module, element: Member | None) -> None:
        def enter(*_: Any) -> None:
            self._running.append(path)
            if element is not None:
                self._element = element
            self._mark()

        def leave(*_: Any) -> None:
            self._running.pop()
            self._mark()

        module.register_forward_pre_hook(passive(enter))
        module.register_forward_hook(passive(leave), always_call=True)

    def _mark(self) -> None:
        place = self._place()
        number = sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._places[-1] = place
            return
        self._numbers.append(number)
        self._places.append(place)

    def _place(self) -> tuple[str, Member | None]:
        """The module that runs; in backward that of the forward op whose gradient is computed."""
        if self.phase == "optimizer":
            return "", None
        module = self._running[-1] if self._running else ""
        node = running_node()
        if node is None:
            return module, self._element
        if node > sequence_number():  # gradients of parameters, which run as soon as they can
            found, element = "", self._open.element
        else:
            found, element = self._places[max(bisect.bisect_right(self._numbers, node) - 1, 0)]
        return (module if self._running else found), element  # running: it is recomputed

    # --- what they do

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device and type(args[0]) is FakeTensor:
            return args[0].fake_device  # most of all that is asked, and never work
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is _wait:
            self._wait(args[0])
            return args[0]  # its fake would be another tensor
        if self._aside.depth:
            return func(*args, **(kwargs or {}))
        self._enter_step()
        kwargs = kwargs or {}
        question = answers.asked(func, args, kwargs)
        if question is None or func in self._each:
            return self._run(func, types, args, kwargs)[0]
        answer = answers.remembered(question)
        if answer is not None:
            return self._again(answer, question)
        out, work = self._run(func, types, args, kwargs)
        answers.remember(question, out, work)
        return out

    def _again(self, answer: answers.Answer, question: answers.Question) -> Any:
        """An op whose like was run before."""
        out = answers.again(answer, question)
        made = [out] if answer.kind is FakeTensor else out or ()
        for how, tensor in zip(answer.made, made, strict=True):
            if isinstance(how, answers.Made) and how.base is None:
                self._note(tensor.untyped_storage())
        kind = KINDS.get(question.call[0]._schema.name)
        if kind is not None:
            self.collectives.append(self._collective(kind, *question.call, out))
            self._send(made)
        elif answer.told is not None:
            self._add(answer.told)
        return out

    def _run(
        self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Matmul | int | None]:
        """What an op makes; and its work, unless it only looks at what it is given or sends it."""
        before = len(self.collectives)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(out)
        theirs = set(map(memory_of, given))
        new = [t for t in made if memory_of(t) not in theirs]
        for tensor in new:
            self._note(tensor.untyped_storage())
        if len(self.collectives) > before:
            self._send(made)
        elif new or func._schema.is_mutable:
            work = _work_of(func, args, kwargs, out, [*given, *made])
            self._add(work)
            return out, work
        return out, None

    def _send(self, made: Sequence[torch.Tensor]) -> None:
        """Close the step with the collective that was recorded last, which makes these."""
        for tensor in made:
            self._sent[memory_of(tensor)] = len(self._issues)
        self._issues.append(self._open)
        self._close(self.collectives[-1])

    def _enter_step(self) -> None:
        module, element = self._place()
        step = self._open
        if (step.phase, step.module, step.element) != (self.phase, module, element):
            self._close(None)
            self._open = _Open(self.phase, module, element)

    def _close(self, collective: Collective | None) -> None:
        step = self._open
        ends = collective is not None or step.awaited is not None
        if step.ops or step.net or step.peak or ends:
            self._closed.append((step, collective))
        self._open = _Open(step.phase, step.module, step.element)

    def _wait(self, sent: torch.Tensor) -> None:
        """Note where a collective is waited for, if not at once."""
        number = self._sent.pop(memory_of(sent), None)
        if number is None or self._aside.depth:
            return
        since = len(self._issues) - 1 - number
        if since == 0 and not self._open.ops:
            return
        self._issues[number].later = True
        self._enter_step()
        self._open.awaited = since
        self._close(None)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size, step = storage._cdata, storage.nbytes(), self._open
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self._open.net -= size

        self._storages[key] = (weakref.ref(storage, freed), size, step)
        step.net += size
        step.peak = max(step.peak, step.net)

    def _add(self, work: Matmul | int) -> None:
        """An op to the open step."""
        step = self._open
        step.ops += 1
        if isinstance(work, int):
            step.moved += work
        else:
            step.matmuls[work] += 1

    # --- afterwards

    def gradients(self, model: nn.Module) -> None:
        """What of the allocated memory are gradients of ``model``; to be called after backward."""
        for parameter in model.parameters():
            if (grad := parameter.grad) is not None:
                local = local_of(grad) if isinstance(grad, DTensor) else grad
                key = memory_of(local)
                if key in self._storages:
                    _, size, step = self._storages[key]
                    step.gradients += size

    def steps(self) -> tuple[Step, ...]:
        """Everything recorded so far, in order."""
        self._close(None)
        return tuple(step.closed(collective) for step, collective in self._closed)


def _work_of(
    func: Any, args: Any, kwargs: Mapping[str, Any], out: Any, tensors: Sequence[torch.Tensor]
) -> Matmul | int:
    """The FLOPs of an op and the bytes it reads and writes; these alone where it has no FLOPs."""
    packet = func._overloadpacket
    if packet is _aten.copy_:  # does not read what it writes
        tensors = tensors[:2]
    size = sum(t.numel() * t.element_size() for t in tensors)
    formula = flop_registry.get(packet)
    if packet in _FLOPS:
        count, known = _FLOPS[packet]
        flops = known(*(t.shape for t in args[:count]))
    elif formula is not None:
        flops = formula(*args, **kwargs, out_val=out)
    else:
        return size
    return Matmul(int(flops), size, str(tensors[0].dtype).removeprefix("torch."))
