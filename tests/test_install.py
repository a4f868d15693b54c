"""What an installation needs, and what it holds."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest

import tpplan
from tests.models import hf
from tpplan import __main__, shipped
from tpplan.compat import replaced
from tpplan.kernels import launch
from tpplan.language import PlanError

ROOT = Path(__file__).parent.parent
TRACKED = ("Makefile", "README.md", "constraints.txt", "pyproject.toml", ".ci/run", "plans/t5.yaml")

# runs a command where some modules cannot be imported, and says which it did import
WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
from tpplan.cli import main
code = main({argv!r})
print("imported:", *sorted(name for name in sys.modules if sys.modules[name] is not None))
sys.exit(code)
"""


def without(missing: list[str], *argv: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, argv=list(argv))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "argv", [["--help"], ["dry-run", "--help"], ["list"], ["show", "llama"], ["check", "llama"]]
)
def test_what_does_without_torch(argv: list[str]) -> None:
    done = without(["torch"], *argv)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.splitlines()[-1].split()
    assert "tpplan.cli" in imported
    assert not {"torch", "transformers", "rich", "numpy"} & set(imported)


@pytest.mark.turns(24)
def test_neither_numpy_nor_triton_nor_transformers_is_needed() -> None:
    missing = ["numpy", "triton", "transformers"]
    line = "dry-run gpt.yaml --model tests.gpt:GPT --tp 2 --seq 16 --json -"
    done = without(missing, *line.split())
    assert done.returncode == 0, done.stderr
    assert '"all_gather": 6' in done.stdout
    done = without(missing, *f"{line} --kernels triton".split())
    assert done.returncode == 1
    # torch's own warning comes first
    assert done.stderr.endswith(
        "error: kernels: 'triton' is asked for, and there is no triton here to import\n"
        "   help: pip install triton, or ask for 'auto' or 'torch'\n"
    )


@pytest.mark.turns(24)
def test_a_check_imports_only_what_it_needs() -> None:
    done = without([], "check", "gpt.yaml", "--model", "tests.gpt:GPT", "--tp", "2")
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert "tpplan.proof.prove" in imported
    idle = {"tpplan.cost", "tpplan.render", "tpplan.hf", "tpplan.simulate.execute"}
    assert not imported & {*idle, "rich", "transformers", "torch.utils.flop_counter"}


def test_a_process_does_not_search_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, tuple[int, ...]]] = []
    watched = types.SimpleNamespace(
        get_threshold=lambda: (700, 10, 10),
        set_threshold=lambda *numbers: called.append(("threshold", numbers)),
        freeze=lambda: called.append(("freeze", ())),
    )
    monkeypatch.setattr(__main__, "gc", watched)
    monkeypatch.setattr(__main__, "main", lambda: called.append(("main", ())) or 3)
    assert __main__.run() == 3
    assert called == [("threshold", (100_000, 10, 10)), ("main", ()), ("freeze", ())]


class TestKernelsThatCannotRun:
    """Nothing is said to be proved, or asked for, that would not run."""

    @pytest.mark.parametrize("kernels", ["triton", {"rms_norm": "triton"}])
    def test_without_triton(
        self, kernels: str | dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "triton", None)
        model = hf(device="meta")
        calls = (
            lambda: tpplan.parallelize(model, "llama.yaml", kernels=kernels),
            lambda: tpplan.dry_run(model, "llama.yaml", 2, kernels=kernels),
            lambda: tpplan.verify(hf, "llama.yaml", kernels=kernels),
        )
        for call in calls:
            with pytest.raises(PlanError, match="no triton here to import"):
                call()

    def test_proofs_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "interpreted", lambda: False)
        monkeypatch.setattr("tpplan.api.interpreted", lambda: False)
        monkeypatch.setattr("tpplan.planner.kernels.importable", lambda: True)
        with pytest.raises(PlanError, match="TRITON_INTERPRET=1"):
            tpplan.verify(hf, "llama.yaml", kernels="triton")


def test_plans_beside_an_installed_package_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, others = tmp_path / "tpplan", tmp_path / "plans"
    for folder in (package / "plans", others):
        folder.mkdir(parents=True)
    (package / "plans" / "mine.yaml").write_text("tpplan: 1\nrules: {a: colwise}\n")
    (others / "other.yaml").write_text("no plan of ours")
    monkeypatch.setattr(shipped, "__file__", str(package / "shipped.py"))
    assert [plan.name for plan in shipped.shipped_plans()] == ["mine.yaml"]
    with pytest.raises(PlanError, match="there is no plan 'other'"):
        tpplan.load_plan("other")


def test_names_are_there_when_they_are_asked_for() -> None:
    assert set(tpplan.__all__) <= set(dir(tpplan))
    assert all(getattr(tpplan, name) is not None for name in tpplan.__all__)
    assert tpplan.kernels.norm.residual_norm is not None
    with pytest.raises(AttributeError, match="no attribute 'parallelise'"):
        tpplan.parallelise  # noqa: B018


def test_what_torch_no_longer_has_is_named() -> None:
    gone = types.SimpleNamespace(__name__="torch.somewhere", _here=1)
    assert replaced.there(gone, "_here") == 1
    with pytest.raises(RuntimeError, match=r"has no torch\.somewhere\._gone, which tpplan replac"):
        replaced.there(gone, "_gone")


def test_the_source_distribution_has_what_the_readme_runs(tmp_path: Path) -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist")
    (made,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    code = {
        str(path.relative_to(ROOT))
        for room in ("tpplan", "plans", "tests", "benchmarks")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {*TRACKED, *code} <= names


def test_the_schema_lies_beside_the_installed_plans(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    (made,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path)
    package = tmp_path / "tpplan"
    schema = (package / "language" / "schema.json").read_bytes()
    plans = sorted((package / "plans").glob("*.yaml"))
    assert len(plans) == len([*(ROOT / "plans").glob("*.yaml")])
    for plan in plans:
        named = plan.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        assert (plan.parent / named).read_bytes() == schema
