"""Values sent between a launcher and its ranks, by name and by value."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import enum
import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.parallel.pickling import _ORIGINS, dumps, loads, why_not


def sent(value: Any) -> Any:
    """The value as another process receives it."""
    return loads(dumps(value, "script"))


def defined(source: str, **variables: Any) -> dict[str, Any]:
    """The namespace after a notebook cell: no file, no module."""
    namespace = {"__name__": "__main__", **variables}
    exec(compile(source, "<cell>", "exec"), namespace)
    return namespace


def test_importable_names_are_sent_by_name() -> None:
    for value in (
        defined,
        nn.Linear,
        torch.nn.functional.relu,
        test_importable_names_are_sent_by_name,
    ):
        assert sent(value) is value


def test_closures_share_their_variables() -> None:
    def pair() -> tuple[Callable[[], None], Callable[[], int]]:
        count = 0

        def up() -> None:
            nonlocal count
            count += 1

        return up, lambda: count

    up, count = sent(pair())
    up()
    up()
    assert count() == 2


def test_a_local_function_calls_itself() -> None:
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    assert sent(factorial)(5) == 120


def test_defaults_attributes_and_annotations() -> None:
    def act(a: int, b: int = 2, *, c: int = 3) -> int:
        """Adds."""
        return a + b + c

    act.note = "attached"  # type: ignore[attr-defined]
    received = sent(act)
    assert received(1) == 6
    assert (received.note, received.__doc__) == ("attached", "Adds.")
    assert received.__annotations__ == act.__annotations__


def test_a_function_carries_only_the_globals_it_uses() -> None:
    cell = defined(
        "def outer(x):\n    def inner():\n        return scale * x.data\n    return inner()\n",
        scale=3,
        data=threading.Lock(),
    )
    received = sent(cell["outer"])
    assert received(types.SimpleNamespace(data=2)) == 6
    assert "data" not in received.__globals__
    assert received.__globals__ is not cell


def test_functions_with_the_same_globals_still_share_them() -> None:
    cell = defined(
        "total = 0\ndef add(n):\n    global total\n    total += n\ndef read():\n    return total\n"
    )
    add, read = sent((cell["add"], cell["read"]))
    add(4)
    assert read() == 4
    assert cell["total"] == 0


def test_submodules_that_a_function_uses_are_imported() -> None:
    cell = defined("def run():\n    return concurrent.futures.Future\n", concurrent=concurrent)
    assert b"concurrent.futures" in dumps(cell["run"], "script")
    assert sent(cell["run"])() is concurrent.futures.Future


CLASSES = """
import abc, dataclasses
from typing import NamedTuple
from torch import nn
import torch

class Base(nn.Module, abc.ABC):
    @abc.abstractmethod
    def width(self): ...

class Model(Base):
    sizes = (2, 3)
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
    @property
    def twice(self): return 2 * self.weight
    @staticmethod
    def number(): return 7
    @classmethod
    def made(cls): return cls()
    def width(self): return self.sizes[0]
    def forward(self, x): return (self.twice * x).sum()

@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    names: list = dataclasses.field(default_factory=list)

class Point(NamedTuple):
    x: int
    y: int = 2

class Slotted:
    __slots__ = ("a",)
    def __init__(self, a): self.a = a
"""


def test_classes_by_value() -> None:
    cell = defined(CLASSES)
    model = sent(cell["Model"])
    assert model is not cell["Model"]
    made = model.made()
    assert made(torch.ones(2)).item() == 4.0
    assert (made.number(), made.width(), model.__mro__[1].__name__) == (7, 2, "Base")
    with pytest.raises(TypeError, match="abstract"):
        model.__mro__[1]()
    assert issubclass(model.__mro__[1], abc.ABC)
    config = sent(cell["Config"](3))
    assert [field.name for field in dataclasses.fields(config)] == ["width", "names"]
    assert dataclasses.replace(config, width=4).width == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 5
    assert sent(cell["Point"](1)) == (1, 2)
    assert sent(cell["Point"])(5).y == 2
    slotted = sent(cell["Slotted"])(1)
    assert slotted.a == 1
    assert not hasattr(slotted, "__dict__")


def test_an_instance_and_its_class_are_sent_together() -> None:
    cell = defined(CLASSES)
    model, kind = sent((cell["Model"](), cell["Model"]))
    assert type(model) is kind
    assert torch.equal(model.weight, torch.ones(2))


def test_partials_and_bound_methods() -> None:
    cell = defined(CLASSES)
    assert sent(functools.partial(lambda a, b: a - b, 5))(3) == 2
    assert sent(cell["Model"]().width)() == 2


def test_a_result_refers_to_the_original_class() -> None:
    """The launcher receives its own class, not a copy of the copy."""
    cell = defined(CLASSES)
    there = sent(cell["Point"])
    assert there in _ORIGINS
    returned = loads(dumps((there(4), there), "all"))
    assert returned[1] is cell["Point"]
    assert type(returned[0]) is cell["Point"]


class Color(enum.Enum):
    RED = 1


def test_the_unsendable_part_is_named() -> None:
    lock = threading.Lock()
    cell = defined("def run(world):\n    with lock:\n        return helper()\n", lock=lock)
    cell["helper"] = lambda: 1
    assert why_not(cell["run"], "none") == "lock: a lock (cannot pickle '_thread.lock' object)"

    def closed(_: Any) -> None:
        lock.acquire()

    assert why_not(closed, "none") == "lock: a lock (cannot pickle '_thread.lock' object)"
    generator = (n for n in range(2))
    reason = "a generator (cannot pickle 'generator' object)"
    assert why_not({"a": [1, generator]}, "none") == f"'a': item 1: {reason}"
    partial = functools.partial(print, generator)
    assert why_not(partial, "none") == f"its argument 0: {reason}"
    assert why_not([1, "two", Color.RED], "none") is None
    local = defined("import enum\nclass Local(enum.Enum):\n    A = 1\n")["Local"]
    assert "Local is an Enum" in (why_not(local, "none") or "")


def test_a_cycle_that_cannot_be_sent_terminates() -> None:
    cycle: list[Any] = [threading.Lock()]
    cycle.append(cycle)
    assert (why_not(cycle, "none") or "").startswith("item 0: a lock")


def test_tensors_are_pickled_as_usual() -> None:
    tensor = torch.arange(4.0)
    assert torch.equal(pickle.loads(pickle.dumps(sent(tensor))), tensor)


def test_globals_of_a_received_function_have_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import within C code looks them up there; `__main__` of a rank may not have them."""
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec("def work(): return 1", vars(notebook))
    data = dumps(vars(notebook)["work"], "none")
    rank = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", rank)
    assert "__builtins__" not in vars(rank)
    assert "__builtins__" in loads(data).__globals__
    assert loads(data).__globals__ is vars(rank)
