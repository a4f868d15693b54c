"""Plans from files, from shipped names and from Python data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tpplan.language.diagnostics import Diagnostic, PlanError, Position, quoted, suggest
from tpplan.language.parse import Source, parse
from tpplan.language.plan import Plan
from tpplan.language.source import MAX_DEPTH

MAX_BYTES = 2**20
SUFFIX = ".yaml"


def load(source: str | os.PathLike[str], *, search: Sequence[Path] = ()) -> Plan:
    """Read a plan from a file, or by its name from one of the ``search`` directories.

    Args:
        source: a path, or a shipped plan's name with or without ``.yaml``.

    Raises:
        PlanError: where it cannot be found, read or understood.
    """
    path = _find(os.fspath(source), search)
    text = _read_text(path)
    return parse(text, path.name, path=str(path), resolve=partial(_resolve, search=search))


def parse_mapping(
    data: Mapping[str, Any], name: str = "<mapping>", *, search: Sequence[Path] = ()
) -> Plan:
    """A plan from what its YAML would load as; diagnostics quote the YAML it amounts to.

    Args:
        search: where a plan that ``extends`` names is looked up, after the current directory.

    Raises:
        PlanError: where the data is not a plan.
    """
    text = yaml.dump(
        _plain(data, ()), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
    )
    return parse(text, name, resolve=partial(_resolve, search=search))


class _Dumper(yaml.SafeDumper):
    """Writes an object that occurs twice out twice, and every text on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_node(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def _plain(value: object, path: tuple[str, ...]) -> object:
    """``value`` as what YAML can write."""
    where = " -> ".join(path) or "the plan"
    if len(path) > MAX_DEPTH:
        raise PlanError([Diagnostic(f"a plan is nested at most {MAX_DEPTH} levels deep")])
    if isinstance(value, Mapping):
        return {_plain(key, path): _plain(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, str(index))) for index, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or type(value) in (bool, int, float):
        return value
    message = f"{where}: a {type(value).__name__} has no place in a plan"
    raise PlanError([Diagnostic(message, hint="use mappings, lists, text, numbers and true/false")])


# --- finding


def _named(name: str, directories: Sequence[Path]) -> list[Path]:
    """Where ``name`` would lie in each directory, as it is and with the suffix."""
    names = [name] if name.endswith(SUFFIX) else [name, name + SUFFIX]
    return [Path(directory) / each for directory in directories for each in names]


def _is_file(path: Path) -> bool:
    # Not Path.is_file, which raises for a name that is too long.
    return os.path.exists(path) and not os.path.isdir(path)


def _find(name: str, search: Sequence[Path]) -> Path:
    if not name:
        raise PlanError([Diagnostic("the name of the plan is empty")])
    for path in (Path(name), *_named(name, search)):
        if _is_file(path):
            return path
    if os.path.isdir(name):
        hint = "name a plan file in it"
        raise PlanError([Diagnostic(f"{quoted(name)} is a directory, not a plan", hint=hint)])
    raise PlanError([_missing(name, search, None)])


def _resolve(name: str, position: Position, *, search: Sequence[Path]) -> Source:
    """The plan that the file of ``position`` extends."""
    extender = Path(position.file)
    found = [p for p in _named(name, (extender.parent, *search)) if _is_file(p)]
    # A plan may bear the name of the shipped one that it extends.
    others = [p for p in found if not (_is_file(extender) and p.samefile(extender))]
    if not found:
        raise PlanError([_missing(name, (extender.parent, *search), position)])
    path = (others or found)[0]
    return Source(_read_text(path, position), path.name, str(path))


def _missing(name: str, search: Sequence[Path], position: Position | None) -> Diagnostic:
    if "\n" in name:
        hint = "write it to a file, or give its content as a mapping"
        return Diagnostic("this is the text of a plan, not its name", position, hint)
    directories = [Path(directory) for directory in search]
    files = [file for d in directories if d.is_dir() for file in sorted(d.glob(f"*{SUFFIX}"))]
    shipped = [file.name for file in files]
    guess = suggest(name, shipped) or suggest(name + SUFFIX, shipped)
    looked = [*([] if position else [name]), *(str(directory) for directory in directories)]
    hint = f"looked for {looked[0]}" if position is None else f"looked in {looked[0]}"
    if len(looked) > 1:
        hint += (" and in " if position is None else " and ") + ", ".join(looked[1:])
    if guess is not None:
        hint = f"did you mean '{guess}'? ({hint})"
    elif shipped and position is None:
        hint += f"; shipped plans are {', '.join(shipped)}"
    return Diagnostic(f"there is no plan {quoted(name)}", position, hint)


# --- reading


def _read_text(path: Path, position: Position | None = None) -> str:
    def unreadable(message: str, hint: str | None = None) -> PlanError:
        return PlanError([Diagnostic(f"{path}: {message}", position, hint)])

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise unreadable(f"larger than {MAX_BYTES // 2**10} KiB, which no plan is")
    if b"\0" in content:
        raise unreadable("a binary file, not a plan")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise unreadable(f"not UTF-8 text (line {line})", "save it as UTF-8") from None
    if not text.strip():
        raise unreadable("the file is empty", "a plan has 'tpplan: 1' and 'rules:'")
    return text
