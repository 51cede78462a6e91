"""Read a checkpoint: every byte is verified before it is used, and no code in it is executed."""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from stepscope.errors import StepscopeError, one_line, some
from stepscope.files import read_limited
from stepscope.parallel.checkpoint.checksums import BLOCK, CHECKSUMS, FileSums, read_checksums
from stepscope.parallel.checkpoint.metadata import parse_metadata
from stepscope.parallel.errors import ParallelError
from stepscope.pickles import check

_METADATA = ".metadata"
MAX_METADATA_BYTES = 64 << 20
"""Size of the metadata, and of the pickle of an item: 400,000 pieces of tensors."""
_NAMED = 3
"""Number of parameters listed in an error message; the others are counted."""
_HINT = "restore the file or load another checkpoint"


class VerifyingReader(FileSystemReader):
    """Open the checkpoint in `folder`; raise if its files are not those that were written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self.sums = read_checksums(folder)
        """None for a checkpoint that was written without checksums."""
        self._verified: set[tuple[str, int]] = set()
        self.metadata = self._parsed()
        self._check_files()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            # One by one, so that an error names the file and the parameter.
            self._read(item, plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, plan: LoadPlan, planner: LoadPlanner) -> None:
        stored = self.storage_data[item.storage_index]
        try:
            self._verify(stored.relative_path, stored.offset, stored.offset + stored.length)
            path = self._folder / stored.relative_path
            _check_pickle(path, stored.offset, stored.length)
            super().read_data(dataclasses.replace(plan, items=[item]), planner).wait()
        except ParallelError:
            raise
        # A damaged file can make torch raise anything, some of it without a message.
        except Exception as error:
            raise ParallelError(
                f"{self._folder / stored.relative_path} cannot be read:"
                f" {item.storage_index.fqn}: {one_line(error)}",
                _HINT,
            ) from error

    def _parsed(self) -> Metadata:
        path = self._folder / _METADATA
        try:
            data = read_limited(path, MAX_METADATA_BYTES, "save fewer, larger tensors")
        except OSError as error:
            raise ParallelError(
                f"{self._folder} is not a checkpoint: {path} cannot be read: {error.strerror}"
            ) from error
        except StepscopeError as error:
            raise ParallelError(str(error)) from error
        if self.sums is not None and not self.sums.get(_METADATA, FileSums()).matches(data):
            raise ParallelError(f"{path} is damaged: its checksum does not match", _HINT)
        try:
            metadata = parse_metadata(data)
        except ParallelError as error:
            raise ParallelError(f"{path} is not the metadata of a checkpoint: {error}") from error
        if self.sums is None and CHECKSUMS in metadata.state_dict_metadata:
            raise ParallelError(f"{self._folder / CHECKSUMS} is missing", _HINT)
        return metadata

    def _check_files(self) -> None:
        """Check that every file exists in its full size and that there is no other data file."""
        expected = {} if self.sums is None else {n: s.size for n, s in self.sums.items()}
        for index, stored in self.metadata.storage_data.items():
            name, end = stored.relative_path, stored.offset + stored.length
            if self.sums is not None and end > expected.get(name, 0):
                raise ParallelError(
                    f"{self._folder / _METADATA} locates {index.fqn} outside of {name}", _HINT
                )
            expected[name] = max(expected.get(name, 0), end)
        for name, size in expected.items():
            path = self._folder / name
            actual = path.stat().st_size if path.is_file() else None
            # Without checksums only the end of the last parameter is known.
            if actual is None or actual < size or (self.sums is not None and actual != size):
                what = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
                raise ParallelError(f"{path} {what}{self._contents(name, 0, size)}", _HINT)
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".distcp" and path.name not in expected:
                raise ParallelError(
                    f"{path} is not a file of this checkpoint", "remove it, or load another one"
                )

    def _verify(self, name: str, begin: int, end: int) -> None:
        """Raise unless these bytes of the file are those that were written."""
        if self.sums is None:
            return
        with (self._folder / name).open("rb") as file:
            for block in range(begin // BLOCK, -(-end // BLOCK)):
                if (name, block) in self._verified:
                    continue
                file.seek(block * BLOCK)
                if zlib.crc32(file.read(BLOCK)) != self.sums[name].crcs[block]:
                    raise ParallelError(
                        f"{self._folder / name} is damaged: its checksum does not match"
                        f"{self._contents(name, block * BLOCK, (block + 1) * BLOCK)}",
                        _HINT,
                    )
                self._verified.add((name, block))

    def _contents(self, name: str, begin: int, end: int) -> str:
        """Name the parameters in these bytes of a file; only the damaged ones if known."""
        stored_here = {
            index.fqn: stored
            for index, stored in self.metadata.storage_data.items()
            if stored.relative_path == name
            and stored.offset < end
            and begin < stored.offset + stored.length
        }
        path = self._folder / name
        names = [n for n, s in stored_here.items() if not _intact(path, s.offset, s.length)] or [
            *stored_here
        ]
        return f"; it contains {some(names, _NAMED)}" if names else ""


def _intact(path: Path, offset: int, length: int) -> bool:
    """True if an item, which is a zip archive, matches its internal checksums."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                return archive.testzip() is None
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False


class DataPlanner(DefaultLoadPlanner):
    """Load non-tensor entries with `weights_only=True`; torch's default planner unpickles them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Slice(io.RawIOBase):
    """A range of bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        part = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _check_pickle(path: Path, offset: int, length: int) -> None:
    """Check the pickle of an item, which is a zip archive of `torch.save`: with `weights_only`
    torch restricts what a pickle calls, not how deeply its tuples are nested."""
    with path.open("rb") as file, zipfile.ZipFile(_Slice(file, offset, length)) as item:
        pickles = [info for info in item.infolist() if info.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_METADATA_BYTES:
            raise ValueError("it does not have one pickle of a supported size")
        check(item.read(pickles[0]), many_tuples=True)
