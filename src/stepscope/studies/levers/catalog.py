"""The levers in words: the two forms on a GPU and on a CPU, and what the hardware does."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.analysis.waterfall import Cause


class Words(NamedTuple):
    """A lever on one kind of device."""

    slow: str
    fast: str
    hardware: str


class Lever(NamedTuple):
    title: str
    gpu: Words
    cpu: Words
    cause: Cause
    """The part of a step's waterfall that it shortens."""
    example: str
    """Where a training step meets it."""
    cached: bool = False
    """Most of what its forms load comes from caches, whose rate is no ceiling here."""


LEVERS: dict[str, Lever] = {
    "divergence": Lever(
        "Control divergence",
        Words(
            "loops of 16 to 2048 turns, shuffled over the lanes",
            "the same loops sorted by length",
            "32 lanes of a warp share one instruction: a lane that is done waits, masked off, until"
            " the longest loop of its warp ends; a warp of equal lengths leaves no lane idle",
        ),
        Words(
            "both sides of a branch computed for all numbers, one kept",
            "numbers sorted by side, each side computed where it is taken",
            "a vector register holds neighbours and has one instruction for all of them: where"
            " neighbours differ, both sides are computed for both",
        ),
        "matmuls below peak",
        "masked tiles of causal attention, padding of ragged batches",
    ),
    "precision": Lever(
        "Lower precision",
        Words(
            "a matrix product in float32",
            "the same product in bfloat16 (float16 before Ampere), summed in float32",
            "float32 runs on the SM's ordinary lanes, one multiply-add each; 16-bit formats run on"
            " its tensor cores, a block of the product an instruction, and take half the bytes",
        ),
        Words(
            "a matrix product in float64",
            "the same product in float32",
            "a vector register holds twice as many numbers of half the width, and as many more fit"
            " in a cache line",
        ),
        "matmuls below peak",
        "a product in a wider format than it needs",
        cached=True,
    ),
    "fusion": Lever(
        "Operator fusion",
        Words(
            "four elementwise operations, a kernel each",
            "the same four in one kernel",
            "between kernels a number goes to device memory and back; within one it stays in a"
            " register of its lane",
        ),
        Words(
            "an activation (hard swish) in four calls",
            "the same in one call",
            "between calls a number goes through the caches to memory and back; within one it stays"
            " in a register",
        ),
        "memory-bound operations",
        "norms, activations, residual sums, casts, the optimizer",
    ),
    "recomputation": Lever(
        "Recomputation",
        Words(
            "forward writes what the backward needs, backward reads it",
            "backward makes it again from the input",
            "arithmetic that waits for memory is free: making a number again in a register costs"
            " less than fetching it, and the memory between the passes is not needed",
        ),
        Words(
            "forward writes what the backward needs, backward reads it",
            "backward makes it again from the input, chunk by chunk in the cache",
            "a core has few lanes, so that making a number again takes about as long as fetching"
            " it; what is saved is memory",
        ),
        "memory-bound operations",
        "attention that never writes its scores; checkpointing is the same for the sake of memory,"
        " and is the waterfall's recomputation",
    ),
    "coalescing": Lever(
        "Coalesced access",
        Words(
            "neighbouring lanes read 32 bytes apart (records of eight fields)",
            "neighbouring lanes read neighbouring words (a field after the other)",
            "memory moves sectors of 32 bytes: a warp whose lanes are neighbours fetches 4 for its"
            " 32 words, a warp whose lanes are 32 bytes apart fetches 32 for them",
        ),
        Words(
            "numbers read 64 bytes apart (records of sixteen fields)",
            "neighbouring numbers read together (a field after the other)",
            "memory moves whole cache lines: at 64 bytes apart a line is fetched for each number,"
            " and vector loads are out of reach",
        ),
        "casts and copies",
        "transposes, strided heads, copies to contiguous",
    ),
    "tiling": Lever(
        "Tiling",
        Words(
            "a matrix product, a lane for each element, operands loaded for every multiply-add",
            "the same product in tiles of 64 × 64 held by one SM",
            "a tile in shared memory and registers is loaded once and used 64 times by the block"
            " that holds it, so that the SM's lanes wait for arithmetic and no longer for memory",
        ),
        Words(
            "a matrix product, row by row: the other matrix is read for each",
            "the same product, 64 rows at a time",
            "what is loaded into a register or the nearest cache serves 64 rows before it is thrown"
            " out",
        ),
        "matmuls below peak",
        "products of unfit shapes; attention in tiles, whose scores stay on the chip",
        cached=True,
    ),
}
"""In the order of the list that they come from."""

CARD: dict[str, tuple[str, str]] = {
    "sms": ("streaming multiprocessors (SMs)", "each runs many blocks' warps at once"),
    "lanes_per_warp": ("lanes of a warp", "threads that share one instruction"),
    "warps_per_sm": (
        "warps an SM holds at most",
        "others run while one waits for memory: occupancy is the share in use",
    ),
    "threads_per_sm": ("threads an SM holds at most", "lanes times warps"),
    "blocks_per_sm": ("blocks an SM holds at most", "a block stays on the SM it started on"),
    "threads_per_block": ("threads of a block at most", "they share memory and can wait together"),
    "registers_per_sm": (
        "registers of an SM, 32 bit",
        "divided among its threads: a kernel that takes many leaves room for few warps",
    ),
    "shared_bytes_per_sm": (
        "shared memory of an SM",
        "on the chip, managed by the kernel: where tiles live",
    ),
    "shared_bytes_per_block": ("shared memory of a block at most", "what one tile may take"),
    "cores": ("cores", "available to this process"),
    "vector_bits": ("vector registers", "how many neighbours one instruction takes"),
    "l1_bytes": ("first-level data cache, per core", "some four clocks away"),
    "l2_bytes": ("second-level cache", "on a GPU shared by all SMs, on a CPU mostly of one core"),
    "l3_bytes": ("third-level cache", "shared by cores"),
    "line_bytes": ("cache line", "the least that moves between memory and a cache"),
    "clock_hz": ("highest clock", "under a power limit the device runs below it"),
    "memory_clock_hz": ("memory clock", ""),
    "bus_bits": ("memory bus", "wires between chip and memory"),
    "memory_rate": ("memory rate by clock and bus", "the limit above the measured one"),
    "memory_bytes": ("memory", ""),
    "power_limit_w": ("power limit", "above it the clock is lowered"),
}
"""Facts of a device card: what they are called, and what they mean for a kernel."""


def words(lever: str, device_kind: str) -> Words:
    held = LEVERS[lever]
    return held.gpu if device_kind == "cuda" else held.cpu
