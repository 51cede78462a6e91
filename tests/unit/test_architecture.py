"""The architecture: which package may import which, and what loads without torch."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import stepscope
from command_line import python, without_torch

SOURCE = Path(stepscope.__file__).parent
LONGEST_FILE = 600

FOR_ALL = {
    f"stepscope{name}"
    for name in (
        "",
        ".display",
        ".errors",
        ".files",
        ".pickles",
        ".processes",
        ".version",
    )
}
LEAVES = {
    "stepscope.model.checkpointing",
    "stepscope.model.config",
    "stepscope.model.cost",
    "stepscope.kernels.activation_policy",
    "stepscope.kernels.fp8.choice",
    "stepscope.kernels.fp8.recipe",
    "stepscope.kernels.loss_chunks",
    "stepscope.kernels.triton.launches",
    "stepscope.model.sizes",
    "stepscope.attention.cost",
    "stepscope.parallel.buckets",
}
TOOLS = {"torch_tools"}
BLOCKS = {f"stepscope.report.{name}" for name in ("blocks", "format", "tables")}
# A package stands for all of its modules; a module stands for itself.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "cli": {
        "advisor",
        "grading",
        "runner",
        "studies",
        "training",
        "views",
        "planning",
        "report",
        "records",
        "analysis",
        "stepscope.attention.registry",
    }
    | LEAVES,
    "integrations": {"advisor", "acceleration", "studies", "views", "measure", "analysis"}
    | {"records"}
    | {"report", "stepscope.cli.messages"},
    "advisor": {"runner", "studies", "training", "views", "acceleration", "measure", "analysis"}
    | {"planning", "records", "report"}
    | TOOLS,
    "grading": {
        "studies",
        "training",
        "views",
        "attention",
        "kernels",
        "parallel",
        "measure",
        "records",
    }
    | BLOCKS
    | TOOLS,
    "runner": {"studies", "training", "measure", "analysis", "records"},
    "studies": {"training", "views", "acceleration", "model", "attention", "kernels", "optim"}
    | {"parallel", "measure", "analysis", "planning", "records"}
    | BLOCKS
    | TOOLS,
    "views": {"training", "planning", "measure", "analysis", "records"}
    | {"stepscope.model.config", "stepscope.model.sizes"}
    | BLOCKS,
    "training": {"acceleration", "model", "attention", "kernels", "optim", "parallel", "measure"}
    | {"analysis", "records"}
    | BLOCKS
    | TOOLS,
    "planning": {"acceleration", "kernels", "measure", "analysis", "records"}
    | {"stepscope.report.format"}
    | TOOLS,
    "acceleration": {"attention", "kernels", "optim"} | TOOLS,
    "measure": {"records"} | TOOLS,
    "analysis": {"records", "stepscope.attention.registry"} | LEAVES - {"stepscope.model.sizes"},
    "model": {"attention", "kernels"} | TOOLS,
    "kernels": {"attention"} | TOOLS,
    "report": {
        "stepscope.analysis.conclusions",
        "stepscope.analysis.flame",
        "stepscope.analysis.parts",
        "stepscope.analysis.verdict",
    },
    "records": set(),
    "optim": TOOLS,
    "attention": TOOLS,
    "parallel": TOOLS,
    "torch_tools": set(),
}


def module_name(file: Path, source: Path) -> str:
    parts = file.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """These statements and all below them; expressions have none."""
    for node in nodes:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            below = getattr(node, name, ())
            if isinstance(below, list):
                yield from statements(below)


@cache
def imported(file: Path, source: Path) -> tuple[tuple[int, str], ...]:
    """Line and module of every import of this package, anywhere in the file."""
    return tuple(_imported(file, source))


def _imported(file: Path, source: Path) -> Iterator[tuple[int, str]]:
    own = module_name(file, source)
    package = own if file.name == "__init__.py" else own.rpartition(".")[0]
    for node in statements(ast.parse(file.read_text()).body):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            modules = [
                f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}", source) else base
                for alias in node.names
            ]
        else:
            continue
        for name in modules:
            if name.partition(".")[0] == source.name:
                yield node.lineno, name


def is_module(name: str, source: Path) -> bool:
    path = source.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def package_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def forbidden_imports(source: Path) -> list[str]:
    wrong = []
    for file in sorted(source.rglob("*.py")):
        here = file.relative_to(source).parts
        if len(here) == 1:
            continue
        for line, target in imported(file, source):
            allowed = ALLOWED_IMPORTS.get(here[0], set()) | {here[0]}
            if target not in FOR_ALL | allowed and package_of(target) not in allowed:
                wrong.append(f"{'/'.join(here)}:{line} imports {target}")
    return wrong


def cycles(source: Path) -> list[list[str]]:
    """Groups of files that import each other; imports for types count."""
    files = {module_name(file, source): file for file in sorted(source.rglob("*.py"))}
    graph = {
        name: {target for _, target in imported(file, source)} & files.keys() - {name}
        for name, file in files.items()
    }
    groups, left, importers = [], dict(graph), _reversed(graph)
    while left:
        start = next(iter(left))
        group = _reached(start, graph) & _reached(start, importers) | {start}
        if len(group) > 1:
            groups.append(sorted(group))
        for name in group:
            left.pop(name, None)
    return groups


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def _reversed(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    reversed_: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            reversed_[target].add(name)
    return reversed_


def long_files(source: Path) -> list[str]:
    counted = ((file, len(file.read_text().splitlines())) for file in source.rglob("*.py"))
    return [f"{file.name} has {lines} lines" for file, lines in counted if lines > LONGEST_FILE]


def prints(source: Path) -> list[str]:
    return [
        f"{file.name}:{node.lineno}"
        for file in source.rglob("*.py")
        if file.relative_to(source).parts[0] != "cli" and "print(" in file.read_text()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def test_packages_import_only_what_is_allowed() -> None:
    assert forbidden_imports(SOURCE) == []


def test_no_files_import_each_other() -> None:
    assert cycles(SOURCE) == []


def test_a_planted_cycle_is_detected(tmp_path: Path) -> None:
    source = tmp_path / "stepscope"
    lines = {
        "a": "def f():\n    from stepscope.b import g",
        "b": "from stepscope.c import h",
        "c": "from typing import TYPE_CHECKING\nfrom stepscope import a",
        "d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stepscope.e import x",
        "e": "import stepscope.d",
    }
    source.mkdir()
    for name, text in lines.items():
        (source / f"{name}.py").write_text(text)
    assert cycles(source) == [
        ["stepscope.a", "stepscope.b", "stepscope.c"],
        ["stepscope.d", "stepscope.e"],
    ]


def test_every_package_lists_its_imports() -> None:
    packages = {folder.parent.name for folder in SOURCE.glob("*/__init__.py")}
    assert packages - ALLOWED_IMPORTS.keys() == set()
    assert packages >= {"cli", "studies", "records", "report", "analysis", "measure", "model"}


def test_files_stay_readable() -> None:
    assert long_files(SOURCE) == []


def test_only_the_command_line_prints() -> None:
    assert prints(SOURCE) == []


@pytest.mark.parametrize(
    ("path", "line", "target"),
    [
        ("records/a.py", "import stepscope.report.html", "stepscope.report.html"),
        ("report/a.py", "from stepscope.records import store", "stepscope.records.store"),
        ("measure/a.py", "def f():\n    from stepscope.model import SIZES", "stepscope.model"),
        ("analysis/a.py", "from stepscope.model import transformer", "stepscope.model.transformer"),
        ("cli/a.py", "from stepscope.measure.timer import Phase", "stepscope.measure.timer"),
        ("studies/a.py", "from stepscope.report import html", "stepscope.report.html"),
        ("optim/deep/a.py", "from ...attention import api", "stepscope.attention.api"),
    ],
)
def test_a_planted_import_is_detected(tmp_path: Path, path: str, line: str, target: str) -> None:
    source = tmp_path / "stepscope"
    for module in ("report/html", "records/store", "model/transformer", "attention/api"):
        (source / module).parent.mkdir(parents=True, exist_ok=True)
        (source / f"{module}.py").touch()
    (source / path).parent.mkdir(parents=True, exist_ok=True)
    (source / path).write_text(
        f"from stepscope.errors import UsageError\nfrom stepscope import __version__\n{line}\n"
    )
    assert len(forbidden_imports(source)) == 1
    assert forbidden_imports(source)[0].endswith(f" imports {target}")


def test_a_planted_long_file_and_print_are_detected(tmp_path: Path) -> None:
    source = tmp_path / "stepscope"
    for path in ("cli", "model"):
        (source / path).mkdir(parents=True)
        (source / path / "a.py").write_text("print()\n" + "\n" * LONGEST_FILE)
    assert prints(source) == ["a.py:1"]
    assert long_files(source) == [f"a.py has {LONGEST_FILE + 1} lines"] * 2


IMPORT_ALL = """
import importlib, pkgutil, sys
packages = [importlib.import_module(f"stepscope.{name}") for name in sys.argv[1:]]
modules = [
    importlib.import_module(module.name)
    for package in packages
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]
from stepscope.studies.registry import viewables
print(len(modules), len(viewables()))
"""


def test_planning_storing_and_viewing_load_without_torch() -> None:
    packages = ("cli", "grading.check", "runner", "studies", "training", "views", "records")
    packages += ("analysis", "report")
    done = without_torch(IMPORT_ALL, *packages)
    assert done.returncode == 0, done.stderr
    modules, studies = map(int, done.stdout.split())
    assert modules > 40
    assert studies >= 2


def test_the_import_block_works() -> None:
    assert "torch is blocked" in without_torch(IMPORT_ALL, "measure").stderr


def test_names_that_scripts_and_benchmarks_import_exist() -> None:
    """They are not run by the tests: a name that moved would be noticed a release later."""
    root = Path(__file__).parents[2]
    missing = [
        f"{file.name}:{node.lineno} {node.module}.{alias.name}"
        for folder in ("benchmarks", "scripts")
        for file in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stepscope")
        for alias in node.names
        if not _exists(str(node.module), alias.name)
    ]
    assert missing == []


def _exists(module: str, name: str) -> bool:
    known = _defined(module)
    return bool({name, "__getattr__"} & known) or is_module(f"{module}.{name}", SOURCE)


@cache
def _defined(module: str) -> set[str]:
    path = SOURCE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text()).body if file.is_file() else []
    return {name for node in statements(body) for name in _names_of(node)}


def _names_of(node: ast.AST) -> Iterator[str]:
    """The names that a statement defines in its module."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.Assign(targets=targets):
            yield from (
                one.id
                for target in targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name)
            )
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from stepscope.cli import main; main(['--help']);"
        "print(sorted({'torch', 'numpy', 'tyro', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.startswith("usage: stepscope COMMAND")
    assert done.stdout.splitlines()[-1] == "[]"


def test_pytest_collects_every_test_folder(pytestconfig: pytest.Config) -> None:
    """By default pytest skips folders with common names such as `dist` and `build`."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {file.parent.name for file in Path(__file__).parents[1].rglob("test_*.py")}
    assert len(folders) > 4
    assert not [f for f in folders if any(fnmatch(f, pattern) for pattern in left_out)]


def test_no_set_up_of_the_makefile_installs_torchvision() -> None:
    """Next to a CPU build of torch the wheel of PyPI cannot be imported, nor can transformers."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = re.findall(r"-e '?\.\[([\w,]+)\]", (root / "Makefile").read_text())
    assert "dev,integrations" in installed
    names = {extra for some in installed for extra in some.split(",")}
    required = [*project["dependencies"], *(one for name in names for one in extras[name])]
    packages = {re.split(r"[><=;\[ ]", one)[0] for one in required}
    assert "transformers" in packages
    # timm requires torchvision.
    assert not packages & {"timm", "torchvision"}
