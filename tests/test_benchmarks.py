"""GPU benchmarks run to their end at tiny sizes, where figures mean nothing; faults have places."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks import kernels, peers, rank_local, rounding
from benchmarks.faults.planted import FAULTS, Fault


def test_every_kernel_has_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = tmp_path / "found.json", tmp_path / "found.csv"
    files = ["--json", str(found), "--csv", str(lines), "--plot", str(tmp_path / "found.svg")]
    monkeypatch.setattr("sys.argv", ["kernels", "--tiny", "--rounds", "1", *files])
    assert kernels.main() == 0
    rows = json.loads(found.read_text())["rows"]
    named = {(row["kernel"], row["direction"]) for row in rows}
    expected = {(op.name, way) for op in kernels.ops() for way in op.moved(op.tiny)}
    assert named == expected
    assert {name for name, _ in named} == set(peers.PLAIN) == set(peers.ours())
    for row in rows:
        assert row["bytes"] > 0
        assert row["copy_us"] > 0
        assert {"tpplan", "eager"} <= set(row["variants"])
        assert all(figure > 0 for one in row["variants"].values() for figure in one.values())
    with lines.open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == sum(len(row["variants"]) for row in rows)
    assert all(cell["machine"] and cell["torch"] and cell["triton"] for cell in cells)
    printed = capsys.readouterr().out
    assert all(name in printed for name in peers.PLAIN)


def test_a_wrong_kernel_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = peers.ours()
    wrong = {**ours, "SP pack": lambda whole: ours["SP pack"](whole).flip(0)}
    monkeypatch.setattr(peers, "ours", lambda: wrong)
    monkeypatch.setattr("sys.argv", ["kernels", "--tiny", "--only", "SP pack", "--peers"])
    with pytest.raises(SystemExit, match=r"SP pack .*: error"):
        kernels.main()


def test_bars_are_of_the_shapes_they_were_set_for() -> None:
    ops = {op.name: op for op in kernels.ops()}
    norm, gated, loss = ops["LayerNorm"], ops["SwiGLU"], ops["cross entropy statistics"]
    assert [norm.bar("backward", "sweep", (1, h)) for h in (8192, 16384, 32768)] == [0.8, 0.6, None]
    assert norm.bar("forward", "TP-8", (1024, 8192)) is None
    assert gated.bar("backward", "TP-1", (8192, 28672)) == 0.9
    assert loss.bar("forward", "TP-8", (8192, 16032)) == 0.8
    slow = {"kernel_us": 2.0, "wall_us": 2.0, "share": 0.5}
    row = {"kernel": "K", "direction": "forward", "place": "TP-1", "shape": [8], "bar": 0.9}
    fast = {**slow, "kernel_us": 1.0}
    missed = kernels.missed_bars([{**row, "variants": {"tpplan": slow, "compile": fast}}])
    assert missed == [
        "K forward TP-1 8: 0.50 of a copy's speed < 0.90",
        "K forward TP-1 8: 2.00 x compile",
    ]


@pytest.mark.turns(24)
def test_a_step_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["rank_local", "--tiny", "--rounds", "1", "--json", str(found)])
    assert rank_local.main() == 0
    result = json.loads(found.read_text())
    names = {f"{way} {mode}" for way in rank_local.WAYS for mode in rank_local.MODES}
    assert set(result["figures"]) == names
    assert all(one["wall_ms"] > 0 for one in result["figures"].values())
    assert set(result["errors"]) == set(rank_local.MODES)
    assert all(error <= rank_local.TOLERANCE for error in result["errors"].values())


@pytest.mark.turns(24)
def test_rounding_is_that_of_the_unsharded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found.json"
    command = ["rounding", "llama", "--seeds", "1", "--check", "--json", str(found)]
    monkeypatch.setattr("sys.argv", command)
    assert rounding.main() == 0
    (errors,) = json.loads(found.read_text())["models"].values()
    assert 0 < errors["reordered"][0] <= 1e-5
    assert 0 < errors["sharded"][0] <= 1e-5


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place(fault: Fault) -> None:
    """Code moves; a fault that cannot be planted any more catches nothing."""
    assert callable(fault.place()[2])
