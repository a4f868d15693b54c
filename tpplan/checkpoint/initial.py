"""The values a new model is built with, made again one tensor at a time.

The model is built on fake tensors, and what is done to them is written down; only random numbers
are really drawn, and dropped. The values of a tensor are made by doing again what was done to it,
from the random state in which it was done.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.checkpoint.load import materialize
from tpplan.checkpoint.parts import chunks_of
from tpplan.compat import FakeTensorMode, NeedsValuesError, is_fake, memory_of, without_fakes

_aten = torch.ops.aten
_OVER = (_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_)
"""What leaves nothing of the numbers that were there."""


@dataclass(frozen=True)
class _Fake:
    """A fake tensor as it was when it was used: its memory may be another one later.

    Attributes:
        key: the same for all that are on its ``memory``, which is kept that it stays so.
    """

    key: int
    memory: torch.UntypedStorage
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_all(self) -> bool:
        """Whether nothing else is on its memory."""
        return self.shape.numel() * self.dtype.itemsize == self.memory.nbytes()

    def blank(self) -> torch.Tensor:
        """A real one of the same layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class _Op:
    """What was done.

    Attributes:
        args, kwargs, out: what it was given and what it made, fakes as ``_Fake``.
        reads, makes, changes: the memory that it was given, that it made, and whose numbers it
            changed.
        state: of the generator that it drew from.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    reads: frozenset[int]
    makes: frozenset[int]
    changes: frozenset[int]
    state: torch.Tensor | None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of what was in the memory that it changes."""
        if self.func.overloadpacket not in _OVER:
            return False
        return isinstance(self.args[0], _Fake) and self.args[0].is_all


class _Record(TorchDispatchMode):
    """Writes down what is done; to be entered within a fake mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self._scratch = torch.UntypedStorage(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = tree_map_only(torch.Tensor, _told, [args, kwargs])
        changed = _changed(func, *given)
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _generator(kwargs).get_state()
            with without_fakes():  # as many numbers as are drawn from now on
                one = sum(isinstance(leaf, _Fake) for leaf in tree_leaves(given)) == 1
                make = self.on_scratch if one else _Fake.blank
                blank = tree_map_only(_Fake, lambda fake: make(fake).fill_(1), given)
                func(*blank[0], **blank[1])
        try:
            out = func(*args, **kwargs)
        except NeedsValuesError:
            with self.undisturbed(), without_fakes():
                real = tree_map_only(_Fake, self.again, given)
                number = func(*real[0], **real[1])
            if isinstance(number, torch.Tensor):  # of a shape that hangs on values
                raise
            return number
        made = tree_map_only(torch.Tensor, _told, out)
        reads = _keys(given)
        makes, changes = _keys(made) - reads, _keys(changed)
        if makes or changes:
            self.ops.append(_Op(func, given[0], given[1], made, reads, makes, changes, state))
        return out

    def on_scratch(self, fake: _Fake) -> torch.Tensor:
        """A real one of the same layout; on the same memory as the last one.

        Allocators keep what is freed between small objects: several times the largest, as it is.
        """
        if self._scratch.nbytes() < fake.memory.nbytes():
            self._scratch = torch.UntypedStorage(fake.memory.nbytes())
        blank = torch.empty(0, dtype=fake.dtype)
        return blank.set_(self._scratch, fake.offset, fake.shape, fake.stride)

    def forget_scratch(self) -> None:
        """Give its memory back."""
        self._scratch = torch.UntypedStorage(0)

    def again(self, fake: _Fake, passing: bool = False) -> torch.Tensor:
        """The numbers of a tensor that was made in the meantime.

        Args:
            passing: whether they are needed until the next are made only.
        """
        made: dict[int, torch.UntypedStorage] = {}

        def real(of: _Fake) -> torch.Tensor:
            return torch.empty(0, dtype=of.dtype).set_(made[of.key], of.offset, of.shape, of.stride)

        with torch.no_grad(), without_fakes():
            for op in self._behind(fake.key):
                args, kwargs = tree_map_only(_Fake, real, [op.args, op.kwargs])
                if op.state is not None:
                    _generator(kwargs).set_state(op.state)
                if passing and op.func is _aten.empty.memory_format and fake.key in op.makes:
                    out = self.on_scratch(op.out)
                else:
                    out = op.func(*args, **kwargs)
                tensors = (t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor))
                theirs = set(map(memory_of, tensors))
                for told, own in zip(tree_leaves(op.out), tree_leaves(out), strict=True):
                    if isinstance(told, _Fake) and told.key in op.makes - made.keys():
                        if memory_of(own) in theirs or own.stride() != told.stride:
                            own = told.blank().copy_(own)
                        made[told.key] = own.untyped_storage()
            return real(fake)

    def _behind(self, key: int) -> list[_Op]:
        """What the numbers in some memory come from, in order."""
        wanted, settled, found = {key}, set[int](), list[_Op]()
        for op in reversed(self.ops):
            if not op.makes & wanted and not op.changes & (wanted - settled):
                continue
            found.append(op)
            wanted |= op.reads
            settled -= op.reads
            if op.is_over:
                settled |= op.changes
        return found[::-1]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Give the generators that were drawn from their state back."""
        drawn = {_generator(op.kwargs) for op in self.ops if op.state is not None}
        states = {generator: generator.get_state() for generator in drawn}
        try:
            yield
        finally:
            for generator, state in states.items():
                generator.set_state(state)


class Initial:
    """A model on the meta device, and the values that it would have been built with.

    Attributes:
        model: to be parallelized, and then to be filled.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        """Build it; random generators are then as ``make`` leaves them.

        Raises:
            Exception: whatever its code raises on tensors without numbers.
        """
        self._record = _Record()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), mode, self._record:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            plain = vars(torch.empty(1)).keys()
            self.model = make()
        self._record.forget_scratch()
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        tensors = {id(t): t for t in named.values()}
        if not all(map(is_fake, tensors.values())):
            raise ValueError("it holds tensors that torch's functions did not make")
        if any(t.device.type != "cpu" for t in tensors.values()):
            raise ValueError("it is not built on the CPU")
        if len(set(map(memory_of, tensors.values()))) < len(tensors):
            raise ValueError("it holds two tensors on the same memory")
        self._fakes = {name: _told(tensor) for name, tensor in named.items()}
        self._replace({key: _on_meta(t, plain) for key, t in tensors.items()})

    def _replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Other tensors in the place of fakes; of those without other ones, the values."""
        for module in self.model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for table in tables:
                for name, value in table.items():
                    if is_fake(value):
                        other = others.get(id(value))
                        with self._record.undisturbed():
                            new = self._record.again(_told(value)) if other is None else other
                        table[name] = new
            if any(map(is_fake, tree_leaves(vars(module)))):
                raise ValueError(f"a {type(module).__name__} holds tensors in a list or a mapping")

    @torch.no_grad()
    def fill(self) -> None:
        """Give the model memory, and each rank its part of the values."""
        materialize(self.model)
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with self._record.undisturbed():
            for name, fake in self._fakes.items():
                whole = self._record.again(fake, passing=True).detach()
                for offsets, local in chunks_of(held[name]):
                    part = whole
                    for dim, start in enumerate(offsets):
                        part = part.narrow(dim, start, local.shape[dim])
                    local.copy_(part)
            self._record.forget_scratch()


def _generator(kwargs: Mapping[str, Any]) -> torch.Generator:
    given: torch.Generator | None = kwargs.get("generator")
    return torch.default_generator if given is None else given


def _told(tensor: torch.Tensor) -> Any:
    """What is kept of a tensor: of a real one, itself."""
    if not is_fake(tensor):
        return tensor
    memory = memory_of(tensor), tensor.untyped_storage(), int(tensor.storage_offset())
    return _Fake(*memory, tensor.shape, tensor.stride(), tensor.dtype)


def _keys(values: Any) -> frozenset[int]:
    return frozenset(leaf.key for leaf in tree_leaves(values) if isinstance(leaf, _Fake))


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes to."""
    arguments = func._schema.arguments
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    return [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]


def _on_meta(tensor: torch.Tensor, plain: Any) -> torch.Tensor:
    """One of the same layout without numbers, with what was put on this one."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    vars(new).update((n, v) for n, v in vars(tensor).items() if n not in plain and n != "_is_param")
    return new
