"""Activation checkpointing strategies: which blocks are recomputed in the backward pass. No torch.

A strategy is a sequence of segment sizes in blocks, outermost first: `4` saves the input of every
fourth block and recomputes a segment of four blocks in the backward pass; `8-1` saves every eighth
input, and while it recomputes eight blocks it saves only the input of each, so that one block at a
time has its activations in memory. `nested` halves recursively: the fewest saved inputs, at the
price of more recomputation.
"""

from __future__ import annotations

from stepscope.errors import UsageError

NONE, NESTED = "no", "nested"


def segment_sizes(strategy: str, layers: int) -> tuple[int, ...]:
    """Return the blocks per checkpointed segment of each level, outermost first; empty if all
    activations are saved."""
    if strategy == NONE:
        return ()
    if strategy == NESTED:
        return _halves(layers)
    words = strategy.split("-")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"checkpointing strategy {strategy!r} does not exist",
            "give no, a number of blocks such as 4, levels such as 8-1, or nested",
        )
    sizes = tuple(map(int, words))
    if any(size < 1 for size in sizes) or any(a <= b for a, b in zip(sizes, sizes[1:])):  # noqa: B905, RUF007
        raise UsageError(
            f"checkpointing strategy {strategy!r} has segments of {', '.join(words)} blocks",
            "each segment must have at least 1 block and be smaller than the one around it",
        )
    return sizes


def _halves(layers: int) -> tuple[int, ...]:
    sizes = [layers]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sizes[1:]) or (1,)


def recomputed_blocks(sizes: tuple[int, ...], layers: int) -> int:
    """Return the number of block forward passes that are recomputed in the backward pass.

    A segment with inner segments is recomputed only up to the input of the last one.
    """
    if not sizes:
        return 0
    total = 0
    for start in range(0, layers, sizes[0]):
        members = min(sizes[0], layers - start)
        inner = sizes[1:]
        if inner:
            last = (members - 1) % inner[0] + 1
            total += members - last + recomputed_blocks(inner, members)
        else:
            total += members
    return total


def saved_inputs(sizes: tuple[int, ...], layers: int) -> int:
    """Return the maximum number of segment inputs that are saved at the same time."""
    if not sizes:
        return 0
    starts = range(0, layers, sizes[0])
    # While segment `index` is recomputed, its input and those of the segments before it are saved.
    return max(
        index + 1 + max(0, saved_inputs(sizes[1:], min(sizes[0], layers - start)) - 1)
        for index, start in enumerate(starts)
    )
