"""Files that are damaged or malicious: an error that says so, nothing read outside of them."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tpplan
from tests.thorough import THOROUGH
from tpplan.checkpoint.files import DTYPES, INDEX, LENGTH, SINGLE, stored_in
from tpplan.checkpoint.read import part_of


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(LENGTH, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), place: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": place}


EIGHT = bytes(8)
DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{", b"", "its header is no JSON"),
    "no text": (b"\xff\xfe", b"", "its header is no JSON"),
    "deep": (b"[" * 100_000, b"", "its header is no JSON"),
    "a list": ([1], b"", "its header is no JSON object"),
    "a number": ({"a": 1}, b"", "a is no JSON object"),
    "dtype": ({"a": entry("F31")}, EIGHT, "a has the dtype 'F31', which torch does not have"),
    "no dtype": ({"a": entry(None)}, EIGHT, "a has the dtype None"),
    "list of dtypes": ({"a": entry(["F32"])}, EIGHT, "a has the dtype"),
    "negative": ({"a": entry(shape=[-2])}, EIGHT, "a has no shape, or no place"),
    "fraction": ({"a": entry(shape=[2.0])}, EIGHT, "a has no shape, or no place"),
    "true": ({"a": entry(shape=[True, 2])}, EIGHT, "a has no shape, or no place"),
    "huge": ({"a": entry(shape=[2**62, 2**62])}, EIGHT, "is said to have 8 bytes"),
    "three ends": ({"a": entry(place=[0, 4, 8])}, EIGHT, "a has no shape, or no place"),
    "backwards": ({"a": entry(shape=[0], place=[8, 8])}, EIGHT, "a begins at byte 8"),
    "too few": ({"a": entry(place=[0, 4])}, EIGHT, "is said to have 4 bytes"),
    "beyond": ({"a": entry(place=[0, 8])}, bytes(4), "it has 4 bytes of numbers"),
    "more": ({"a": entry(place=[0, 8])}, bytes(9), "it has 9 bytes of numbers"),
    "overlap": (
        {"a": entry(place=[0, 8]), "b": entry(place=[4, 12])},
        bytes(12),
        "b begins at byte 4, what is before it ends at 8",
    ),
    "twice": (
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}',
        EIGHT,
        "its header has a name twice",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(tmp_path: Path, case: str) -> None:
    header, data, message = DAMAGED[case]
    with pytest.raises(tpplan.CheckpointError) as caught:
        stored_in(written(tmp_path / "file", header, data))
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize("data", [b"", b"1234", bytes(8), b"\xff" * 16, pickle.dumps({"a": 1})])
def test_no_safetensors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(tpplan.CheckpointError, match="no safetensors file"):
        stored_in(tmp_path / "file")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", 7, None]
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "secret")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(tpplan.CheckpointError, match="no file of the folder"):
        stored_in(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "there"}}', "there: cannot be read: No such file"),
        ('{"weight_map": {"b": "real"}}', "the index says that it holds b, it does not"),
    ],
)
def test_indexes(tmp_path: Path, text: str, message: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "real")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(tpplan.CheckpointError) as caught:
        stored_in(tmp_path)
    assert message in str(caught.value)


def test_folders_without_any(tmp_path: Path) -> None:
    with pytest.raises(tpplan.CheckpointError, match="no such file or folder"):
        stored_in(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(tpplan.CheckpointError, match="would run code when read, convert it"):
        stored_in(tmp_path)


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / SINGLE)
    stored = stored_in(tmp_path)
    assert {name: s.dtype for name, s in stored.items()} == dict(DTYPES)
    assert all(torch.equal(part_of(s, (0,), (3,)), tensors[n]) for n, s in stored.items())


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / SINGLE)
    stored = stored_in(tmp_path)["a"]
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-4])
    with pytest.raises(OSError, match="ends before its tensors do"):
        part_of(stored, (0,), (4,))


def test_mutations(tmp_path: Path) -> None:
    """Whatever is changed in a file, it is an error, or every tensor lies in the file."""
    generator = random.Random(0)
    save_file({"a": torch.randn(3, 4), "b": torch.ones(5, dtype=torch.int64)}, tmp_path / "good")
    good, file = (tmp_path / "good").read_bytes(), tmp_path / "file"
    refused = 0
    for _ in range(10_000 if THOROUGH else 1_000):
        data = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            kind, at = generator.randrange(4), generator.randrange(len(data) - 8)
            if kind == 0:
                data[at] = generator.randrange(256)
            elif kind == 1:
                del data[at : at + generator.randint(1, 8)]
            elif kind == 2:
                data[at:at] = generator.randbytes(generator.randint(1, 8))
            else:
                data[at : at + 8] = generator.choice([b"99999999", b'"a":{},"', bytes(8)])
        file.write_bytes(data)
        try:
            stored = stored_in(file)
        except tpplan.CheckpointError:
            refused += 1
            continue
        for one in stored.values():
            part = part_of(one, (0,) * len(one.shape), one.shape)
            assert one.start + part.nbytes <= len(data)
    assert refused > 500
