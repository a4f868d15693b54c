"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import hf
from tpplan.cli import main


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a transformers config.json."""
    folder = tmp_path_factory.mktemp("model")
    hf(device="meta").config.save_pretrained(folder)
    return str(folder)


QKV = "  model.layers.*.self_attn.{q,k,v}_proj:       colwise"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_dry_run(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, out, err = run(
        capsys, *f"dry-run llama.yaml --model {config} --tp 2 --seq 16 --json {file}".split()
    )
    assert (code, err) == (0, "")
    assert "TP+SP, tp 2" in out
    data = json.loads(file.read_text())
    assert data["version"] == 1
    assert data["counts"]["forward"] == {"all_reduce": 0, "all_gather": 6, "reduce_scatter": 5}
    assert data["counts"]["gradient_sync"]["all_reduce"] == 1
    assert data["parameters"][0]["placement"] == "Shard(dim=0)"


def test_json_alone_on_stdout(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        *f"dry-run llama --model {config}/config.json --tp 2 --seq 8 --json -".split(),
        "--no-sequence-parallel",
    )
    assert code == 0
    assert json.loads(out)["sequence_parallel"] is False


def test_check_explain_list_show(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", "llama.yaml")[0] == 0
    code, out, _ = run(capsys, "check", "llama.yaml", "--model", config, "--tp", "4")
    assert code == 0
    assert "fits this model at tp 4" in out
    code, out, _ = run(
        capsys, "explain", "llama.yaml", "--model", config, "model.layers.1.self_attn.q_proj"
    )
    assert code == 0
    assert "colwise, by 'model.layers.*.self_attn.{q,k,v}_proj'" in out
    assert "enters the sharded region at model.layers.1.self_attn" in out
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "llama.yaml" in out
    assert "LlamaForCausalLM" in out
    code, out, _ = run(capsys, "show", "gpt")
    assert code == 0
    assert out == Path("plans/gpt.yaml").read_text()


def test_a_factory_of_the_users_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(
        capsys,
        *[
            "dry-run",
            "gpt.yaml",
            "--model",
            "tests.gpt:GPT",
            "--tp",
            "2",
            "--batch",
            "3",
            "--seq",
            "13",
        ],
    )
    assert code == 0
    assert "GPT · plan gpt.yaml" in out


BAD = {
    "unknown style": ("tpplan: 1\nrules:\n  a: colwize\n", ":3:6: error: unknown style 'colwize'"),
    "unknown key": ("tpplan: 1\nrulez: {}\nrules: {a: colwise}\n", ":2:1: error:"),
    "duplicate key": ("tpplan: 1\nrules:\n  a: colwise\n  a: rowwise\n", ":4:3: error:"),
    "wrong type": ("tpplan: 1\nsequence_parallel: 3\nrules: {a: colwise}\n", ":2:20: error:"),
    "bomb": ("tpplan: 1\na: &a [x]\nb: &b [*a, *a]\nrules: {c: *b}\n", "error:"),
    "tag": ("tpplan: 1\nrules: !!python/object/apply:os.system [ls]\n", ":2:8: error:"),
    "empty": ("", "error:"),
    "binary": ("\x00\x01\x02", "error:"),
    "nested too deep": ("[" * 100_000, "error:"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_plans(case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, message = BAD[case]
    file = tmp_path / "my.yaml"
    file.write_text(text)
    code, out, err = run(capsys, "check", str(file))
    assert (code, out) == (1, "")
    assert message in err
    assert "my.yaml" in err
    assert "Traceback" not in err


def test_what_is_missing_is_named(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code, message in (
        ("check nothere.yaml", 1, "there is no plan 'nothere.yaml'"),
        ("check llama.yaml --model nothere", 2, "no model at 'nothere'"),
        ("check llama.yaml --model nothere.json", 2, "cannot read 'nothere.json'"),
        ("check llama.yaml --model os:nothere", 2, "cannot import 'os:nothere'"),
        (f"explain llama.yaml --model {config} model.layers.0.self_attn.qproj", 2, "did you mean"),
    ):
        found, out, err = run(capsys, *argv.split())
        assert (found, out) == (code, ""), argv
        assert message in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv", ["", "dry-run", "dry-run llama.yaml --model x", "check llama.yaml --tp 0", "nonsense"]
)
def test_usage_errors(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *argv.split())[0] == 2


def test_head_counts_that_do_not_divide(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "check", "llama.yaml", "--model", config, "--tp", "16")
    assert code == 1
    line = Path("plans/llama.yaml").read_text().splitlines().index(QKV) + 1
    assert f"llama.yaml:{line}:3: error:" in err
    assert "tp 16 does not divide its 8 heads" in err
    assert "tp may be 1, 2, 4, 8\n" in err


def test_key_value_heads_are_shared(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "llama.yaml", "--model", config, "--tp", "8")
    assert code == 0
    assert "fits this model at tp 8" in out


def test_as_a_process_with_an_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("tpplan: 1\nrules: {a: colwize}\n")
    done = subprocess.run(
        [sys.executable, "-m", "tpplan", "check", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "did you mean 'colwise'" in done.stderr
    assert done.stdout == ""
