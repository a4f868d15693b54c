"""Into how many pieces products and their collectives are cut."""

from __future__ import annotations

import pytest
import torch

import tpplan
from tests.models import hf
from tpplan.comm.pace import MOST, Pieces
from tpplan.comm.pieces import spans
from tpplan.cost.costs import collective_seconds
from tpplan.cost.hardware import load_hardware
from tpplan.cost.pace import hardware_here, pace_of

H100 = load_hardware("h100-nvlink")


def test_links_are_those_of_the_cost_model() -> None:
    pace = pace_of(H100, 8)
    for kind, (least, each) in pace.links.items():
        size = 1 << 28
        assert least + size * each == pytest.approx(
            collective_seconds(kind, size, 8, H100), rel=1e-3
        )


def test_one_piece_takes_what_it_sends_and_what_it_multiplies() -> None:
    pace = pace_of(H100, 8)
    one = pace.seconds("all_gather", 8192, 8192, 7168, "bfloat16", 1)
    sent = collective_seconds("all_gather", 8192 * 8192 * 2, 8, H100)
    made = 2 * 8192 * 8192 * 7168 / H100.reached.peak("bfloat16")
    assert one == pytest.approx(sent + made, rel=1e-3)


def test_large_products_are_cut_and_small_ones_are_not() -> None:
    auto = Pieces(1, pace_of(H100, 8))
    large = auto.of("all_gather", 8192, 8192, 7168, torch.bfloat16)
    assert 1 < large <= MOST
    assert auto.of("all_gather", 16, 64, 64, torch.bfloat16) == 1
    asked = Pieces(2, pace_of(H100, 8))
    assert asked.of("all_gather", 16, 64, 64, torch.bfloat16) == 2


def test_more_pieces_never_take_longer_than_the_model_says_of_one() -> None:
    pace = pace_of(H100, 8)
    for rows in (1024, 8192, 65536):
        for outer in (128, 1024, 28672):
            best = Pieces(1, pace).of("reduce_scatter", rows, outer, 8192, torch.bfloat16)
            of = [
                pace.seconds("reduce_scatter", rows, outer, 8192, "bfloat16", n) for n in (1, best)
            ]
            assert of[1] <= of[0]


@pytest.mark.parametrize(("rows", "pieces"), [(1, 2), (5, 2), (7, 3), (8, 8), (9, 8)])
def test_pieces_are_all_rows_in_order(rows: int, pieces: int) -> None:
    found = spans(rows, pieces)
    assert [at for start, stop in found for at in range(start, stop)] == list(range(rows))
    assert len(found) <= pieces


def test_hardware_here_is_the_default_on_a_cpu() -> None:
    assert hardware_here("cpu") is H100


def test_auto_counts_what_it_cuts() -> None:
    options = {"tp": 2, "batch": 1, "seq": 64, "optimizer": None}
    reports = [
        tpplan.dry_run(hf(), "llama.yaml", overlap=overlap, **options)  # type: ignore[arg-type]
        for overlap in ("none", "auto", "chunked")
    ]
    none, auto, chunked = (report.counts("forward") for report in reports)
    assert none == auto  # too small for it to pay
    assert chunked["all_gather"] > none["all_gather"]
    assert reports[2].time.phases["forward"].hidden > 0
    assert reports[2].counts("backward") == reports[0].counts("backward")
