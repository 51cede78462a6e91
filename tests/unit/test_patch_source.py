"""Edits of source files as spans of their bytes."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from stepscope.advisor.patch.source import CannotEditError, Source, unified_diff

LOOP = '''
import torch
for batch in data:
    # The model.
    loss = model(
        batch,  # tokens
    )
    text = """one
  two"""
    loss.backward()
'''


def source_of(folder: Path, text: str | bytes) -> Source:
    path = folder / "train.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Source(path)


def statements(source: Source) -> list[ast.stmt]:
    (loop,) = (node for node in source.tree.body if isinstance(node, ast.For))
    return loop.body


def call_in(source: Source) -> ast.Call:
    return next(node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f(a)", "f(a, k=1)"),
        ("f()", "f(k=1)"),
        ("f(a, k=g(2))", "f(a, k=1)"),
        ("f(a,)", "f(a, k=1,)"),
        ("f((a))", "f((a), k=1)"),
        ("f(a  # why, so\n)", "f(a, k=1  # why, so\n)"),
        ("f(\n    a,\n    b,  # why\n)", "f(\n    a,\n    b,\n    k=1,  # why\n)"),
        ("f(*a, **b)", "f(*a, **b, k=1)"),
        ("é = f('é')", "é = f('é', k=1)"),
    ],
)
def test_keyword_is_added_or_replaced(tmp_path: Path, before: str, after: str) -> None:
    source = source_of(tmp_path, before + "\n")
    source.set_keyword(call_in(source), "k", "1")
    assert source.changed.decode() == after + "\n"


def test_positional_argument_is_replaced(tmp_path: Path) -> None:
    source = source_of(tmp_path, "f(a, b, c)\n")
    source.set_keyword(call_in(source), "k", "1", 1)
    assert source.changed == b"f(a, 1, c)\n"
    unpacked = source_of(tmp_path, "f(*a)\n")
    with pytest.raises(CannotEditError):
        unpacked.set_keyword(call_in(unpacked), "k", "1", 1)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_statements_are_wrapped_with_comments_and_strings_as_they_were(
    tmp_path: Path, newline: str
) -> None:
    source = source_of(tmp_path, LOOP.replace("\n", newline))
    source.wrap(statements(source)[:2], "with context:")
    expected = '''
import torch
for batch in data:
    # The model.
    with context:
        loss = model(
            batch,  # tokens
        )
        text = """one
  two"""
    loss.backward()
'''
    assert source.changed.decode() == expected.replace("\n", newline)


def test_tabs_and_a_byte_order_mark_are_kept(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfimport torch\nfor x in y:\n\tloss = f(x)\n\tloss.backward()\n"
    source = source_of(tmp_path, text)
    source.wrap(statements(source)[:1], "with context:")
    source.ensure_import("stepscope")
    expected = (
        b"\xef\xbb\xbfimport torch\nimport stepscope\nfor x in y:\n"
        b"\twith context:\n\t\tloss = f(x)\n\tloss.backward()\n"
    )
    assert source.changed == expected


@pytest.mark.parametrize(
    "text",
    ["for x in y: loss = f(x); loss.backward()\n", "for x in y:\n    loss = f(x); x.backward()\n"],
)
def test_several_statements_in_a_line_are_not_edited(tmp_path: Path, text: str) -> None:
    source = source_of(tmp_path, text)
    with pytest.raises(CannotEditError):
        source.wrap(statements(source)[:1], "with context:")


def test_edits_that_overlap_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, "f(a, k=g(1))\n")
    call = call_in(source)
    source.set_keyword(call, "k", "2")
    with pytest.raises(CannotEditError):
        source.replace_call(call, "h", ["a"])


def test_imports_go_after_the_docstring_and_the_last_import(tmp_path: Path) -> None:
    documented = source_of(tmp_path, '"""A script."""\nrun()\n')
    documented.ensure_import("stepscope")
    assert documented.changed == b'"""A script."""\n\nimport stepscope\nrun()\n'
    known = source_of(tmp_path, "import torch as t\nrun()\n")
    assert known.ensure_import("torch") == "t"
    assert known.changed == known.data


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotEditError):
        source_of(tmp_path, b"# coding: latin-1\nx = 1\n")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "--binary", "-p1", "-i"]])
def test_diff_applies(tmp_path: Path, newline: str, end: str, tool: list[str]) -> None:
    old = newline.join(["a", "b", "c"]).encode() + end.encode()
    new = newline.join(["a", "new", "c", "d"]).encode() + end.encode()
    (tmp_path / "train.py").write_bytes(old)
    patch = tmp_path / "train.patch"
    patch.write_bytes(b"# a header\n" + unified_diff("train.py", old, new).encode())
    subprocess.run([*tool, str(patch)], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "train.py").read_bytes() == new
