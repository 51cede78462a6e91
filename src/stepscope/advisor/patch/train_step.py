"""Rewrite a training loop so that one `stepscope.TrainStep` makes its step."""

from __future__ import annotations

import ast
from typing import Protocol

from stepscope.advisor.patch.sites import Place, Site, Sites
from stepscope.advisor.patch.source import CannotEditError, Source

_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Break, ast.Continue)


class Edits(Protocol):
    """The sites of a program and its files."""

    @property
    def sites(self) -> Sites: ...

    def source(self, place: Place) -> Source: ...


def use_train_step(edits: Edits, dtype: str) -> None:
    """Replace the statements from the call of the model to the update by one call of a step that
    is made before the loop."""
    called, backward, stepped = (_only(edits, kind) for kind in ("call", "backward", "step"))
    clips, cleared = edits.sites.of("clip"), edits.sites.of("zero_grad")
    assert backward.place is not None
    source = edits.source(backward.place)
    depth = len(backward.stack) - 1
    others = [stepped, *clips, *cleared]
    if any(one.stack[:-1] != backward.stack[:-1] or not one.direct for one in others):
        raise CannotEditError("the statements of a step are not in one function")
    if called.stack[:depth] != backward.stack[:depth] or not called.stack[depth].same_function(
        backward.place
    ):
        raise CannotEditError("the model is not called where backward() is")
    ends = source.statement_at(backward.place)
    block = source.block_of(ends)
    begins = source.statement_at(called.stack[depth])
    while begins not in block:
        around = [n for n in source.ancestors(begins) if isinstance(n, ast.stmt)]
        if not around:
            raise CannotEditError("the call of the model and backward() are in different blocks")
        begins = around[0]
    update, *more = (_plain(source, one, block) for one in others)
    removed = [ends, update, *more]
    region = [one for one in block[block.index(begins) : block.index(ends)] if one not in removed]
    loss = _method_of(source, ends, "backward")
    optimizer = _method_of(source, update, "step")
    names = called.models[depth] if depth < len(called.models) else {}
    if len(names) != 1:
        raise CannotEditError("the variable of the model is not known in the loop")
    (model,) = names.values()
    loop = source.outermost_loop(ends)
    if loop is ends:
        raise CannotEditError("the step is not in a loop of its function")
    if (
        depth
        and edits.source(backward.stack[depth - 1]).outermost_loop(
            caller := edits.source(backward.stack[depth - 1]).statement_at(
                backward.stack[depth - 1]
            )
        )
        is not caller
    ):
        raise CannotEditError("the function with the loop is called many times")
    batch = _batch(region, loop, called.batches[depth])
    _unused_elsewhere(source, region, loss, loop, removed)
    arguments = [model, optimizer]
    lines: list[str] = []
    given = _as_model_call(region, loss, model, source)
    if given is None:
        lines = ["", *_loss_function(source, region, loss, model, batch), ""]
        arguments.append("loss_fn=loss_fn")
        given = batch[0] if len(batch) == 1 else f"({', '.join(batch)})"
    if clips:
        arguments.append(f"max_grad_norm={_norm(source, clips)}")
    if dtype:
        arguments.append(f"dtype={source.ensure_import('torch')}.{dtype}")
    source.ensure_import("stepscope")
    lines.append(f"train_step = stepscope.TrainStep({', '.join(arguments)})")
    source.insert_before(loop, lines)
    first, *rest = region
    source.replace(source.start(first), source.end(first), f"{loss} = train_step({given})")
    for statement in (*rest, *removed):
        source.remove(statement)


def _only(edits: Edits, kind: str) -> Site:
    sites = edits.sites.of(kind)
    if len(sites) != 1 or sites[0].place is None or not (sites[0].direct or kind == "call"):
        what = {"call": "call of the model", "backward": "backward()", "step": "optimizer step"}
        raise CannotEditError(f"the loop has {len(sites)} places with a {what[kind]}, not one")
    return sites[0]


def _plain(source: Source, site: Site, block: list[ast.stmt]) -> ast.stmt:
    """Return the statement of a call whose value nothing uses."""
    assert site.place is not None
    statement = source.statement_at(site.place)
    if statement not in block:
        raise CannotEditError(f"line {statement.lineno} is not in the block of backward()")
    if not isinstance(statement, ast.Expr) or statement.value is not source.call_at(site.place):
        raise CannotEditError(f"line {statement.lineno} uses the value of its call")
    return statement


def _method_of(source: Source, statement: ast.stmt, name: str) -> str:
    """Return the object of a statement `object.name()`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    method = call.func if isinstance(call, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr == name:
        alone = source.text(statement) == f"{source.text(method)}()"
        if alone and isinstance(method.value, ast.Name | ast.Attribute):
            return source.text(method.value)
    raise CannotEditError(f"line {statement.lineno} is not a plain .{name}()")


def _norm(source: Source, clips: list[Site]) -> str:
    """Return the source of the norm that the loop clips gradients to."""
    if len(clips) != 1 or clips[0].about["order"] != "2.0":
        raise CannotEditError("the loop clips gradients more than once, or not by their norm")
    assert clips[0].place is not None
    call = source.call_at(clips[0].place)
    named = [one.value for one in call.keywords if one.arg == "max_norm"]
    return source.text((named or call.args[1:2])[0])


def _names(node: ast.AST, kind: type[ast.expr_context]) -> list[str]:
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    matching = [n for n in found if isinstance(n.ctx, kind)]
    return [n.id for n in sorted(matching, key=lambda n: (n.lineno, n.col_offset))]


def _batch(region: list[ast.stmt], loop: ast.stmt, tensors: tuple[str, ...]) -> list[str]:
    """Return the variables of an iteration that the statements read: they are the batch."""
    inside = {id(n) for statement in region for n in ast.walk(statement)}
    bound = {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside
    }
    read: list[str] = []
    stored: set[str] = set()
    for statement in region:
        if any(isinstance(node, _LEAVES) for node in ast.walk(statement)):
            raise CannotEditError(f"line {statement.lineno} leaves the step")
        read += [n for n in _names(statement, ast.Load) if n in bound and n not in stored]
        stored |= set(_names(statement, ast.Store))
    batch = list(dict.fromkeys(read))
    if other := [name for name in batch if name not in tensors]:
        raise CannotEditError(f"`{other[0]}` changes with every step and is not a tensor")
    if not batch:
        raise CannotEditError("no variable of the loop is the batch")
    return batch


def _unused_elsewhere(
    source: Source, region: list[ast.stmt], loss: str, loop: ast.stmt, removed: list[ast.stmt]
) -> None:
    """Refuse if another statement reads what the step computes, other than its loss."""
    inside = {id(n) for statement in (*region, *removed) for n in ast.walk(statement)}
    stored = {n for statement in region for n in _names(statement, ast.Store)} - {loss}
    scope = source.ancestors(loop)[-1]
    names = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and id(n) not in inside]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    for node in names:
        if isinstance(node.ctx, ast.Load) and node.id in stored:
            before = node.lineno < region[0].lineno and node.id in bound
            if not before:
                raise CannotEditError(f"line {node.lineno} reads `{node.id}` of the step")


def _as_model_call(region: list[ast.stmt], loss: str, model: str, source: Source) -> str | None:
    """Return the batch of a step that is `loss = model(…)` or `loss = model(…).loss` alone; None if
    it is more."""
    if len(region) != 1 or not isinstance(region[0], ast.Assign) or len(region[0].targets) != 1:
        return None
    value: ast.expr = region[0].value
    if isinstance(value, ast.Attribute) and value.attr == "loss":
        value = value.value
    target = region[0].targets[0]
    named = isinstance(target, ast.Name) and target.id == loss
    if not named or not isinstance(value, ast.Call) or source.text(value.func) != model:
        return None
    simple = all(isinstance(one, ast.Name) for one in value.args)
    if value.args and simple and not value.keywords:
        texts = [source.text(one) for one in value.args]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
    if len(value.keywords) == 1 and value.keywords[0].arg is None and not value.args:
        return source.text(value.keywords[0].value)
    return None


def _loss_function(
    source: Source, region: list[ast.stmt], loss: str, model: str, batch: list[str]
) -> list[str]:
    """The statements as a function of the model and the batch."""
    if any(isinstance(n, ast.Constant) and isinstance(n.value, str) and "\n" in n.value
           for one in region for n in ast.walk(one)):  # fmt: skip
        raise CannotEditError("the step has a string of several lines")
    parameter = model if model.isidentifier() else "_"
    value = "batch" if len(batch) > 1 else batch[0]
    lines = [f"def loss_fn({parameter}, {value}):"]
    if len(batch) > 1:
        lines.append(f"    {', '.join(batch)} = batch")
    indent = len(source.indent_of(region[0]))
    for statement in region:
        first, *rest = source.text(statement).splitlines()
        lines += [f"    {first}", *(f"    {line[indent:]}" for line in rest)]
    return [*lines, f"    return {loss}"]
