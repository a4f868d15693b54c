"""The two random sequences of a rank: one that all ranks of the group share, and one of its own.

What all ranks hold whole must be dropped out alike on all of them, what each holds a part of
independently: Shoeybi et al., "Megatron-LM" (2019), appendix B.2; under sequence parallelism the
residual stream is such a part as well (Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (2022), section 4.2.2). Megatron keeps a generator state for each of the
two beside torch's own. Here the shared sequence *is* torch's default generator, and each stretch of
a rank's own sequence is seeded from the position the shared one has reached: ``torch.manual_seed``
reproduces both, and activation checkpointing, which puts the default generator back where it was,
draws the same masks again.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from tpplan.compat import FakeTensor

_BITS = 2**64 - 1
SEQUENCES = ("torch", "torch, on the CPU", "Python", "numpy")
"""What a model's code may draw from, whatever device it is on: layers are dropped by any."""


def _never() -> bool:
    return False


def _always() -> bool:
    return True


_own: ContextVar[Callable[[], bool]] = ContextVar("own", default=_never)


def draws_own() -> bool:
    """Whether this thread draws from a rank's own sequence at present."""
    return _own.get()()


@contextlib.contextmanager
def answering(owns: Callable[[Callable[[], bool]], bool]) -> Iterator[None]:
    """Within it, ``draws_own`` is what ``owns`` says, which is given what said it before."""
    before = _own.get()
    told = _own.set(lambda: owns(before))
    try:
        yield
    finally:
        _own.reset(told)


class Randomness:
    """The random sequences of one rank, on the device its model runs on.

    Attributes:
        rank: in the tensor-parallel group.
        on_own: whether the default generator draws from the rank's own sequence at present.
        drawn: of ``SEQUENCES``, those that the model's code is known to draw from.
    """

    def __init__(self, rank: int, device_type: str) -> None:
        self.rank = rank
        self.on_own = False
        self.drawn: frozenset[str] = frozenset()
        self._device_type = device_type
        self._shared: Any = None  # where the shared sequence waits while on_own

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Within it, the default generator draws from this rank's own sequence.

        Outside, the ranks stay in step, whatever each drew inside: the shared sequence goes on a
        fixed step further.
        """
        generator = _default_generator(self._device_type)
        key = _advanced(generator)
        if key is None:
            yield
            return
        told = _own.set(_always)
        outer = self.on_own, self._shared
        here = _position(generator)
        if not self.on_own:
            self._shared = here
        self.on_own = True
        generator.manual_seed(mixed(key, self.rank))
        try:
            yield
        finally:
            # a stretch of the shared sequence inside may have moved it on
            _move(generator, here if outer[0] else self._shared)
            self.on_own = outer[0]
            if not outer[0]:
                self._shared = outer[1]
            _own.reset(told)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Within it, the default generator draws from the sequence that all ranks share."""
        if not self.on_own:
            yield
            return
        generator = _default_generator(self._device_type)
        here = _position(generator)
        _move(generator, self._shared)
        self.on_own = False
        told = _own.set(_never)
        try:
            yield
        finally:
            self._shared = _position(generator)
            _move(generator, here)
            self.on_own = True
            _own.reset(told)

    def stands(self) -> list[int]:
        """Numbers that tell where each of ``SEQUENCES`` stands, for comparing ranks."""
        position = _position(_default_generator(self._device_type))
        if isinstance(position, torch.Tensor):
            own = zlib.crc32(position.numpy().tobytes())
        else:
            own = mixed(*position) >> 1
        numpy = sys.modules.get("numpy")
        return [
            own,
            zlib.crc32(torch.get_rng_state().numpy().tobytes()),
            zlib.crc32(pickle.dumps(random.getstate())),
            zlib.crc32(pickle.dumps(numpy.random.get_state())) if numpy else 0,
        ]


def mixed(*numbers: int) -> int:
    """64 bits that look random, from some numbers (splitmix64: Steele, Lea and Flood 2014)."""
    bits = 0
    for number in numbers:
        bits = (bits ^ number) + 0x9E3779B97F4A7C15 & _BITS
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _BITS
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _BITS
        bits ^= bits >> 31
    return bits


# A position is a generator's state on the CPU, and (seed, offset) where it is counter-based
# (Philox): there neither reading nor setting it waits for the device.


def _default_generator(device_type: str) -> torch.Generator:
    if device_type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device_type)
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout under tensor parallelism cannot be captured in a CUDA graph: each replay "
            "would draw the masks of the capture; set p to 0 or leave training mode to capture"
        )
    return module.default_generators[module.current_device()]  # type: ignore[no-any-return]


def _advanced(generator: torch.Generator) -> int | None:
    """Move on by a fixed step; a number that depends on the position left. None on fake tensors."""
    if generator.device.type == "cpu":
        drawn = torch.randint(2**63 - 1, (), device="cpu")
        return None if isinstance(drawn, FakeTensor) else int(drawn)
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)  # a multiple of 4, as Philox has it
    return mixed(seed, offset)


def _position(generator: torch.Generator) -> Any:
    if generator.device.type == "cpu":
        return generator.get_state()
    return generator.initial_seed(), generator.get_offset()


def _move(generator: torch.Generator, position: Any) -> None:
    if isinstance(position, torch.Tensor):
        generator.set_state(position)
        return
    seed, offset = position
    generator.manual_seed(seed)  # and offset 0
    generator.set_offset(offset)
