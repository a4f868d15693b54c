"""Which rows each rank holds: nothing lost, nothing held twice but what is shared on purpose."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpplan.layout import MisfitError, Part, Rows, rows_of

TP = st.sampled_from([1, 2, 3, 4, 6, 8])
PARTS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=3
)  # heads, width


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Part], int, int, Rows]:
    """Parts, their repeats, tp and the layout, of every kind that fits."""
    tp = draw(TP)
    repeat = draw(st.sampled_from([1, 2, 3, 4, 8]))
    fixed = draw(st.booleans())
    parts = [Part(f"p{i}", n * width, n) for i, (n, width) in enumerate(draw(PARTS))]
    try:
        return parts, repeat, tp, rows_of(parts, repeat, tp, 0, fixed)
    except MisfitError:
        # the number of heads that certainly fits
        parts = [Part(p.name, tp * p.size, tp * p.units) for p in parts]
        repeat = repeat if fixed or repeat % tp == 0 or tp % repeat == 0 else 1
        return parts, repeat, tp, rows_of(parts, repeat, tp, 0, fixed)


def holders(rows: Rows, total: int) -> list[list[int]]:
    """For every row, the ranks that hold it, each as often as it does."""
    held: list[list[int]] = [[] for _ in range(total)]
    for rank, ranges in enumerate(rows.pieces):
        for start, stop in ranges:
            for row in range(start, stop):
                held[row].append(rank)
    return held


@given(layouts())
def test_every_row_is_held_and_none_twice_by_one_rank(
    case: tuple[list[Part], int, int, Rows],
) -> None:
    parts, repeat, tp, rows = case
    held = holders(rows, sum(p.size for p in parts) * repeat)
    assert len(rows.pieces) == tp
    assert all(held)
    assert all(len(ranks) == len(set(ranks)) for ranks in held)


@given(layouts())
def test_ranks_hold_the_same_number_of_rows(case: tuple[list[Part], int, int, Rows]) -> None:
    *_, tp, rows = case
    assert {rows.length(rank) for rank in range(tp)} == {rows.length()}


@given(layouts(), st.integers(0, 1))
def test_what_was_taken_is_put_back(case: tuple[list[Part], int, int, Rows], dim: int) -> None:
    parts, repeat, tp, rows = case
    total = sum(p.size for p in parts) * repeat
    rows = Rows(dim, rows.pieces)
    whole = torch.arange(2 * total).view((total, 2) if dim == 0 else (2, total))
    again = torch.full_like(whole, -1)
    for rank in range(tp):
        local = rows.take(whole, rank)
        assert local.size(dim) == rows.length(rank)
        rows.put(again, local, rank)
    assert torch.equal(again, whole)
    rows.take(whole, 0).zero_()  # a copy
    assert torch.equal(again, whole)


@given(layouts())
def test_every_row_is_owned_once(case: tuple[list[Part], int, int, Rows]) -> None:
    parts, repeat, tp, rows = case
    whole = torch.arange(sum(p.size for p in parts) * repeat)
    owned = [
        rows.take(whole, rank)[start:stop] for rank in range(tp) for start, stop in rows.owned(rank)
    ]
    assert sorted(torch.cat(owned).tolist()) == whole.tolist()


@given(layouts())
def test_shared_is_what_several_ranks_hold(case: tuple[list[Part], int, int, Rows]) -> None:
    parts, repeat, _, rows = case
    held = holders(rows, sum(p.size for p in parts) * repeat)
    shared = {row for start, stop in rows.shared() for row in range(start, stop)}
    assert shared == {row for row, ranks in enumerate(held) if len(ranks) > 1}


@pytest.mark.parametrize("n_kv", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_a_ranks_query_heads_use_its_key_value_heads(n_kv: int, tp: int, packed: bool) -> None:
    """Query head i uses key-value head i·n_kv // heads; so rank r uses r·n_kv // tp."""
    heads, width = 16, 2
    query, key = Part("q", heads * width, heads), Part("k", n_kv * width, n_kv)
    if packed:
        rows = rows_of([query, key], 1, tp)
        start = query.size
    else:
        rows, start = rows_of([key], 1, tp), 0
    for rank in range(tp):
        queries = range(rank * heads // tp, (rank + 1) * heads // tp)
        due = sorted({q * n_kv // heads for q in queries})
        held = [row for a, b in rows.pieces[rank] for row in range(a, b) if row >= start]
        assert held == [start + head * width + i for head in due for i in range(width)]
        if tp > n_kv:
            assert due == [rank * n_kv // tp]


def test_key_value_heads_are_not_dealt_out_in_turns() -> None:
    """Rank mod n_kv would pair query heads with another's key-value head."""
    assert rows_of([Part("k", 6, 2)], 1, 4).pieces == (((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),))


def test_whole_blocks_stay_whole() -> None:
    """[q k v] of each head (NeoX): a rank's heads follow each other."""
    parts = [Part(name, 2, 1) for name in "qkv"]
    assert rows_of(parts, 4, 2).pieces == (((0, 12),), ((12, 24),))
    # two groups of four query heads and one key and value on four ranks (Falcon 40B)
    grouped = [Part("q", 8, 4), Part("k", 2, 1), Part("v", 2, 1)]
    rows = rows_of(grouped, 2, 4)
    assert rows.pieces[0] == ((0, 4), (8, 12))
    assert rows.pieces[1] == ((4, 12),)
    assert rows.pieces[2] == ((12, 16), (20, 24))
    assert rows.shared() == ((8, 12), (20, 24))
    # of a range, a part may be another's
    assert [rows.owned(rank) for rank in range(4)] == [((0, 8),), ((0, 4),), ((0, 8),), ((0, 4),)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_fixed_number_of_blocks_with_contiguous_heads(tp: int) -> None:
    """CodeGen: four blocks of q, v and k on every rank, whose heads follow each other globally."""
    heads, width, blocks = 16, 3, 4
    each = heads // blocks
    parts = [Part(name, each * width, each) for name in "qvk"]
    rows = rows_of(parts, blocks, tp, fixed=True)
    block = 3 * each * width

    def of_head(part: int, head: int) -> list[int]:
        start = head // each * block + part * each * width + head % each * width
        return list(range(start, start + width))

    for rank in range(tp):
        held = [row for start, stop in rows.pieces[rank] for row in range(start, stop)]
        # what the model's code makes of them: [4, parts, its heads of a block]
        per_rank = each // tp
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        local = iter(held)
        for _ in range(blocks):
            for part in range(3):
                found[part] += [next(local) for _ in range(per_rank * width)]
        own = range(rank * heads // tp, (rank + 1) * heads // tp)
        for part in range(3):
            assert found[part] == [row for head in own for row in of_head(part, head)]


@pytest.mark.parametrize(
    ("units", "repeat", "tp", "fixed"),
    [
        (3, 1, 2, False),  # neither divides the other
        (4, 1, 3, False),
        (4, 3, 2, False),  # blocks
        (4, 2, 3, False),
        (3, 2, 4, False),  # heads of a block
        (2, 4, 4, True),  # fixed blocks are not shared
        (3, 4, 2, True),
    ],
)
def test_misfits(units: int, repeat: int, tp: int, fixed: bool) -> None:
    with pytest.raises(MisfitError, match=r"fit|divide"):
        rows_of([Part("q", 2 * units, units)], repeat, tp, 0, fixed)


def test_a_placement_that_is_none_of_torchs() -> None:
    rows = rows_of([Part("q", 4, 2), Part("k", 4, 2)], 1, 2, dim=1)
    assert rows.dim == 1
    assert not (rows.is_shard() or rows.is_shard(1) or rows.is_replicate() or rows.is_partial())
    assert rows == pickle.loads(pickle.dumps(rows))
    assert hash(rows) == hash(Rows(1, rows.pieces))
    assert rows != Rows(0, rows.pieces)
    assert str(rows) == "Rows(1)"
    assert eval(repr(rows)) == rows
    # neighbours are joined, the empty ones left out, and the order stays
    assert Rows(0, [[(0, 2), (2, 4), (4, 4), (1, 2)]]).pieces == (((0, 4), (1, 2)),)
