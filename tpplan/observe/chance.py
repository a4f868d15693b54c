"""What a process draws at random: kept, put back, and of several runs in turn each one's own."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tpplan.observe.channels import function_of
from tpplan.observe.outside import Namespace

DROPOUT = nn.modules.dropout._DropoutNd


class Chance(Namespace):
    """What a source of random numbers goes on with, under the one name "".

    A state that has not changed is one object whenever it is read.

    Args:
        get: gives the state of the source, which ``go_on`` takes.
        name: of one that the process has.
    """

    def __init__(self, get: Callable[[], Any], go_on: Callable[[Any], Any], name: str = "") -> None:
        super().__init__({"get": get, "go on": go_on})
        self.name = name

    def read(self) -> dict[str, Any]:
        """The state now."""
        state = self.owner["get"]()
        key = pickle.dumps(state)
        if key != self.owner.get("key"):
            self.owner.update(key=key, state=state)
        return {"": self.owner["state"]}

    def write(self, name: str, value: Any) -> None:
        """Go on with another state."""
        self.owner["go on"](value)


def chances() -> list[Chance]:
    """Those of the process: Python's, and numpy's where it is used."""
    found = [Chance(random.getstate, random.setstate, "Python")]
    if numpy := sys.modules.get("numpy"):
        found.append(Chance(numpy.random.get_state, numpy.random.set_state, "numpy"))
    return found


def chance_of(thing: Any) -> Chance | None:
    """That of a ``random.Random``, or of one of torch's or numpy's generators."""
    if isinstance(thing, random.SystemRandom):
        return None  # it has no state
    if isinstance(thing, random.Random):
        return Chance(thing.getstate, thing.setstate)
    if isinstance(thing, torch.Generator):
        return Chance(lambda: tuple(thing.get_state().tolist()), partial(_go_on, thing))
    if type(thing).__module__.partition(".")[0] != "numpy":
        return None
    numpy = sys.modules["numpy"]
    if isinstance(thing, numpy.random.RandomState):
        return Chance(thing.get_state, thing.set_state)
    if isinstance(thing, numpy.random.Generator):
        bits = thing.bit_generator
        return Chance(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def _go_on(generator: torch.Generator, state: Sequence[int]) -> None:
    generator.set_state(torch.tensor(state, dtype=torch.uint8))


@contextlib.contextmanager
def same_randomness(seed: int | None = None) -> Iterator[None]:
    """Give the process its random state back: what a model's code draws here is for nobody.

    Args:
        seed: what it starts from, to draw the same in another such block.
    """
    before = [(chance, chance.read()) for chance in chances()]
    try:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                if numpy := sys.modules.get("numpy"):
                    numpy.random.seed(seed)
            yield
    finally:
        for chance, kept in before:
            chance.write("", kept[""])


def dropouts(model: nn.Module) -> dict[str, Any]:
    """Modules that drop out; of those that drop whole channels out, the functions they call."""
    modules = model.named_modules()
    return {path: function_of(module) for path, module in modules if isinstance(module, DROPOUT)}
