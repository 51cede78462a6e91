"""Damaged and hostile checkpoints are rejected on all ranks, naming file and parameter."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from ranked import LIMITS
from stepscope.parallel import (
    FSDP,
    ParallelError,
    ShardedOptimizer,
    World,
    launch,
    load_optimizer,
    load_training,
    save_optimizer,
    save_training,
)
from stepscope.parallel.checkpoint.checksums import (
    BLOCK,
    CHECKSUMS,
    FileSums,
    read_checksums,
    write_checksums,
)
from stepscope.parallel.checkpoint.reading import _check_pickle
from stepscope.pickles import MAX_NESTED_TUPLES, UnsafePickleError

WIDTH = 520
"""A weight of 1.08 MB: files have several blocks, and ranks read parts that others wrote."""
DATA = ("__0_0.distcp", "__1_0.distcp")


def trained(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = FSDP(module)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH)).pow(2).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def write(_: World, folder: str) -> None:
    model, optimizer = trained(0)
    save_training(model, optimizer, f"{folder}/saved")
    model, optimizer = trained(1)
    save_training(model, optimizer, f"{folder}/other")
    params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(3))]
    sharded = ShardedOptimizer(params, torch.optim.AdamW)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    sharded.step()
    save_optimizer(sharded, f"{folder}/optimizer")
    # As written by versions without checksums.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            {
                "model.0.weight": torch.ones(WIDTH, WIDTH),
                "model.0.bias": torch.ones(WIDTH),
                "model.1.weight": torch.ones(WIDTH),
                "model.1.bias": torch.ones(WIDTH),
                "optimizer.step.0.bias": 3.0,
                "options": '[{"lr": 0.5}]',
            },
            checkpoint_id=f"{folder}/old",
        )


def load_each(_: World, folders: list[str]) -> dict[str, str]:
    """Per folder the error, or "loaded"; and whether a rejected checkpoint changed anything."""
    outcomes = {}
    for folder in folders:
        if Path(folder).name.startswith("optimizer"):
            params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(3))]
            sharded = ShardedOptimizer(params, torch.optim.AdamW)
            outcomes[folder] = outcome(lambda: load_optimizer(sharded, folder))  # noqa: B023
            continue
        model, optimizer = trained(2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        outcomes[folder] = outcome(lambda: load_training(model, optimizer, folder))  # noqa: B023
        same = all(torch.equal(before[n], v) for n, v in model.state_dict().items())
        if same is (outcomes[folder] == "loaded"):
            outcomes[folder] += ", but the model " + ("is unchanged" if same else "has changed")
    return outcomes


def outcome(load: Callable[[], None]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load()
        except ParallelError as error:
            return str(error)
    messages = [str(w.message) for w in caught if "checksums" in str(w.message)]
    return "loaded" + "".join(f" with: {text}" for text in messages)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    launch(write, (str(folder),), ranks=2, limits=LIMITS)
    return folder


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x20
    path.write_bytes(data)


def entries_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes()).storage_data


class Damage:
    """Copies of a checkpoint, each with one kind of damage, and the expected error text."""

    def __init__(self, written: Path, folder: Path) -> None:
        self._written, self._folder = written, folder
        self.words: dict[str, tuple[str, ...]] = {}

    def copy(self, name: str, *words: str, of: str = "saved") -> Path:
        path = self._folder / name
        shutil.copytree(self._written / of, path)
        self.words[str(path)] = words
        return path


def damaged(written: Path, folder: Path) -> dict[str, tuple[str, ...]]:
    damage = Damage(written, folder)
    stored = entries_of(written / "saved")
    for index, info in stored.items():
        if info.length < BLOCK // 8 and info.relative_path != DATA[0]:
            continue
        path = damage.copy(
            f"flipped-{index.fqn}-{info.relative_path}", info.relative_path, "is damaged", index.fqn
        )
        flip(path / info.relative_path, info.offset + info.length // 2)
    for name in DATA:
        size = (written / "saved" / name).stat().st_size
        # The first and last bytes contain archive headers, which torch does not read.
        for at in (0, size - 1):
            flip(damage.copy(f"flipped-{name}-{at}", name, "is damaged") / name, at)
        path = damage.copy(
            f"truncated-{name}", name, f"has {size - 100} bytes", last_in(written, name)
        )
        os.truncate(path / name, size - 100)
        path = damage.copy(f"empty-{name}", name, "has 0 bytes", "model.0.weight")
        os.truncate(path / name, 0)
        path = damage.copy(f"longer-{name}", name, f"has {size + 1} bytes instead of {size}")
        with (path / name).open("ab") as file:
            file.write(b"\0")
        (damage.copy(f"missing-{name}", name, "is missing", "it contains") / name).unlink()
        path = damage.copy(f"exchanged-{name}", name, "is damaged", "0.weight")
        shutil.copy(written / "other" / name, path / name)
    path = damage.copy("extra", "__2_0.distcp is not a file of this checkpoint")
    shutil.copy(path / DATA[0], path / "__2_0.distcp")
    for name in (".metadata", CHECKSUMS):
        size = (written / "saved" / name).stat().st_size
        for at in (0, 8, size // 2, size - 1):
            flip(damage.copy(f"flipped-{name}-{at}", name, "is damaged") / name, at)
        os.truncate(damage.copy(f"truncated-{name}", name, "damaged") / name, size // 2)
        os.truncate(damage.copy(f"empty-{name}", name, "damaged") / name, 0)
        (damage.copy(f"missing-{name}", name) / name).unlink()
        path = damage.copy(f"exchanged-{name}", "is damaged")
        shutil.copy(written / "other" / name, path / name)
    # Without checksums, damage that can be detected is reported as well.
    for name in (n for n in DATA if entries_in(written / "old", n)):
        path = damage.copy(f"old-truncated-{name}", name, "bytes instead of", of="old")
        os.truncate(path / name, (path / name).stat().st_size - 100)
    return damage.words


def last_in(written: Path, name: str) -> str:
    entries = [
        (v.offset, k.fqn)
        for k, v in entries_of(written / "saved").items()
        if v.relative_path == name
    ]
    return max(entries)[1]


def entries_in(folder: Path, name: str) -> list[str]:
    return [i.fqn for i, info in entries_of(folder).items() if info.relative_path == name]


@pytest.mark.parametrize("ranks", [1, 3])
def test_damage_is_rejected_with_file_and_parameter(
    written: Path, tmp_path: Path, ranks: int
) -> None:
    words = damaged(written, tmp_path)
    intact = [str(written / "saved"), str(written / "optimizer")]
    outcomes = launch(load_each, ([*intact, *words],), ranks=ranks, limits=LIMITS)
    assert all(other == outcomes[0] for other in outcomes), "the same error on all ranks"
    for folder in intact:
        assert outcomes[0][folder] == "loaded"
    for folder, expected in words.items():
        text = outcomes[0][folder]
        assert "\n" not in text
        for part in expected:
            assert part in text, f"{folder}: {text}"


def test_a_checkpoint_without_checksums_loads_with_a_warning(written: Path) -> None:
    first, second = launch(load_each, ([str(written / "old")],), ranks=2, limits=LIMITS)
    (text,) = first.values()
    assert text.startswith("loaded with: ")
    assert "old has no checksums" in text
    assert [*second.values()] == ["loaded"], "rank 0 warns for all"


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def planted(written: Path, folder: Path, mark: Path) -> list[str]:
    """Copies with a payload in each file and valid checksums, as an attacker would make them."""
    paths = []
    for of in ("saved", "optimizer", "old"):
        metadata = pickle.loads((written / of / ".metadata").read_bytes())
        for number, index in enumerate(metadata.storage_data):
            path = folder / f"{of}-entry-{number}"
            shutil.copytree(written / of, path)
            info = metadata.storage_data[index]
            with (path / info.relative_path).open("ab") as file:
                begin = file.tell()
                torch.save(Payload(mark), file)
                moved = type(info)(info.relative_path, begin, file.tell() - begin)
            changed = {**metadata.storage_data, index: moved}
            pickled = pickle.dumps(
                type(metadata)(metadata.state_dict_metadata, storage_data=changed)
            )
            (path / ".metadata").write_bytes(pickled)
            paths.append(path)
        for name in (".metadata", CHECKSUMS):
            path = folder / f"{of}-file-{name}"
            shutil.copytree(written / of, path)
            (path / name).write_bytes(pickle.dumps(Payload(mark)))
            paths.append(path)
    for path in paths:
        if (path / CHECKSUMS).exists() and not path.name.endswith(CHECKSUMS):
            sums = {}
            for file in path.iterdir():
                if file.name != CHECKSUMS:
                    sums[file.name] = FileSums()
                    sums[file.name].add(file.read_bytes())
            write_checksums(path, sums)
    return [str(path) for path in paths]


def test_loading_does_not_run_code_from_any_file(written: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folders = planted(written, tmp_path, mark)
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.is_dir(), "the payload works"
    mark.rmdir()
    (outcomes,) = launch(load_each, (folders,), ranks=1, limits=LIMITS)
    assert not mark.exists()
    loaded = [folder for folder, text in outcomes.items() if text.startswith("loaded")]
    assert not loaded, loaded


@pytest.mark.parametrize("depth", [1, MAX_NESTED_TUPLES + 1])
def test_the_pickle_of_an_item_is_checked(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "items"
    with file.open("wb") as stream:
        stream.write(b"an item before")
        begin = stream.tell()
        with zipfile.ZipFile(stream, "w") as item:
            item.writestr("archive/data.pkl", b"\x80\x02)" + b"\x85" * depth + b".")
        length = stream.tell() - begin
        stream.write(b"an item after")
    with nullcontext() if depth == 1 else pytest.raises(UnsafePickleError, match="nested"):
        _check_pickle(file, begin, length)


def test_checksums_cover_every_file(written: Path) -> None:
    for of in ("saved", "other", "optimizer"):
        folder = written / of
        sums = read_checksums(folder)
        assert sums is not None
        assert {p.name for p in folder.iterdir()} == {*sums, CHECKSUMS}
        for name, file_sums in sums.items():
            assert file_sums.matches((folder / name).read_bytes()), name
        if of == "saved":
            assert len(sums[DATA[0]].crcs) > 1, "several blocks"


def save_into_links(_: World, folder: str) -> list[str]:
    model, optimizer = trained(0)
    return [
        outcome(lambda: save_training(model, optimizer, f"{folder}/{name}"))  # noqa: B023
        for name in ("unfinished", "dangling")
    ]


def test_a_link_in_place_of_a_checkpoint_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for made in (outside, folder):
        made.mkdir()
    (folder / "unfinished.part").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "missing")
    (outcomes,) = launch(save_into_links, (str(folder),), ranks=1, limits=LIMITS)
    assert ["in the way" in outcomes[0], "exists already" in outcomes[1]] == [True, True]
    assert not [*outside.iterdir()]
    assert {path.name for path in folder.iterdir() if path.is_symlink()} == {
        "unfinished.part",
        "dangling",
    }
