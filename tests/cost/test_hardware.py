"""Hardware: the shipped profiles, files of users, and what is said about broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tpplan.cost import Hardware, Link, load_hardware, shipped_hardware
from tpplan.language import PlanError

NAMES = {
    "h100-nvlink", "h200-nvlink", "a100-nvlink", "b200-nvlink", "mi300x", "h100-pcie", "a100-pcie",
    "l40s-pcie",
}  # fmt: skip
MINE = """\
description: what is under the desk
flops: {float32: 20e12, bfloat16: 80e12}
memory_bandwidth: 900e9
memory: 24e9
node: 2
link: {bandwidth: 32e9, latency: 2.5e-6}
network: {bandwidth: 1.25e9, latency: 1e-5}
efficiency: {matmul: 0.8, memory: 0.9, link: 0.7, network: 1}
"""


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "desk.yaml"
    path.write_text(text)
    return path


def complaint(tmp_path: Path, text: str) -> str:
    path = file(tmp_path, text)
    with pytest.raises(PlanError) as caught:
        load_hardware(path)
    return str(caught.value).replace(str(path), "desk.yaml")


def test_what_is_shipped() -> None:
    shipped = shipped_hardware()
    assert set(shipped) == NAMES
    for name, hardware in shipped.items():
        assert hardware.name == name
        assert hardware.description
        assert hardware.peak("bfloat16") == hardware.peak("float16") > hardware.peak("float32")
        assert hardware.peak("float8_e4m3fn") == hardware.flops.get("float8", hardware.peak("fp32"))
        assert 1e-7 < hardware.link.latency <= hardware.network.latency < 1e-4
        assert hardware.link.bandwidth > hardware.network.bandwidth
        assert hash(hardware) == hash(load_hardware(name))


@pytest.mark.parametrize(
    ("name", "both_ways"),
    [("a100-nvlink", 600e9), ("h100-nvlink", 900e9), ("b200-nvlink", 1.8e12), ("mi300x", 896e9)],
)
def test_links_are_in_one_direction(name: str, both_ways: float) -> None:
    """Data sheets add up what a GPU sends and what it receives."""
    assert load_hardware(name).link.bandwidth == both_ways / 2


def test_what_was_measured() -> None:
    """On one H200: 790 TFLOP/s of bf16 matmul, and a copy at 4.3 TB/s."""
    reached = load_hardware("h200-nvlink").reached
    assert reached.peak("bfloat16") == pytest.approx(790e12, rel=0.01)
    assert reached.memory_bandwidth == pytest.approx(4.3e12, rel=0.01)
    assert reached.reached == reached


def test_a_mesh_without_a_switch() -> None:
    link = load_hardware("mi300x").link
    assert [link.among(n) for n in (2, 4, 8)] == [64e9, 192e9, 448e9]
    assert {Link(10.0, 0.0).among(n) for n in range(2, 20)} == {10.0}


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    hardware = load_hardware(file(tmp_path, MINE))
    assert hardware.name == "desk"
    assert hardware.description == "what is under the desk"
    assert hardware.peak("bfloat16") == 80e12
    assert hardware.peak("float16") == 20e12  # there is none: computed in float32
    assert (hardware.node, hardware.link) == (2, Link(32e9, 2.5e-6))
    assert load_hardware(hardware) is hardware
    assert load_hardware(str(tmp_path / "desk.yaml")) == hardware


def test_a_file_that_says_what_differs(tmp_path: Path) -> None:
    base = load_hardware("h100-nvlink")
    text = "extends: h100-nvlink\nnetwork: {bandwidth: 12.5e9}\nnode: 4\n"
    hardware = load_hardware(file(tmp_path, text))
    assert hardware.network == Link(12.5e9, base.network.latency)
    assert (hardware.node, hardware.link, hardware.flops) == (4, base.link, base.flops)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_plain_data_reads_back(name: str, tmp_path: Path) -> None:
    hardware = load_hardware(name)
    data: dict[str, Any] = hardware.to_dict()
    assert data.pop("name") == name
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True))
    assert load_hardware(path) == hardware


def replaced(old: str, new: str) -> str:
    assert old in MINE
    return MINE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            replaced("memory_bandwidth:", "memory_bandwith:"),
            (
                "desk.yaml:3:1: error: unknown key of the hardware 'memory_bandwith'",
                "did you mean 'memory_bandwidth'?",
                "desk.yaml:1:1: error: the hardware does not say 'memory_bandwidth'",
                "extends: h100-nvlink",
            ),
        ),
        (
            replaced("bfloat16: 80e12", "bf16: 80e12"),
            ("desk.yaml:2:25: error: unknown key of 'flops' 'bf16'", "did you mean 'bfloat16'?"),
        ),
        (replaced("float32: 20e12, ", ""), ("2:8: error: 'flops' does not say 'float32'",)),
        (replaced("memory: 24e9\n", ""), ("does not say 'memory'", "in bytes")),
        (replaced(", latency: 1e-5", ""), ("7:10: error: 'network' does not say 'latency'",)),
        (
            replaced("900e9", "900 GB/s"),
            (
                "3:19: error: 'memory_bandwidth' must be a number, but this is the text '900 GB/s'",
                "it is in bytes/s; without units and prefixes, for instance 450e9",
            ),
        ),
        (replaced("900e9", "[900e9]"), ("must be a number, but this is a list",)),
        (replaced("900e9", ""), ("must be a number, but it has no value",)),
        (replaced("900e9", "-900e9"), ("3:19: error", "must be positive, not -900e9")),
        (replaced("900e9", "0"), ("must be positive, not 0",)),
        (replaced("900e9", "9e999"), ("must be positive, not 9e999",)),
        (replaced("network: 1}", "network: 1.5}"), ("8:60: error", "at most 1, not 1.5")),
        (replaced("node: 2", "node: 0"), ("5:7: error: 'node' must be a whole number",)),
        (replaced("node: 2", "node: 2.5"), ("5:7: error: 'node' must be a whole number",)),
        (replaced("node: 2", "node: 2\nnode: 4"), ("6:1: error: the key 'node' is given twice",)),
        (replaced("{float32: 20e12, bfloat16: 80e12}", "80e12"), ("'flops' must be a mapping",)),
        ("extends: h100-nvlnk\n", ("1:10: error", "did you mean 'h100-nvlink'?")),
        ("- 1\n", ("desk.yaml:1:1: error: a hardware file must be a mapping",)),
        ("", ("desk.yaml: the file is empty", "its keys are description, extends, flops")),
        ("node: !!int 8\n", ("is not allowed in a hardware file",)),
        ("node: [\n", ("desk.yaml:2:1: error",)),
    ],
)
def test_what_is_wrong_in_a_file(text: str, said: tuple[str, ...], tmp_path: Path) -> None:
    message = complaint(tmp_path, text)
    for part in said:
        assert part in message, message


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load_hardware("h100_nvlink")
    assert "there is no hardware 'h100_nvlink'" in str(caught.value)
    assert "did you mean 'h100-nvlink'?" in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(PlanError, match="is a directory"):
        load_hardware(tmp_path)
    with pytest.raises(PlanError, match="there is no hardware"):
        load_hardware("x" * 5000)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="not UTF-8"):
        load_hardware(binary)


def test_a_name_before_a_file_of_that_name(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "mi300x").write_text("nonsense")
    monkeypatch.chdir(tmp_path)
    assert load_hardware("mi300x").memory == 192e9
    with pytest.raises(PlanError):
        load_hardware(Path("mi300x"))
    assert isinstance(load_hardware("a100-pcie"), Hardware)
