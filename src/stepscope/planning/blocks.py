"""Repeated blocks of a model, found by its structure, and which of them are equal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

_PLAIN = (bool, int, float, str, type(None))


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name: modules with parts and trainable parameters of whose class their
    parent has several. Where blocks contain blocks, those of which there are more."""
    return {name: block for name, block, _ in _repeated(model, "")}


def _repeated(parent: nn.Module, path: str) -> list[tuple[str, nn.Module, int]]:
    children = list(parent.named_children())
    families = Counter(type(child) for _, child in children)
    found = []
    for name, child in children:
        inner = _repeated(child, f"{path}{name}.")
        siblings = families[type(child)]
        is_block = siblings > 1 and _is_block(child)
        is_finer = max((count for *_, count in inner), default=0) > siblings and _most(child, inner)
        is_container = isinstance(child, nn.Sequential) and bool(inner)
        if is_block and not is_finer and not is_container:
            found.append((f"{path}{name}", child, siblings))
        else:
            found += inner
    return found


def _is_block(module: nn.Module) -> bool:
    can_be_called = type(module).forward is not nn.Module.forward
    has_parts = next(module.children(), None) is not None
    return can_be_called and has_parts and any(p.requires_grad for p in module.parameters())


def _most(module: nn.Module, inner: list[tuple[str, nn.Module, int]]) -> bool:
    """Return whether these parts have most of the parameters."""
    within = {id(p): p.numel() for _, part, _ in inner for p in part.parameters()}
    return 3 * sum(within.values()) > 2 * sum(p.numel() for p in module.parameters())


def structures(blocks: Mapping[str, nn.Module]) -> dict[str, Hashable]:
    """Describe each block: those of equal descriptions run the same operators for equal inputs.

    An attribute that counts the blocks is their index and left out.
    """
    families: dict[Hashable, list[str]] = defaultdict(list)
    shapes = {name: _shapes(block) for name, block in blocks.items()}
    for name, shape in shapes.items():
        families[shape].append(name)
    described: dict[str, Hashable] = {}
    for shape, names in families.items():
        values = [_settings(blocks[name]) for name in names]
        indices = {key for key in values[0] if _is_index([one.get(key) for one in values])}
        for name, one in zip(names, values, strict=True):
            settings = tuple(item for item in one.items() if item[0] not in indices)
            described[name] = (shape, settings)
    return described


def _shapes(block: nn.Module) -> Hashable:
    parameters = [
        (name, one.shape, one.dtype, one.requires_grad) for name, one in block.named_parameters()
    ]
    buffers = [(name, one.shape, one.dtype) for name, one in block.named_buffers()]
    kinds = [(name, type(one)) for name, one in block.named_modules()]
    return (*kinds, *parameters, *buffers)


def _settings(block: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, part in block.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, _PLAIN)
    }


def _is_index(values: list[Any]) -> bool:
    if len(values) < 2 or any(type(value) is not int for value in values):
        return False
    return values == list(range(values[0], values[0] + len(values)))


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    leaves, tree = tree_flatten((args, kwargs))
    return (str(tree), *map(_described, leaves))


def _described(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf)
