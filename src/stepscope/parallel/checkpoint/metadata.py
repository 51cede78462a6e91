"""Read the metadata of a torch.distributed.checkpoint without running code from the file.

`.metadata` is a pickle, and `FileSystemReader` unpickles it directly: whatever the file names is
imported and called. Here an unpickler builds inert stand-ins for the few classes that metadata
consists of, rejects every other name, and the real objects are created from validated values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

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

from stepscope.errors import StepscopeError
from stepscope.parallel.errors import ParallelError
from stepscope.pickles import GuardedUnpickler, UnsafePickleError

T = TypeVar("T")
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
"""File names of `FileSystemWriter`; a path from the file must not leave the folder."""
_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
}


class _StandIn:
    """Stores the arguments and the state that the pickle gives an object."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(GuardedUnpickler):
    kind = "checkpoint metadata"

    def __init__(self, data: bytes) -> None:
        super().__init__(data, many_tuples=True)
        # New classes for each call: a pickle can set attributes of a class that it is given.
        self._stand_ins: dict[str, type[_StandIn]] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if global_name not in _NAMES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if global_name not in self._stand_ins:
            self._stand_ins[global_name] = type(global_name, (_StandIn,), {})
        return self._stand_ins[global_name]


def parse_metadata(data: bytes) -> Metadata:
    """Parse the tensors of a checkpoint and their locations. Raise on anything unexpected."""
    try:
        fields = _state(_Unpickler(data).load(), "Metadata")
        entries = {
            _checked(name, str): _entry(value)
            for name, value in _checked(fields["state_dict_metadata"], dict).items()
        }
        stored = {
            _index(key): _location(value)
            for key, value in _checked(fields["storage_data"], dict).items()
        }
    except ParallelError:
        raise
    except StepscopeError as error:
        raise ParallelError(str(error)) from error
    except UnsafePickleError as error:
        raise ParallelError(f"it is damaged: {error}") from error
    # A damaged pickle can raise any exception that its opcodes allow.
    except Exception as error:
        raise ParallelError(f"it is damaged: {type(error).__name__}") from error
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def _state(value: Any, *kinds: str) -> Mapping[str, Any]:
    """Attributes of a stand-in for a class with one of these names."""
    if not isinstance(value, _StandIn) or type(value).__name__ not in kinds:
        raise TypeError(f"{type(value).__name__} instead of {' or '.join(kinds)}")
    return _checked(getattr(value, "state", {}), dict)


def _checked(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, _StandIn) or type(value).__name__ != "Size":
        raise TypeError(f"{type(value).__name__} instead of Size")
    (numbers,) = value.args
    return torch.Size([_count(size) for size in _checked(numbers, tuple)])


def _count(value: Any) -> int:
    if _checked(value, int) < 0:
        raise ValueError(f"{value} is negative")
    return value  # type: ignore[no-any-return]


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    fields = _state(value, "TensorStorageMetadata", "BytesStorageMetadata")
    if type(value).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    properties = fields["properties"]
    if type(properties).__name__ != "TensorProperties":
        raise TypeError("a tensor has no properties")
    dtype = _checked(_checked(properties.state, tuple)[0], torch.dtype)
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _checked(fields["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    fields = _state(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _checked(fields["fqn"], str),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _location(value: Any) -> _StorageInfo:
    fields = _state(value, "_StorageInfo")
    if not _DATA_FILE.fullmatch(_checked(fields["relative_path"], str)):
        raise ParallelError(
            f"it stores data in {fields['relative_path']!r:.80}, not in a data file"
        )
    if fields.get("transform_descriptors"):
        raise ParallelError("it stores transformed data, which is not supported")
    return _StorageInfo(fields["relative_path"], _count(fields["offset"]), _count(fields["length"]))
