"""Checkpoint metadata is read as data: hostile and damaged files are rejected."""

from __future__ import annotations

import ast
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import stepscope
from stepscope.parallel.checkpoint.metadata import parse_metadata
from stepscope.parallel.errors import ParallelError
from stepscope.pickles import MAX_NESTED_TUPLES, UnsafePickleError, check


def metadata(**changes: Any) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), torch.Size((2, 3)), [chunk]
    )
    scalar = TensorStorageMetadata(TensorProperties(), torch.Size(()), [])
    fields = {
        "state_dict_metadata": {"w": tensor, "s": scalar, "o": BytesStorageMetadata()},
        "planner_data": {"w": ("w",)},
        "storage_data": {
            MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 90),
            MetadataIndex("o"): _StorageInfo("__1_0.distcp", 90, 10),
        },
        "storage_meta": StorageMeta(Path("/somewhere"), "id"),
        "version": "1.0.0",
    }
    return Metadata(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_reads_what_torch_writes(protocol: int) -> None:
    written = metadata()
    read = parse_metadata(pickle.dumps(written, protocol))
    assert read.state_dict_metadata == written.state_dict_metadata
    assert read.storage_data == written.storage_data
    assert read.state_dict_metadata["w"].properties.dtype is torch.bfloat16  # type: ignore[union-attr]


class Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


def test_names_in_the_file_are_not_imported_or_called(tmp_path: Path) -> None:
    mark = str(tmp_path / "ran")
    for payload in (Calls(os.mkdir, mark), Calls(eval, f"__import__('os').mkdir({mark!r})")):
        for data in (payload, metadata(planner_data=payload), metadata(version=payload)):
            with pytest.raises(ParallelError, match="does not need"):
                parse_metadata(pickle.dumps(data))
    assert not Path(mark).exists()


def test_classes_of_torch_cannot_be_changed() -> None:
    """BUILD with a slot state sets attributes of the object on the stack, even of a class."""
    names = b"ctorch.distributed.checkpoint.metadata\n"
    data = b"\x80\x02" + names + b"Metadata\n(N}X\x07\x00\x00\x00version\x88stb."
    with pytest.raises(ParallelError):
        parse_metadata(data)
    assert Metadata.version is None
    dotted = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93."
    with pytest.raises(ParallelError, match="does not need"):
        parse_metadata(dotted)


@pytest.mark.parametrize(
    "path", ["../other/__0_0.distcp", "/etc/passwd", "__0_0.distcp\n", ".metadata", ""]
)
def test_data_is_only_read_from_the_folder(path: str) -> None:
    with pytest.raises(ParallelError, match="it stores data in"):
        parse_metadata(
            pickle.dumps(metadata(storage_data={MetadataIndex("w"): _StorageInfo(path, 0, 1)}))
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": {"w": 3}},
        {"state_dict_metadata": {3: BytesStorageMetadata()}},
        {"storage_data": {"w": _StorageInfo("__0_0.distcp", 0, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("__0_0.distcp", -1, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, "1")}},  # type: ignore[arg-type]
    ],
)
def test_values_of_other_types_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ParallelError, match="it is damaged"):
        parse_metadata(pickle.dumps(metadata(**changes)))


def test_every_truncation_is_rejected() -> None:
    data = pickle.dumps(metadata())
    for length in range(len(data)):
        with pytest.raises(ParallelError, match="it is damaged"):
            parse_metadata(data[:length])


SAFE = "weights_only"
RUN_CODE = {"pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "torch.load", "eval"}


def test_no_file_is_read_as_code() -> None:
    """Pickled and marshalled data is only accepted from live processes of the same job."""
    calls = set()
    last_words = {name.rpartition(".")[2] for name in RUN_CODE}
    for file in Path(stepscope.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        safe = {
            node.func
            for node in nodes
            if isinstance(node, ast.Call)
            and any(ast.unparse(k) == "weights_only=True" for k in node.keywords if k.arg == SAFE)
        }
        for node in nodes:
            last = getattr(node, "attr", None) or getattr(node, "id", None)
            if last in last_words and node not in safe and ast.unparse(node) in RUN_CODE:
                calls.add(f"{file.name}: {ast.unparse(node)}")
    assert calls == {"pickling.py: pickle.loads", "pickling.py: marshal.loads"}


def test_tuples_are_many_but_not_deep() -> None:
    """One pass bounds the nesting by the number of tuples; larger files have their levels
    counted."""
    sizes = {
        f"w{n}": TensorStorageMetadata(TensorProperties(), torch.Size((n, 2)), [])
        for n in range(MAX_NESTED_TUPLES)
    }
    data = pickle.dumps(metadata(state_dict_metadata=sizes))
    with pytest.raises(UnsafePickleError, match="more than 2,000 tuples"):
        check(data)
    assert parse_metadata(data).state_dict_metadata == sizes


EMPTY, TUPLE, GET, PUT = b")", b"\x85", b"h\x00", b"q\x00"
DEEP = MAX_NESTED_TUPLES + 1
NESTED = {
    "tuples of one": EMPTY + TUPLE * DEEP,
    "tuples after marks": b"(" * DEEP + EMPTY + b"t" * DEEP,
    "tuples from the memo": EMPTY + PUT + (b"0" + GET + TUPLE + PUT) * DEEP,
    "tuples of three": EMPTY + b"NN\x87" * DEEP,
    "duplicated tuples": EMPTY + b"2\x86" * DEEP,
    "text memo": EMPTY + b"p0\n" + b"0g0\n\x85p0\n" * DEEP,
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_tuples_are_refused(name: str) -> None:
    """As the key of a dictionary, they would be hashed by recursion on the C stack."""
    with pytest.raises(ParallelError, match=r"nested in more than 2,000 levels|each other"):
        parse_metadata(b"\x80\x04}" + NESTED[name] + b"Ns.")
    check(b"\x80\x04}" + EMPTY + TUPLE * (MAX_NESTED_TUPLES - 1) + b"Ns.", many_tuples=True)


@pytest.mark.parametrize("many_tuples", [False, True])
@pytest.mark.parametrize("doubled", [b"2\x86", b"q\x000h\x00h\x00\x86", b"q\x000(h\x00h\x00h\x00t"])
def test_tuples_that_contain_one_tuple_twice_are_refused(doubled: bytes, many_tuples: bool) -> None:
    """Hashing the key would visit 2**60 elements."""
    with pytest.raises(UnsafePickleError, match="each other too often"):
        check(b"\x80\x04}" + EMPTY + doubled * 60 + b"Ns.", many_tuples=many_tuples)


@pytest.mark.parametrize(
    "data", [b"\x80\x04Nr\xff\xff\xff\x0b.", b"\x80\x04\x96" + b"\xff" * 7 + b"\x00."]
)
def test_a_few_bytes_do_not_allocate_gigabytes(data: bytes) -> None:
    with pytest.raises(ParallelError, match=r"memo index|announces more bytes"):
        parse_metadata(data)


def test_every_pickle_of_a_file_is_loaded_by_one_module() -> None:
    """`parallel.pickling` loads what the ranks of a job send each other."""
    source = Path(stepscope.__file__).parent
    loading = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if re.search(r"pickle\.(Unpickler|loads?)\b", file.read_text())
    }
    assert loading == {"pickles.py", "parallel/pickling.py"}
