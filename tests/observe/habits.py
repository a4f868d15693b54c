"""Habits of models' code: what it keeps in its Python module, its classes and its functions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

WIDTH, INNER, WORDS = 8, 16, 12

Habit = Callable[["Layer", torch.Tensor], torch.Tensor]
TABLES: dict[int, torch.Tensor] = {}
AUX: list[torch.Tensor] = []
NESTED: dict[str, list[torch.Tensor]] = {"losses": []}
LATEST: deque[torch.Tensor] = deque(maxlen=2)
GROUPED: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
BUILT: torch.Tensor | None = None
READY = False
STEPS = 0
CALLS: dict[str, int] = {"calls": 0}


def table_of(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.0, 1.0, x.shape[1] * WIDTH, dtype=x.dtype).view(x.shape[1], WIDTH)


class Tables:
    """An object of the user's own class."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.made:
            self.made[x.shape[1]] = self.last = table_of(x)
        return self.made[x.shape[1]]


OBJECT = Tables()


def in_a_global_dict(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] not in TABLES:
        TABLES[x.shape[1]] = table_of(x)
    return x + TABLES[x.shape[1]]


def in_a_global_list(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    AUX.append(x.pow(2).mean())
    return x


def in_nested_containers(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    NESTED["losses"].append(x.pow(2).mean())
    GROUPED[x.shape[1]].append(x.mean())
    LATEST.append(x)
    return x


def in_a_global_name(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    global BUILT, READY, STEPS
    STEPS += 1
    CALLS["calls"] += 1
    if not READY or BUILT is None or len(BUILT) != x.shape[1]:
        BUILT, READY = table_of(x), True
    return x + BUILT


def in_the_class(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] not in Layer.tables:
        Layer.tables[x.shape[1]] = table_of(x)
        Layer.last = Layer.tables[x.shape[1]]
    return x + Layer.tables[x.shape[1]]


def in_a_default(
    layer: Layer,
    x: torch.Tensor,
    made: dict[int, torch.Tensor] = {},  # noqa: B006
) -> torch.Tensor:
    if x.shape[1] not in made:
        made[x.shape[1]] = table_of(x)
    return x + made[x.shape[1]]


def _closure() -> Habit:
    made: dict[int, torch.Tensor] = {}
    last: torch.Tensor | None = None

    def in_a_closure(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        if x.shape[1] not in made:
            made[x.shape[1]] = last = table_of(x)
        return x + made[x.shape[1]]

    return in_a_closure


in_a_closure = _closure()


def in_the_function(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    kept: Any = in_the_function
    if getattr(kept, "table", None) is None or len(kept.table) != x.shape[1]:
        kept.table = table_of(x)
    return x + kept.table


def in_an_object(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + OBJECT.of(x)


HABITS: tuple[Habit, ...] = (
    in_a_global_dict,
    in_a_global_list,
    in_nested_containers,
    in_a_global_name,
    in_the_class,
    in_a_default,
    in_a_closure,
    in_the_function,
    in_an_object,
)


class Layer(nn.Module):
    tables: ClassVar[dict[int, torch.Tensor]] = {}
    last: ClassVar[torch.Tensor | None] = None

    def __init__(self, habit: int) -> None:
        super().__init__()
        self.habit = habit
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = HABITS[self.habit](self, x)
        return x + self.out(self.fc(x).relu())


class Model(nn.Module):
    def __init__(self, habit: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(habit) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


RULES = {
    "embed": "vocab",
    "layers.*.fc": "colwise",
    "layers.*.out": "rowwise",
    "head": "vocab",
}
PLAN = {"tpplan": 1, "sequence_parallel": False, "rules": RULES}
WRONG = {**PLAN, "rules": {**RULES, "layers.*.out": "colwise"}}


def kept() -> list[Any]:
    """All that the habits may have kept: the containers, and what is in them."""
    function: Any = in_the_function
    cells = [cell.cell_contents for cell in in_a_closure.__closure__ or ()]  # type: ignore[attr-defined]
    made = in_a_default.__defaults__ or ()
    things = [TABLES, AUX, NESTED, NESTED["losses"], LATEST, GROUPED, BUILT, READY, STEPS, CALLS]
    things += [Layer.tables, Layer.last, vars(function).get("table"), OBJECT.made, OBJECT.last]
    things += [*cells, *made]
    return [(id(thing), _contents(thing)) for thing in things]


def _contents(thing: Any) -> Any:
    if isinstance(thing, dict):
        return [(key, id(value)) for key, value in thing.items()]
    return [id(x) for x in thing] if isinstance(thing, list | deque) else thing


def forget() -> None:
    """A process in which no model has run."""
    global BUILT, READY, STEPS
    BUILT, READY, STEPS = None, False, 0
    CALLS["calls"] = 0
    NESTED["losses"] = []
    Layer.last = OBJECT.last = None
    vars(in_the_function).clear()
    containers = [TABLES, AUX, LATEST, GROUPED, Layer.tables, OBJECT.made]
    containers += in_a_default.__defaults__ or ()
    for cell in in_a_closure.__closure__ or ():  # type: ignore[attr-defined]
        if isinstance(cell.cell_contents, dict):
            containers.append(cell.cell_contents)
        else:
            cell.cell_contents = None
    for container in containers:
        container.clear()  # type: ignore[attr-defined]
