"""Collectives of the user's code on one rank: a log of them, and results that need a wait.

A result of an asynchronous collective becomes visible when its work is waited for, not before:
the collective runs on a copy, at once and in the order of issue, and `wait` writes the result back.
Code that does not wait then fails in every run, where a real race would often be won. The log
survives the rank, so that a hang can be named by the collectives in which the ranks wait.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from stepscope.grading.criteria.implementation import in_folder

_OUTPUTS = {"gather": "gather_list"}
"""Parameter that receives the result, where it is not the first one."""


class Entry(NamedTuple):
    """One collective of a rank: what it moves, where it was called, and whether it is done."""

    operation: str
    numel: int
    dtype: str
    where: str
    done: bool = False

    @property
    def what(self) -> str:
        return f"{self.operation} of {self.numel} {self.dtype}" if self.numel else self.operation


def log_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"collectives-{rank}.jsonl"


def read_log(folder: str, rank: int) -> list[Entry]:
    """The collectives that a rank has issued, in order."""
    entries: list[Entry] = []
    try:
        lines = log_file(folder, rank).read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        event = json.loads(line)
        if isinstance(event, int):
            entries[event] = entries[event]._replace(done=True)
        else:
            entries.append(Entry(*event))
    return entries


class Collectives:
    """Replaces the functions of torch.distributed in this process."""

    def __init__(self, folder: str, rank: int, users: str) -> None:
        self._log: TextIO = log_file(folder, rank).open("w", buffering=1)
        self._users = users
        self._count = 0
        self._pending: dict[int, str] = {}
        for name, function in list(vars(dist).items()):
            # Not `isinstance`, which makes deprecated names warn.
            if type(function) is not FunctionType:
                continue
            parameters = inspect.signature(function).parameters
            if "async_op" in parameters:
                output = _OUTPUTS.get(name, next(iter(parameters)))
                replaced = self._observed(name, function, output)
            elif name in ("barrier", "all_gather_object", "broadcast_object_list", "recv", "send"):
                replaced = self._observed(name, function, "")
            else:
                continue
            setattr(dist, name, replaced)
            if hasattr(distributed_c10d, name):
                setattr(distributed_c10d, name, replaced)

    def not_waited_for(self) -> list[str]:
        """Where the collectives were issued that nothing has waited for yet."""
        return list(dict.fromkeys(self._pending.values()))

    def _observed(self, name: str, function: Callable[..., Any], output: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def observed(*arguments: Any, **named: Any) -> Any:
            where = self._caller()
            # Within torch, and inside a coalescing manager, there is no work to wait for.
            if not where or distributed_c10d._world.pg_coalesce_state:
                return function(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            target = bound.arguments.get(output)
            number = self._issued(name, target, where)
            if not bound.arguments.get("async_op"):
                result = function(*arguments, **named)
                self._done(number)
                return result
            bound.arguments[output] = _copied(target)
            work = function(*bound.args, **bound.kwargs)
            if work is None:
                # This rank is not in the group.
                self._done(number)
                return work
            self._pending[number] = where
            return _Work(self, number, work, target, bound.arguments[output])

        return observed

    def _caller(self) -> str:
        """File and line of the user's code, if the call comes from it directly."""
        frame = sys._getframe(2)
        if in_folder(frame.f_code.co_filename, self._users):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return ""

    def _issued(self, name: str, target: Any, where: str) -> int:
        tensors = list(_tensors(target))
        numel = sum(x.numel() for x in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self._log.write(json.dumps([name, numel, dtype, where]) + "\n")
        self._count += 1
        return self._count - 1

    def _done(self, number: int) -> None:
        self._pending.pop(number, None)
        self._log.write(f"{number}\n")


class _Work:
    """The work of an asynchronous collective; its result is visible once it is waited for."""

    def __init__(self, of: Collectives, number: int, work: Any, target: Any, result: Any) -> None:
        self._of, self._number, self._work = of, number, work
        self._target, self._result = target, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *arguments: Any) -> Any:
        answer = self._work.wait(*arguments)
        self._show()
        return answer

    def synchronize(self) -> None:
        self._work.synchronize()
        self._show()

    def is_completed(self) -> bool:
        completed = bool(self._work.is_completed())
        if completed:
            self._show()
        return completed

    def get_future(self) -> Any:
        def shown(_: Any) -> Any:
            self._show()
            return self._target if isinstance(self._target, list) else [self._target]

        return self._work.get_future().then(shown)

    @torch.no_grad()
    def _show(self) -> None:
        for target, result in zip(_tensors(self._target), _tensors(self._result), strict=True):
            target.copy_(result)
        self._target = self._result = ()
        self._of._done(self._number)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def describe(folder: str, ranks: int) -> str:
    """Which collectives of the ranks do not match, or in which they wait; empty if unknown."""
    logs = [read_log(folder, rank) for rank in range(ranks)]
    first, *others = logs
    for other, entries in enumerate(others, 1):
        for number, (one, two) in enumerate(zip(first, entries, strict=False), 1):
            if (one.operation, one.numel, one.dtype) != (two.operation, two.numel, two.dtype):
                return (
                    f"the ranks issue different collectives: number {number} is {one.what}"
                    f" ({one.where}) on rank 0 and {two.what} ({two.where}) on rank {other}"
                )
        if len(first) != len(entries):
            more, less = (0, other) if len(first) > len(entries) else (other, 0)
            extra = logs[more][len(logs[less])]
            return (
                f"rank {more} issues {extra.what} ({extra.where}), which rank {less} does not"
                f" ({len(logs[more])} collectives against {len(logs[less])})"
            )
    waits = [
        f"rank {rank} waits in {waiting.what} ({waiting.where})"
        for rank, entries in enumerate(logs)
        if (waiting := next((one for one in entries if not one.done), None)) is not None
    ]
    return ", ".join(waits)
