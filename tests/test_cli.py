"""The command line, as a user types it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tpplan
from tests.models import hf
from tpplan.cli import main
from tpplan.options import inputs_of
from tpplan.shipped import described, shipped_plans


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


@pytest.mark.turns(24)
def test_a_page(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    line = f"dry-run llama.yaml --model {config} --tp 2 --seq 16 --loss --html {file}"
    assert run(capsys, *line.split())[0] == 0
    page = file.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert f"tpplan {line}" in page


@pytest.mark.turns(24)
def test_how_a_model_is_trained(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"dry-run llama.yaml --model {config} --tp 2 --seq 16 --json -"
    found = {}
    for options in ("", "--optimizer sgd --clip 0", "--checkpointing", "--loss"):
        code, out, err = run(capsys, *f"{base} {options}".split())
        assert (code, err) == (0, "")
        found[options] = json.loads(out)
    plain = found[""]
    assert plain["counts"]["optimizer"]["all_reduce"] == 1
    assert found["--optimizer sgd --clip 0"]["counts"]["optimizer"]["all_reduce"] == 0
    assert found["--optimizer sgd --clip 0"]["memory"]["optimizer_per_rank"] == 0
    assert found["--checkpointing"]["checkpointing"]
    assert found["--checkpointing"]["memory"] == plain["alternative"]["memory"]
    assert found["--loss"]["counts"]["forward"]["all_reduce"] == 3
    code, out, _ = run(
        capsys, *f"{base} --input input_ids:int64[3,5] --input attention_mask:bool[3,5]".split()
    )
    # three sequences of five tokens, of which two ranks have three each
    assert math.prod(json.loads(out)["collectives"][0]["shape"]) == 3 * 6 * 64
    code, _, err = run(capsys, *f"{base} --optimizer adamv".split())
    assert (code, err) == (2, "error: no optimizer 'adamv'; there are adamw, adam, adagrad, "
                              "rmsprop, sgd, sgd-momentum, none\n")  # fmt: skip
    code, _, err = run(capsys, *f"{base} --hardware h100".split())
    assert code == 1
    assert "h100-nvlink" in err


@pytest.mark.turns(24)
def test_advise(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    line = f"advise llama.yaml --model {config} --gpus 4 --batch 8 --seq 16 --json {file}"
    code, out, err = run(capsys, *line.split())
    assert (code, err) == (0, "")
    assert "Choose tp 1" in out
    advice = json.loads(file.read_text())
    assert (advice["version"], advice["modelled"]) == (1, True)
    assert [size["tp"] for size in advice["sizes"]] == [1, 2, 4]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"tpplan {tpplan.__version__}\n")


def test_defaults_and_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "dry-run", "--help")
    assert code == 0
    assert "(default: 2048)" in out
    assert "(default: 1.0)" in out
    assert "2 usage" in out


def test_check_by_class_with_an_input(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"check auto --model {config} --tp 2 --input input_ids:int64[3,5]"
    code, out, err = run(capsys, *line.split())
    assert (code, err) == (0, "")
    assert out.startswith("llama.yaml: fits this model")


class TwoTables(nn.Module):
    """Few ids, and fewer kinds of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(24, 8), nn.Embedding(2, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 24)

    def forward(self, words: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.kinds(kinds)
        out: torch.Tensor = self.head(x + self.down(self.up(x).relu()))
        return out


def test_integers_of_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are ids of the model, or less than what is said."""
    plan = tmp_path / "two.yaml"
    rules = "words: vocab", "kinds: replicate", "up: colwise", "down: rowwise", "head: vocab"
    plan.write_text("\n  ".join(["tpplan: 1\nrules:", *rules]))
    line = f"check {plan} --model {__name__}:TwoTables --no-sequence-parallel"
    code, out, err = run(
        capsys, *line.split(), "--input", "words:int64[2,8]", "--input", "kinds:int64[2,8]:2"
    )
    assert (code, out, err) == (0, "two.yaml: fits this model at tp 2, TP\n", "")
    code, _, err = run(capsys, *line.split(), "--input", "words:int64[2,8]:0")
    assert code == 2
    assert "kinds:int64[2,13]:2" in err
    assert {*inputs_of(["k:int64[99]:2"])["k"].tolist()} == {0, 1}
    assert {*inputs_of(["k:int64[999]"], ids=4)["k"].tolist()} == {1, 2, 3}
    assert {*inputs_of(["k:int64[9]:1"])["k"].tolist()} == {0}


def test_diff_shows_the_second_beside_the_first(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("tpplan: 1\nextends: llama.yaml\nrules:\n  model.norm: replicate\n")
    line = f"diff llama.yaml {other} --model {config} --tp 2 --seq 16 --json -"
    found = json.loads(run(capsys, *line.split())[1])
    assert found["plans"] == ["llama.yaml", "other.yaml"]


@pytest.mark.turns(12)
def test_diff(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(
        "tpplan: 1\nextends: llama.yaml\nrules:\n  lm_head: {style: vocab, output: shard}\n"
        "  model.layers.*.mlp.{gate,up}_proj: replicate\n"
        "  model.layers.*.mlp.down_proj: replicate\n"
    )
    line = f"diff llama.yaml {other} --model {config} --tp 2 --seq 16"
    code, out, err = run(capsys, *line.split())
    assert (code, err) == (0, "")
    assert "model.layers.*.mlp.down_proj.weight" in out
    assert "forward: all-gather" in out
    assert "states per rank" in out
    code, out, _ = run(
        capsys, *f"diff llama.yaml llama --model {config} --tp 2 --seq 16 --json -".split()
    )
    assert json.loads(out) == {
        "version": 1, "plans": ["llama.yaml", "llama.yaml"], "parameters": [], "figures": [],
    }  # fmt: skip


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


def test_what_is_listed_is_what_the_plans_say() -> None:
    read = [(plan.name, plan.description, plan.models) for plan in shipped_plans()]
    assert read == [tuple(listed) for listed in described()]


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


@pytest.mark.turns(24)
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


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    "typed, completed",
    [
        ("tpplan ver", "verify"),
        ("tpplan check llama.", "llama.yaml"),
        ("tpplan check llama.yaml --se", "--sequence-parallel"),
        ("tpplan check llama.yaml --no-se", "--no-sequence-parallel"),
        ("tpplan dry-run llama.yaml --mo", "--model"),
        ("tpplan dry-run llama.yaml --model gpt2", ""),  # files
        ("tpplan check READ", "README.md"),
        ("tpplan list --", "--debug"),
    ],
)
def test_completion(typed: str, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, script, err = run(capsys, "completion")
    assert (code, err) == (0, "")
    ask = f"COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tpplan; "
    done = subprocess.run(
        ["bash", "-c", f'{script}{ask} echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == (completed, "")
