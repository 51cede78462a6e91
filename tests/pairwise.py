"""Combinations of parameters that have every pair of values of two of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

Combination = tuple[Any, ...]


def pairwise(parameters: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test of kernels: on a GPU by all combinations, in the interpreter by those that
    `covering` chooses. The values of names with a comma are tuples."""
    columns = [list(values) for values in parameters.values()]
    chosen = [*itertools.product(*columns)] if torch.cuda.is_available() else covering(columns)
    names = [name.split(", ") for name in parameters]
    cases = [
        tuple(
            value
            for group, values in zip(names, case, strict=True)
            for value in (values if len(group) > 1 else (values,))
        )
        for case in chosen
    ]
    ids = ["-".join(_text(value) for value in case) for case in cases]
    return pytest.mark.parametrize(", ".join(parameters), cases, ids=ids)


def covering(columns: Iterable[Iterable[Any]]) -> list[Combination]:
    """Choose combinations that have every pair of values of two columns, those with the most new
    pairs first."""
    left = [*itertools.product(*(enumerate(column) for column in columns))]
    missing = {pair for case in left for pair in _pairs(case)}
    chosen: list[Combination] = []
    while missing:
        best = max(left, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        chosen.append(tuple(value for _, value in best))
    return chosen


def _pairs(case: tuple[tuple[int, Any], ...]) -> set[tuple[int, int, int, int]]:
    at = [number for number, _ in case]
    return {(i, at[i], j, at[j]) for i, j in itertools.combinations(range(len(at)), 2)}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value).replace("torch.", "")
