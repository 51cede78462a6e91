"""Which blocks run again in the backward instead of keeping their activations. No torch.

A strategy is a row of stretches, outermost first: `4` keeps the input of every fourth block and
runs the blocks between again when the backward arrives; `8-1` keeps every eighth, and while it runs
eight blocks again it keeps each one's input only, so that one block at a time has its activations.
`nested` halves all the way down: as few inputs kept as can be, at the price of more running again.
"""

from __future__ import annotations

from stepscope.errors import UsageError

NONE, NESTED = "no", "nested"


def stretches(strategy: str, layers: int) -> tuple[int, ...]:
    """Blocks in a stretch of each level, outermost first; none where all activations are kept."""
    if strategy == NONE:
        return ()
    if strategy == NESTED:
        return _halves(layers)
    words = strategy.split("-")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"checkpoint {strategy!r} does not exist",
            "no, a number of blocks such as 4, levels such as 8-1, or nested",
        )
    sizes = tuple(map(int, words))
    if any(size < 1 for size in sizes) or any(a <= b for a, b in zip(sizes, sizes[1:])):  # noqa: B905, RUF007
        raise UsageError(
            f"checkpoint {strategy!r} has stretches of {', '.join(words)} blocks",
            "each at least 1, each smaller than the one around it",
        )
    return sizes


def _halves(layers: int) -> tuple[int, ...]:
    sizes = [layers]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sizes[1:]) or (1,)


def run_again(sizes: tuple[int, ...], layers: int) -> int:
    """How many times a block's forward runs in the backward, over all blocks.

    A stretch that has others inside stops at the last one's input: that is all it needs.
    """
    if not sizes:
        return 0
    total = 0
    for start in range(0, layers, sizes[0]):
        members = min(sizes[0], layers - start)
        inner = sizes[1:]
        if inner:
            last = (members - 1) % inner[0] + 1
            total += members - last + run_again(inner, members)
        else:
            total += members
    return total


def saved_inputs(sizes: tuple[int, ...], layers: int) -> int:
    """The most inputs of stretches that are kept at the same time."""
    if not sizes:
        return 0
    starts = range(0, layers, sizes[0])
    # While stretch number `place` is gone through, those before it and its own input are kept.
    return max(
        place + 1 + max(0, saved_inputs(sizes[1:], min(sizes[0], layers - start)) - 1)
        for place, start in enumerate(starts)
    )
