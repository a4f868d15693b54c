"""What a model is timed on: the peaks of a GPU and of its links, and what of them is reached."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tpplan.language import Diagnostic, FrozenMap, PlanError, suggest
from tpplan.language.diagnostics import quoted
from tpplan.language.source import MappingNode, Node, Scalar, read_tree
from tpplan.language.values import Values

HardwareSource: TypeAlias = "str | os.PathLike[str] | Hardware"

DEFAULT = "h100-nvlink"
_SHIPPED = Path(__file__).with_name("hardware.yaml")
_WHAT = "hardware file"


@dataclass(frozen=True)
class Link:
    """What one GPU sends over.

    Attributes:
        bandwidth: bytes/s in one direction; latency: seconds per message.
        wires: of a mesh without a switch, how many wires to one GPU each the bandwidth is split
            into.
    """

    bandwidth: float
    latency: float
    wires: int = 1

    def at(self, share: float) -> Link:
        """The same at a share of its bandwidth."""
        return dataclasses.replace(self, bandwidth=self.bandwidth * share)

    def among(self, ranks: int) -> float:
        """Bytes/s that a rank sends to the others of a group: over as many wires as they are."""
        return self.bandwidth * min(ranks - 1, self.wires) / self.wires


@dataclass(frozen=True)
class Efficiency:
    """The fractions of the peaks that are reached, each in (0, 1]."""

    matmul: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0


@dataclass(frozen=True)
class Hardware:
    """Nodes of equal GPUs.

    Attributes:
        flops: peak FLOP/s of matmuls by dtype, dense; "float8" stands for all of its formats.
        memory_bandwidth: bytes/s of a GPU's memory; memory: its size in bytes.
        node: GPUs in a node; link: between those; network: between nodes, the share of one GPU.
        efficiency: what is reached of the peaks.
    """

    name: str
    description: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: float
    node: int
    link: Link
    network: Link
    efficiency: Efficiency = Efficiency()

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls of ``dtype``; of float32, where the GPU does not have it."""
        family = dtype.partition("_")[0]
        return self.flops.get(dtype, self.flops.get(family, self.flops["float32"]))

    @functools.cached_property
    def reached(self) -> Hardware:
        """The same with what is reached in place of the peaks."""
        share = self.efficiency
        return dataclasses.replace(
            self,
            flops=FrozenMap({dtype: peak * share.matmul for dtype, peak in self.flops.items()}),
            memory_bandwidth=self.memory_bandwidth * share.memory,
            link=self.link.at(share.link),
            network=self.network.at(share.network),
            efficiency=Efficiency(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in the form of a hardware file."""
        return {**dataclasses.asdict(self), "flops": dict(self.flops)}


@functools.cache
def shipped_hardware() -> Mapping[str, Hardware]:
    """What ships with the package, by name."""
    reader = _Reader()
    root = reader.root(_SHIPPED)
    found = {key.text: reader.hardware(key.text, node) for key, node in root.entries}
    reader.done()
    return FrozenMap(found)


def load_hardware(source: HardwareSource) -> Hardware:
    """Hardware by the name of a shipped profile, or from a YAML file.

    A file has the keys of a profile in ``hardware.yaml``; with ``extends: h100-nvlink`` it says
    only what differs from that one.

    Raises:
        PlanError: where there is none, or with everything that is wrong in the file, by line.
    """
    if isinstance(source, Hardware):
        return source
    name = os.fspath(source)
    shipped = shipped_hardware()
    if isinstance(source, str) and name in shipped:
        return shipped[name]
    if os.path.isfile(name):
        reader, path = _Reader(), Path(name)
        found = reader.hardware(path.stem, reader.root(path))
        reader.done()
        return found
    if os.path.isdir(name):
        message = f"{quoted(name)} is a directory, not a hardware file"
        raise PlanError([Diagnostic(message, hint="name a YAML file in it")])
    hint, guess = f"a YAML file, or one of {', '.join(shipped)}", suggest(name, shipped)
    if guess is not None:
        hint = f"did you mean '{guess}'? ({hint})"
    raise PlanError([Diagnostic(f"there is no hardware {quoted(name)}", hint=hint)])


# --- files


@dataclass(frozen=True)
class _Number:
    """A number that a profile says: positive, and at most ``most``."""

    unit: str
    most: float = math.inf
    whole: bool = False
    needed: bool = True


_Schema: TypeAlias = "Mapping[str, _Number | _Schema]"

_FLOPS = _Number("FLOP/s", needed=False)
_FRACTION = _Number("a fraction of the peak", most=1.0)
_LINK: _Schema = {
    "bandwidth": _Number("bytes/s in one direction"),
    "latency": _Number("seconds"),
    "wires": _Number("wires", whole=True, needed=False),
}
_PROFILE: _Schema = {
    "flops": {
        "float32": _Number("FLOP/s"),
        "bfloat16": _FLOPS,
        "float16": _FLOPS,
        "float8": _FLOPS,
        "float64": _FLOPS,
    },
    "memory_bandwidth": _Number("bytes/s"),
    "memory": _Number("bytes"),
    "node": _Number("GPUs", whole=True),
    "link": _LINK,
    "network": _LINK,
    "efficiency": {field.name: _FRACTION for field in dataclasses.fields(Efficiency)},
}
_TEXTS = ("description", "extends")
# YAML reads 450e9 as text: it wants 450.0e+9
_SIGNED = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?")


class _Reader(Values):
    """Reads profiles; problems are collected, and raised in the end."""

    def root(self, path: Path) -> MappingNode:
        """The mapping that the file is."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            message = f"{path}: cannot be read: {error.strerror}"
            raise PlanError([Diagnostic(message)]) from None
        except UnicodeDecodeError:
            raise PlanError([Diagnostic(f"{path}: not UTF-8 text")]) from None
        root, problems = read_tree(text, str(path), _WHAT)
        self.problems += problems
        if isinstance(root, MappingNode):
            return root
        if root is None:
            self.problems.append(Diagnostic(f"{path}: the file is empty", hint=_keys(_PROFILE)))
        else:
            self.mismatch(root, f"a {_WHAT}", "a mapping", _keys(_PROFILE))
        raise PlanError(self.problems)

    def done(self) -> None:
        """Raise what was found."""
        if self.problems:
            raise PlanError(self.problems)

    def hardware(self, name: str, node: Node) -> Hardware:
        """A profile; of use only where nothing was found wrong in the end."""
        if not isinstance(node, MappingNode):
            self.mismatch(node, f"'{name}'", "a mapping", _keys(_PROFILE))
            return _NONE
        before = len(self.problems)
        texts = {key.text: value for key, value in node.entries if key.text in _TEXTS}
        rest = tuple(entry for entry in node.entries if entry[0].text not in texts)
        inherited: dict[str, Any] = {"description": ""}
        if "extends" in texts:
            base = self.choice(texts["extends"], "'extends'", shipped_hardware())
            inherited = inherited if base is None else shipped_hardware()[base].to_dict()
        description = inherited["description"]
        if "description" in texts:
            description = self.text(texts["description"], "'description'") or ""
        values = self.values(MappingNode(node.position, rest), "the hardware", _PROFILE, inherited)
        if len(self.problems) > before:
            return _NONE
        return Hardware(
            name=name,
            description=description.strip(),
            flops=FrozenMap(values.pop("flops")),
            link=Link(**values.pop("link")),
            network=Link(**values.pop("network")),
            efficiency=Efficiency(**values.pop("efficiency")),
            **values,
        )

    def values(
        self, node: Node, what: str, schema: _Schema, inherited: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a mapping says, and where it says nothing what is inherited."""
        found = {key: inherited[key] for key in schema if key in inherited}
        entries = self.mapping(node, what, "a mapping")
        if entries is None:
            return found
        for key, (key_node, value) in entries.items():
            kind = schema.get(key)
            if kind is None:
                known = (*schema, *_TEXTS) if schema is _PROFILE else tuple(schema)
                self.unknown(key_node, f"key of {what}", known, f"there are {', '.join(known)}")
            elif isinstance(kind, _Number):
                found[key] = self.number(value, f"'{key}'", kind)
            else:
                found[key] = self.values(value, f"'{key}'", kind, found.get(key, {}))
        for key, kind in schema.items():
            optional = isinstance(kind, _Number) and not kind.needed
            if key not in found and key not in entries and not optional:
                hint = f"{_said(key, kind)}; or start from a shipped one with 'extends: {DEFAULT}'"
                self.report(f"{what} does not say '{key}'", node.position, f"add {hint}")
        return found

    def number(self, node: Node, what: str, kind: _Number) -> float | int | None:
        """A positive number."""
        if kind.whole:
            return self.whole(node, what, 1)
        if not isinstance(node, Scalar) or not _SIGNED.fullmatch(node.text):
            hint = f"it is in {kind.unit}; without units and prefixes, for instance 450e9"
            self.mismatch(node, what, "a number", hint)
            return None
        value = float(node.text)
        if not 0 < value <= min(kind.most, 1e30):
            most = "" if kind.most == math.inf else f" and at most {kind.most:g}"
            self.report(f"{what} must be positive{most}, not {node.text}", node.position)
            return None
        return value


def _said(key: str, kind: _Number | _Schema) -> str:
    if isinstance(kind, _Number):
        return f"'{key}: ...', in {kind.unit}"
    return f"'{key}:' with {', '.join(kind)}"


def _keys(schema: _Schema) -> str:
    return f"its keys are {', '.join(_TEXTS)}, {', '.join(schema)}"


_NONE = Hardware("", "", FrozenMap(), 0.0, 0.0, 1, Link(0.0, 0.0), Link(0.0, 0.0))
