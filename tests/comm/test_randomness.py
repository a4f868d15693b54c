"""The two random sequences of a rank, on the CPU's generator and on one that counts as a GPU's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from tpplan.comm import Randomness, randomness
from tpplan.comm.randomness import SEQUENCES, mixed
from tpplan.compat import FakeTensorMode

DRAWS = 4


class Philox:
    """A counter-based generator, as that of a CUDA device: a seed and an offset."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.seed, self.offset = 0, 0

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**64
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def draw(self) -> int:
        self.offset += 4
        return mixed(self.seed, self.offset)


class Draw:
    """Seeds the default generator and draws from it, whichever it is."""

    def __init__(self, seed: Callable[[int], Any], number: Callable[[], int]) -> None:
        self.seed, self.number = seed, number

    def __call__(self, count: int = DRAWS) -> list[int]:
        return [self.number() for _ in range(count)]


@pytest.fixture(params=["cpu", "philox"])
def draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Draw]:
    with torch.random.fork_rng(devices=[]):
        if request.param == "cpu":
            yield Draw(torch.manual_seed, lambda: int(torch.randint(2**62, ())))
            return
        philox = Philox()
        monkeypatch.setattr(randomness, "_default_generator", lambda _: philox)
        yield Draw(philox.manual_seed, philox.draw)


def ranks(count: int = 4) -> list[Randomness]:
    return [Randomness(rank, "cpu") for rank in range(count)]


def test_what_is_drawn_inside_is_a_ranks_own_and_what_follows_is_shared(draw: Draw) -> None:
    inside, after = [], []
    for rank in ranks():
        draw.seed(1)
        draw()
        with rank.own():
            inside.append(draw(1 + rank.rank))
        after.append(draw())
    assert len({x for numbers in inside for x in numbers}) == 1 + 2 + 3 + 4
    assert all(numbers == after[0] for numbers in after)
    assert not {x for numbers in inside for x in numbers} & set(after[0])


def test_one_seed_reproduces_both_sequences(draw: Draw) -> None:
    def run(rank: Randomness, seed: int) -> list[int]:
        draw.seed(seed)
        numbers = draw()
        for _ in range(2):
            with rank.own():
                numbers += draw()
        return numbers + draw()

    for rank in ranks(2):
        once = run(rank, 7)
        assert len(set(once)) == len(once)
        assert run(rank, 7) == once
        assert not set(run(rank, 8)) & set(once)


def test_sequences_nest(draw: Draw) -> None:
    shared, own = [], []
    for rank in ranks():
        draw.seed(3)
        numbers = []
        with rank.own():
            mine = draw()
            with rank.shared():
                numbers += draw(1)
                with rank.own():
                    mine += draw(1 + rank.rank)
                with rank.shared():
                    numbers += draw(1)
                assert not rank.on_own
            mine += draw(1)
            with rank.own():
                mine += draw()
            with rank.shared():
                numbers += draw(1)
            assert rank.on_own
            mine += draw(1)
        numbers += draw()
        assert not rank.on_own
        shared.append(numbers)
        own += mine
    assert all(numbers == shared[0] for numbers in shared)
    assert len(set(shared[0])) == len(shared[0])
    assert len(set(own)) == len(own) and not set(own) & set(shared[0])


def test_an_error_inside_leaves_the_shared_sequence_in_step(draw: Draw) -> None:
    after = []
    for rank in ranks(2):
        draw.seed(4)
        with pytest.raises(KeyError), rank.own():
            draw()
            with rank.shared(), rank.own():
                raise KeyError
        assert not rank.on_own
        after.append(draw())
    assert after[0] == after[1]


def test_numbers_tell_positions_apart_and_move_nothing(draw: Draw) -> None:
    (rank,) = ranks(1)
    draw.seed(5)
    first = rank.stands()
    assert rank.stands() == first
    numbers = draw(1)
    second = rank.stands()
    assert second[0] != first[0] and second[2:] == first[2:]
    assert all(0 <= number < 2**63 for number in first)
    draw.seed(5)
    assert rank.stands() == first
    assert draw(1) == numbers and rank.stands() == second


@pytest.mark.parametrize(
    "source, draws",
    [("torch, on the CPU", torch.rand), ("Python", random.random), ("numpy", numpy.random.rand)],
)
def test_each_sequence_has_a_number(source: str, draws: Callable[..., object]) -> None:
    rank = Randomness(0, "cpu")
    before = rank.stands()
    draws(*(1,) * (source != "Python"))
    moved = {
        name for name, was, now in zip(SEQUENCES, before, rank.stands(), strict=True) if was != now
    }
    assert moved == ({"torch", source} if source.startswith("torch") else {source})


def test_fake_tensors_draw_nothing() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode(), Randomness(0, "cpu").own():
        torch.nn.functional.dropout(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)
