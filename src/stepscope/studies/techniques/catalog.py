"""The techniques: their two variants on a GPU and on a CPU, and the hardware mechanism."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.analysis.waterfall import Cause


class Words(NamedTuple):
    """Description of a technique on one kind of device."""

    slow: str
    fast: str
    hardware: str


class Technique(NamedTuple):
    """An optimization technique and its descriptions."""

    title: str
    gpu: Words
    cpu: Words
    cause: Cause
    """The part of a step's waterfall that the technique shortens."""
    example: str
    """Parts of a training step to which it applies."""
    cached: bool = False
    """True if most loads hit caches, for whose bandwidth there is no measured ceiling."""


TECHNIQUES: dict[str, Technique] = {
    "divergence": Technique(
        "Control divergence",
        Words(
            "loops of 16 to 2048 iterations, shuffled over the lanes",
            "the same loops sorted by length",
            "the 32 lanes of a warp share one instruction: a lane that has finished is masked off"
            " until the longest loop of its warp ends; with equal lengths no lane idles",
        ),
        Words(
            "both sides of a branch computed for all elements, one selected",
            "elements sorted by side, each side computed only where it is taken",
            "a vector register holds neighboring elements and executes one instruction for all of"
            " them: where neighbors differ, both sides are computed for both",
        ),
        "matmuls below the ceiling",
        "masked tiles of causal attention, padding of ragged batches",
    ),
    "precision": Technique(
        "Lower precision",
        Words(
            "a matmul in float32",
            "the same matmul in bfloat16 (float16 before Ampere), accumulated in float32",
            "float32 runs on the CUDA cores of the SM, one multiply-add each; 16-bit dtypes run on"
            " its tensor cores, one block of the matmul per instruction, and take half the bytes",
        ),
        Words(
            "a matmul in float64",
            "the same matmul in float32",
            "a vector register and a cache line hold twice as many elements of half the width",
        ),
        "matmuls below the ceiling",
        "a matmul in a wider dtype than necessary",
        cached=True,
    ),
    "fusion": Technique(
        "Operator fusion",
        Words(
            "four elementwise operations, one kernel each",
            "the same four operations in one kernel",
            "between kernels a value is written to device memory and read back; within a kernel it"
            " stays in a register",
        ),
        Words(
            "an activation (hard swish) in four calls",
            "the same activation in one call",
            "between calls a value is written through the caches to memory and read back; within a"
            " call it stays in a register",
        ),
        "memory-bound operations",
        "norms, activations, residual sums, casts, the optimizer",
    ),
    "recomputation": Technique(
        "Recomputation",
        Words(
            "the forward pass saves what the backward pass needs, and the backward pass reads it",
            "the backward pass recomputes it from the input",
            "arithmetic in a memory-bound kernel is free: recomputing a value in a register costs"
            " less than loading it, and no memory is needed between the passes",
        ),
        Words(
            "the forward pass saves what the backward pass needs, and the backward pass reads it",
            "the backward pass recomputes it from the input, chunk by chunk in the cache",
            "a core has few vector lanes, so recomputing a value takes about as long as loading"
            " it; the gain is memory",
        ),
        "memory-bound operations",
        "flash attention, which never writes its scores; activation checkpointing does the same to"
        " save memory, and is the recomputation of the waterfall",
    ),
    "coalescing": Technique(
        "Coalesced access",
        Words(
            "neighboring lanes read 32 bytes apart (array of structs with eight fields)",
            "neighboring lanes read neighboring words (struct of arrays)",
            "memory moves sectors of 32 bytes: a warp that reads 32 neighboring words loads 4"
            " sectors, a warp that reads 32 words 32 bytes apart loads 32",
        ),
        Words(
            "elements read 64 bytes apart (array of structs with sixteen fields)",
            "neighboring elements read together (struct of arrays)",
            "memory moves full cache lines: at 64 bytes apart one line is loaded for each element,"
            " and vector loads are not possible",
        ),
        "casts and copies",
        "transposes, strided heads, copies to contiguous",
    ),
    "tiling": Technique(
        "Tiling",
        Words(
            "a matmul with one lane per output element, operands loaded for every multiply-add",
            "the same matmul in tiles of 64 × 64, each computed by one SM",
            "a tile in shared memory and registers is loaded once and used 64 times by its block,"
            " so the SM is limited by arithmetic and no longer by memory",
        ),
        Words(
            "a matmul row by row: the other matrix is read for each row",
            "the same matmul, 64 rows at a time",
            "a value loaded into a register or the nearest cache serves 64 rows before it is"
            " evicted",
        ),
        "matmuls below the ceiling",
        "matmuls of awkward shapes; tiled attention, whose scores stay on chip",
        cached=True,
    ),
}
"""Techniques in the order of the tables."""

CARD: dict[str, tuple[str, str]] = {
    "sms": (
        "streaming multiprocessors (SMs)",
        "each runs the warps of several blocks concurrently",
    ),
    "lanes_per_warp": ("lanes per warp", "threads that share one instruction"),
    "warps_per_sm": (
        "maximum warps per SM",
        "other warps run while one waits for memory; occupancy is the share in use",
    ),
    "threads_per_sm": ("maximum threads per SM", "lanes times warps"),
    "blocks_per_sm": ("maximum blocks per SM", "a block stays on the SM it started on"),
    "threads_per_block": ("maximum threads per block", "they share memory and can synchronize"),
    "registers_per_sm": (
        "32-bit registers per SM",
        "divided among its threads: a kernel that uses many registers runs fewer warps",
    ),
    "shared_bytes_per_sm": (
        "shared memory per SM",
        "on chip, managed by the kernel; used for tiles",
    ),
    "shared_bytes_per_block": ("maximum shared memory per block", "limits the size of a tile"),
    "cores": ("cores", "available to this process"),
    "vector_bits": ("vector registers", "width of one vector instruction"),
    "l1_bytes": ("first-level data cache, per core", "latency of about four cycles"),
    "l2_bytes": (
        "second-level cache",
        "shared by all SMs on a GPU, usually private to a core on a CPU",
    ),
    "l3_bytes": ("third-level cache", "shared by cores"),
    "line_bytes": ("cache line", "the unit of transfer between memory and caches"),
    "clock_hz": ("highest clock", "a power-limited device runs below it"),
    "memory_clock_hz": ("memory clock", ""),
    "bus_bits": ("memory bus", "width of the memory interface"),
    "memory_rate": (
        "theoretical memory bandwidth",
        "from clock and bus width; above the measured bandwidth",
    ),
    "memory_bytes": ("memory", ""),
    "power_limit_w": ("power limit", "the clock is lowered to stay below it"),
}
"""Entries of the device card: title and meaning for a kernel."""


def words(technique: str, device_kind: str) -> Words:
    """Description of a technique on this kind of device."""
    entry = TECHNIQUES[technique]
    return entry.gpu if device_kind == "cuda" else entry.cpu
