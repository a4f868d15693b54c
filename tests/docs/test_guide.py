"""docs/guide.md is walked through: its files are written, its commands and its Python run."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, page
from tpplan.cli import main
from tpplan.shipped import shipped_plans

BLOCKS = blocks("guide.md")
FILE = re.compile(r"# ([\w.]+\.(?:py|yaml))\b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a reader works, with the files that the page tells to write."""
    made = tmp_path_factory.mktemp("guide")
    for block in BLOCKS:
        if name := FILE.match(block.text):
            (made / name[1]).write_text(block.text)
    before = Path.cwd()
    os.chdir(made)
    sys.path.insert(0, str(made))
    importlib.invalidate_caches()
    yield made
    sys.path.remove(str(made))
    sys.modules.pop("mine", None)
    os.chdir(before)


def printed(expected: str, text: str) -> None:
    """``text`` is what the page shows, where ``...`` stands for anything."""
    shown = re.escape(expected.rstrip()).replace(r"\.\.\.", ".*")
    assert re.fullmatch(shown, text.rstrip(), flags=re.DOTALL), text


def said(command: str) -> str:
    """What a command prints, and then its errors."""
    words = shlex.split(command)
    assert words[0] == "tpplan"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words[1:])
    assert bool(code) == bool(err.getvalue()), err.getvalue()
    return out.getvalue() + err.getvalue()


@pytest.mark.turns(24)
@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "console"], ids=lambda b: f"line {b.line}"
)
def test_commands(block: Block, folder: Path) -> None:
    first, _, expected = block.text.partition("\n")
    printed(expected, said(first.removeprefix("$ ")))


@pytest.mark.turns(24)
def test_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks that are no files, in order; a block of text after one is what it prints."""
    for block, after in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        if block.language == "python" and not FILE.match(block.text):
            exec(compile(block.text, f"guide.md:{block.line}", "exec"), {})
            out = capsys.readouterr().out
            shows = after is not None and after.language == "text"
            printed(after.text if shows else "", out)


@pytest.mark.turns(24)
@pytest.mark.parametrize(("script", "ranks"), [("train.py", 2), ("train_experts.py", 4)])
def test_training(folder: Path, script: str, ranks: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join([str(ROOT), str(folder)])
    done = subprocess.run(
        [*launcher, "--master-port", str(20_000 + os.getpid() % 20_000), script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_what_is_saved_is_a_plan(folder: Path) -> None:
    """As the page tells to save it."""
    (block,) = (b for b in BLOCKS if b.language == "python" and "plan.text" in b.text)
    exec(compile(block.text, f"guide.md:{block.line}", "exec"), {})
    assert "fits this model" in said("tpplan check classifier.yaml --model mine:llama_classifier")


def test_the_hand_written_plan_is_the_shipped_one() -> None:
    """But for the rule of attention, whose attributes are found."""
    (shipped,) = (plan for plan in shipped_plans() if plan.name == "nanogpt.yaml")
    (block,) = (b for b in BLOCKS if b.text.startswith("# gpt.yaml"))
    patterns = {rule.pattern.text for rule in shipped.rules if rule.style != "attention"}
    assert patterns == {line.split(":")[0].strip() for line in block.text.splitlines()[3:]}


def test_the_names_of_files() -> None:
    """No file is written twice, none that a command names is missing."""
    names = [name[1] for b in BLOCKS if (name := FILE.match(b.text))]
    assert len(names) == len(set(names))
    asked = set(re.findall(r"^\$ tpplan \w+ (\w+\.yaml)", page("guide.md"), flags=re.MULTILINE))
    assert asked <= set(names)
