"""Edits of the user's source that make the changes of a trial, at the places observed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.advisor.patch.libraries import ARGUMENTS, LIGHTNING
from stepscope.advisor.patch.sites import ByHand, Place, Site, Sites, where
from stepscope.advisor.patch.source import CannotEditError, Source
from stepscope.advisor.patch.train_step import use_train_step
from stepscope.analysis.advice.rules.accelerate import ACCELERATE
from stepscope.analysis.advice.rules.data import default_workers
from stepscope.analysis.advice.rules.train_step import STEP

_WORKERS_POSITION, _PIN_POSITION = 5, 7
"""Positions of DataLoader's parameters."""
_FP8 = "fp8"


class Anchor(NamedTuple):
    """Where statements about the model go: once, when model and optimizer exist."""

    source: Source
    statement: ast.stmt
    after: bool
    models: tuple[str, ...]
    optimizer: str
    """Expression of the optimizer; empty if it is not known there."""


class Edits:
    """The edits of all files for some settings, and what is left to the user."""

    def __init__(self, settings: Mapping[str, str], sites: Sites) -> None:
        self.settings, self.sites = dict(settings), sites
        self.sources: dict[str, Source] = {}
        self.by_hand: list[ByHand] = []
        self.made: list[str] = []
        self._makers: dict[str, tuple[str, Callable[[], None], str]] = {
            "dtype": ("the dtype", self._dtype, "call"),
            "attention": ("fused attention", self._attention, "softmax"),
            "data": ("workers for the DataLoader", self._loaders, "loader"),
            "copies": ("pinned memory", self._copies, "copy"),
            "optimizer": ("the optimizer", self._optimizer, "optimizer"),
            "gradients": ("zero_grad(set_to_none=True)", self._gradients, "zero_grad"),
            ACCELERATE: ("stepscope.accelerate", self._accelerate, "optimizer"),
            "compile": ("torch.compile", self._compile, "call"),
            STEP: ("stepscope.TrainStep", self._step, "call"),
            "read_back": ("values read back", self._read_back, "item"),
            "checkpoint": ("activation checkpointing", _by_author, "call"),
            "batch": ("the batch size", self._batch, "loader"),
        }

    def make(self) -> Edits:
        """Make every edit that is safe; the others are listed in `by_hand`."""
        settings = self._wanted()
        wanted = [name for name in self._makers if name in settings]
        for name in sorted(settings - self._makers.keys()):
            self.by_hand.append(ByHand("", name, "no edit of the source is known for this change"))
        for name in wanted:
            what, maker, kind = self._makers[name]
            marks = {path: source.mark() for path, source in self.sources.items()}
            try:
                maker()
                for source in self.sources.values():
                    _ = source.changed
                self.made.append(what)
            except (CannotEditError, SyntaxError, OSError, UnicodeDecodeError) as error:
                for path, source in self.sources.items():
                    source.undo_to(marks.get(path, 0))
                place = next((s for s in self.sites.of(kind) if s.place), None)
                why = str(error) or "the source cannot be read"
                self.by_hand.append(ByHand(where(place), what, why))
        return self

    def _wanted(self) -> set[str]:
        # In older records `accelerate` has several settings.
        names = {name for name, value in self.settings.items() if value != ACCELERATE}
        is_called = len(names) < len(self.settings) or self.settings.get("dtype") == _FP8
        return names | ({ACCELERATE} if is_called else set())

    @property
    def changed(self) -> dict[str, bytes]:
        """The contents of the files that are edited."""
        files = {path: source.changed for path, source in self.sources.items()}
        return {path: new for path, new in files.items() if new != self.sources[path].data}

    # Places.

    def source(self, place: Place) -> Source:
        if place.file not in self.sources:
            self.sources[place.file] = Source(Path(place.file))
        return self.sources[place.file]

    def call(self, site: Site) -> tuple[Source, ast.Call]:
        """Return the call of a site that the user's code makes itself."""
        if site.place is None or not site.direct:
            raise CannotEditError("a library makes this call, not your code")
        source = self.source(site.place)
        return source, source.call_at(site.place)

    def _by_library(self, name: str) -> bool:
        """Make a change by an argument of a training library; return False without one."""
        done = False
        for kind, arguments in ARGUMENTS.items():
            given = arguments.get((name, self.settings[name]), {})
            for site in self.sites.of(kind) if given else ():
                if not site.direct:
                    continue
                source, call = self.call(site)
                for keyword, value in given.items():
                    source.set_keyword(call, keyword, value.format(workers=default_workers()))
                done = True
        return done

    def anchor(self) -> Anchor:
        optimizers = self.sites.of("optimizer")
        if len(optimizers) == 1 and optimizers[0].about.get("device") == self.sites.device:
            (made,) = optimizers
            for depth in reversed(range(len(made.stack))):
                names = _names(made, depth)
                if not names:
                    continue
                source = self.source(made.stack[depth])
                statement = source.statement_at(made.stack[depth])
                looped = source.outermost_loop(statement) is not statement
                if looped or isinstance(statement, ast.Return | ast.With | ast.Expr):
                    continue
                direct = made.direct and depth == len(made.stack) - 1
                return Anchor(source, statement, True, names, _target(source, statement, direct))
        called = self.sites.first("call")
        for depth in range(len(called.stack)) if called else ():
            assert called is not None
            names = _names(called, depth)
            source = self.source(called.stack[depth])
            statement = source.outermost_loop(source.statement_at(called.stack[depth]))
            if names and not _assigned(names[0], statement):
                return Anchor(source, statement, False, names, self._optimizer_name(depth))
        raise CannotEditError("no variable of your code is the model when the loop starts")

    def _optimizer_name(self, depth: int) -> str:
        """Return the optimizer's expression in a function of the call's stack."""
        stepped = self.sites.first("step")
        if stepped is None or not stepped.direct or depth != len(stepped.stack) - 1:
            return ""
        source, call = self.call(stepped)
        is_step = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
        return source.text(call.func.value) if is_step else ""  # type: ignore[attr-defined]

    def _set_up(self, lines: Callable[[Anchor], Sequence[str]], module: str = "") -> None:
        anchor = self.anchor()
        if module:
            anchor.source.ensure_import(module)
        if anchor.after:
            anchor.source.insert_after(anchor.statement, lines(anchor))
        else:
            anchor.source.insert_before(anchor.statement, lines(anchor))

    # Changes.

    def _dtype(self) -> None:
        dtype = self.settings["dtype"]
        if dtype == _FP8 or self._by_library("dtype"):
            return
        if dtype == "tf32":
            anchor = self.anchor()
            torch = anchor.source.ensure_import("torch")
            self._set_up(lambda _: [f'{torch}.set_float32_matmul_precision("high")'])
        elif dtype == "float32":
            for site in _some(self.sites.of("autocast"), "autocast is not used by your code"):
                source, call = self.call(site)
                source.set_keyword(call, "enabled", "False", 2)
        elif STEP not in self.settings:
            self._autocast(dtype)

    def _autocast(self, dtype: str) -> None:
        ranges: dict[tuple[str, int], tuple[Source, list[ast.stmt], int, int]] = {}
        edited: set[Place] = set()
        for site in _some(self.sites.of("call"), "no call of the model was observed"):
            if "autocast" in site.about:
                place = msgspec.json.decode(site.about["autocast"], type=Place)
                if place not in edited:
                    edited.add(place)
                    source = self.source(place)
                    call = source.call_at(place)
                    torch = source.ensure_import("torch")
                    source.set_keyword(call, "enabled", "True", 2)
                    if f".{dtype}" not in source.text(call):
                        source.set_keyword(call, "dtype", f"{torch}.{dtype}", 1)
                continue
            source, block, first, last = self._until_backward(site)
            key = str(source.path), block[last].lineno
            if key in ranges:
                first = min(first, ranges[key][2])
            ranges[key] = source, block, first, last
        for source, block, first, last in ranges.values():
            torch = source.ensure_import("torch")
            kind = self.sites.device
            header = f'with {torch}.autocast("{kind}", {torch}.{dtype}):'
            source.wrap(block[first : last + 1], header)

    def _until_backward(self, site: Site) -> tuple[Source, list[ast.stmt], int, int]:
        """Return the block and the indices of the statements from a call of the model up to the
        backward pass, which is not one of them unless it is in the same statement."""
        nearest: tuple[int, Source, list[ast.stmt], int, int] | None = None
        for backward in self.sites.of("backward"):
            for depth in reversed(range(min(len(site.stack), len(backward.stack)))):
                one, other = site.stack[depth], backward.stack[depth]
                if site.stack[:depth] != backward.stack[:depth] or not one.same_function(other):
                    continue
                source = self.source(one)
                found = _common_block(source, source.statement_at(one), source.statement_at(other))
                if found is not None and found[1] <= found[2]:
                    block, first, last = found
                    last = last - 1 if last > first else last
                    while last > first and self._is_apart(source, block[last]):
                        last -= 1
                    if nearest is None or last - first < nearest[0]:
                        nearest = last - first, source, block, first, last
                break
        if nearest is None:
            raise CannotEditError("the backward pass is not in the function that calls the model")
        return nearest[1:]

    def _is_apart(self, source: Source, statement: ast.stmt) -> bool:
        """Return True for a statement of the update between the loss and its backward pass."""
        sites = (site for kind in ("zero_grad", "clip", "step") for site in self.sites.of(kind))
        places = [site.place for site in sites if site.place is not None]
        return any(
            place.file == str(source.path) and source.statement_at(place) is statement
            for place in places
        )

    def _attention(self) -> None:
        if self.settings.get("compile", "no") != "no":
            return
        for site in self.sites.of("config"):
            if site.direct and site.place is not None:
                source, call = self.call(site)
                if any(keyword.arg == "attn_implementation" for keyword in call.keywords):
                    source.set_keyword(call, "attn_implementation", '"sdpa"')
                    return
        raise CannotEditError(
            "write it as torch.nn.functional.scaled_dot_product_attention: only you know its mask"
            " and scale"
        )

    def _accelerate(self) -> None:
        dtype = "fp8" if self.settings.get("dtype") == _FP8 else ""

        def lines(anchor: Anchor) -> list[str]:
            if not anchor.optimizer:
                raise CannotEditError("the variable of the optimizer is not known")
            first, *rest = anchor.models
            more = [_accelerate(model, "", dtype) for model in rest]
            return [_accelerate(first, anchor.optimizer, dtype), *more]

        self._set_up(lines, "stepscope")

    def _compile(self) -> None:
        if self._by_library("compile"):
            return
        how = self.settings["compile"]
        fused = "attention" in self.settings
        arguments = 'mode="reduce-overhead"' if how == "graphs" else ""
        arguments = 'backend="stepscope"' if fused else arguments
        blocks = self.sites.blocks
        if how == "block" and not blocks:
            raise CannotEditError("the list of the model's blocks is not known")

        def lines(anchor: Anchor) -> list[str]:
            if how != "block":
                return [f"{model}.compile({arguments})" for model in anchor.models]
            model = anchor.models[0]
            return [f"for block in {model}{blocks}:", f"    block.compile({arguments})"]

        self._set_up(lines, "stepscope" if fused else "")

    def _step(self) -> None:
        dtype = self.settings.get("dtype", "")
        use_train_step(self, dtype if dtype in ("bfloat16", "float16") else "")

    def _optimizer(self) -> None:
        wanted = self.settings["optimizer"]
        if self._by_library("optimizer"):
            return
        if wanted != "foreach" and self._clips_in_lightning():
            raise CannotEditError(
                "Lightning does not clip gradients of a fused optimizer in mixed precision"
            )
        for site in _some(self.sites.of("optimizer"), "no optimizer was made"):
            source, call = self.call(site)
            if site.about["of_torch"] == "True":
                new, old = ("foreach", "fused") if wanted == "foreach" else ("fused", "foreach")
                if f"default.{new}" not in site.about:
                    raise CannotEditError(f"{site.about['name']} has no argument `{new}`")
                source.drop_keyword(call, old)
                source.set_keyword(call, new, "True")
            else:
                self._adam_of_torch(source, call, site)

    def _clips_in_lightning(self) -> bool:
        """Whether a Trainer of Lightning clips gradients, and computes in mixed precision."""
        for site in (site for kind in LIGHTNING for site in self.sites.of(kind) if site.direct):
            source, call = self.call(site)
            given = {keyword.arg: source.text(keyword.value) for keyword in call.keywords}
            clips = given.get("gradient_clip_val", "None") not in ("None", "0", "0.0")
            narrow = self.settings.get("dtype") in ("bfloat16", "float16")
            if clips and (narrow or "mixed" in given.get("precision", "")):
                return True
        return False

    def _adam_of_torch(self, source: Source, call: ast.Call, site: Site) -> None:
        """Replace an optimizer of the user's, with the settings of Adam, by torch's."""
        if not call.args or isinstance(call.args[0], ast.Starred):
            raise CannotEditError("the parameters are not the first argument")
        given = {keyword.arg: source.text(keyword.value) for keyword in call.keywords}
        known = {name: site.about.get(f"default.{name}") for name in ("lr", "betas", "eps")}
        if not all(known.values()):
            raise CannotEditError(f"{site.about['name']} is not Adam")
        known["weight_decay"] = site.about.get("default.weight_decay", "0.0")
        words = [f"{name}={given.get(name, value)}" for name, value in known.items()]
        torch = source.ensure_import("torch")
        arguments = [source.text(call.args[0]), *words, "fused=True"]
        source.replace_call(call, f"{torch}.optim.AdamW", arguments)

    def _gradients(self) -> None:
        filled = [s for s in self.sites.of("zero_grad") if s.about["set_to_none"] == "False"]
        for site in _some(filled, "no call of zero_grad() fills gradients with zeros"):
            source, call = self.call(site)
            source.set_keyword(call, "set_to_none", "True", 0)

    def _loaders(self) -> None:
        if self._by_library("data"):
            return
        used = [one for one in self.sites.of("loader") if one.about["used"] == "True"]
        without = [one for one in used if one.about["workers"] == "0" and one.direct]
        for site in _some(without, "no DataLoader without workers was made"):
            source, call = self.call(site)
            source.set_keyword(call, "num_workers", str(default_workers()), _WORKERS_POSITION)
            source.set_keyword(call, "persistent_workers", "True")
            source.set_keyword(call, "prefetch_factor", "4")

    def _copies(self) -> None:
        if not self._by_library("copies"):
            for site in self.sites.of("loader"):
                if site.about["used"] == "True" and site.direct:
                    source, call = self.call(site)
                    source.set_keyword(call, "pin_memory", "True", _PIN_POSITION)
        made = [site for site in self.sites.of("copy") if site.direct]
        for site in _some(made, "your code does not copy the batch to the device itself"):
            source, call = self.call(site)
            method = call.func
            if not isinstance(method, ast.Attribute) or method.attr not in ("to", "cuda"):
                raise CannotEditError(f"line {call.lineno} is not a call of .to() or .cuda()")
            source.set_keyword(call, "non_blocking", "True")
            if site.about["pinned"] == "False" and not self.sites.of("loader"):
                at = source.end(method.value)
                source.replace(at, at, ".pin_memory()")

    def _read_back(self) -> None:
        lines = ", ".join(where(site) for site in self.sites.of("item"))
        raise CannotEditError(
            f"values are read from the device at {lines or 'an unknown line'}: read them every"
            " hundred steps, or add them up on the device; only you know which are needed"
        )

    def _batch(self) -> None:
        raise CannotEditError(
            f"a batch of {self.settings['batch']} changes the training: choose it together with"
            " the learning rate"
        )


def _by_author() -> None:
    raise CannotEditError("which segments are checkpointed is decided in your model's code")


def _some(sites: Sequence[Site], why: str) -> Sequence[Site]:
    if not sites:
        raise CannotEditError(why)
    return sites


def _names(site: Site, depth: int) -> tuple[str, ...]:
    """Expressions of all models in one function of a stack; empty if one has none."""
    every = {number for names in site.models for number in names}
    names = site.models[depth] if depth < len(site.models) else {}
    return tuple(names[number] for number in sorted(every)) if every == set(names) else ()


def _target(source: Source, statement: ast.stmt, direct: bool) -> str:
    """Return the variable that a statement assigns its optimizer to; empty if it is not plain."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and direct:
        (target,) = statement.targets
        if isinstance(statement.value, ast.Call) and isinstance(target, ast.Name | ast.Attribute):
            return source.text(target)
    return ""


def _assigned(expression: str, statement: ast.stmt) -> bool:
    """Return True if the statement itself assigns the variable that the expression begins with."""
    name = expression.partition(".")[0]
    stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
    return any(isinstance(n.ctx, ast.Store) and n.id == name for n in stored)


def _common_block(
    source: Source, first: ast.stmt, second: ast.stmt
) -> tuple[list[ast.stmt], int, int] | None:
    """Return the innermost block that has both statements, or statements around them."""
    around = [first, *(n for n in source.ancestors(first) if isinstance(n, ast.stmt))]
    others = [second, *(n for n in source.ancestors(second) if isinstance(n, ast.stmt))]
    for one in around:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        block = source.block_of(one)
        for other in others:
            if other in block:
                return block, block.index(one), block.index(other)
    return None


def _accelerate(model: str, optimizer: str, dtype: str = "") -> str:
    arguments = [model, *filter(None, [optimizer])]
    if dtype:
        arguments.append(f'dtype="{dtype}"')
    return f"stepscope.accelerate({', '.join(arguments)})"
