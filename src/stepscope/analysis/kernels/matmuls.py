"""Matmul kernel names of cuBLAS, CUTLASS, cuDNN, Tensile, TensorRT-LLM and other libraries.

The hardware unit is easy to misread: `ampere_sgemm` and `simt_sgemm` run on the FP32 cores, `s1688`
is TF32 (FP16 if the name contains f16, on Turing), `s16816` is float16 or bfloat16. AMD calls its
tensor cores matrix cores.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FP32_CORES = "FP32 cores"
TF32 = "TF32 tensor cores"
FP16 = "FP16 tensor cores"
BF16 = "BF16 tensor cores"
FP8 = "FP8 tensor cores"
FP4 = "FP4 tensor cores"
INT8 = "INT8 tensor cores"
FP64_CORES = "FP64 cores"
FP64 = "FP64 tensor cores"
ON_TENSOR_CORES = ("tensor cores", "matrix cores")
"""Suffixes of the units that are made for matmuls."""


class Matmul(NamedTuple):
    """Properties of a matmul kernel that its name states."""

    short: str
    library: str
    unit: str = ""
    tile: str = ""
    layout: str = ""
    alignment: str = ""


_XMMA = re.compile(
    r"sm\d+_xmma_(?:gemm|fprop|dgrad|wgrad)(?:_implicit_gemm)?_(?P<formats>(?:[a-z]+\d+(?:[a-z]\d)?)+"
    r"(?:_(?:[a-z]+\d+(?:[a-z]\d)?)+)*?)_(?P<layout>[tn]{2})_n_tilesize(?P<tile>\d+x\d+x\d+)"
)
_NVJET = re.compile(
    r"nvjet_(?:sm\d+_)?(?P<letters>[a-z]+)_(?:mma_)?(?P<tile>\d+x\d+)(?:x\d+)?_.*?"
    r"(?:_(?P<layout>[TN]{2})[TN]{1,2})?$"
)
_CLASSIC = re.compile(
    r"(?:maxwell|volta|turing|ampere|hopper)_(?P<body>\w*?)"
    r"(?P<op>[sdhic]\d*)?(?P<what>gemm|cudnn)_(?P<rest>\w+)"
)
_CUTLASS_2 = re.compile(
    r"cutlass_(?:\d+_)?(?:wmma_)?(?P<how>tensorop|simt)_(?P<body>\w*?)"
    r"(?P<op>[sdhic]\d*)(?P<dtype>tf32|bf16|f16)?(?P<what>gemm|fprop|dgrad|wgrad)_(?P<rest>\w+)"
)
_TENSILE = re.compile(
    # The dtypes of A and B, or of both, before those of the output and of the accumulator.
    r"Cijk_(?P<a>Ailk|Alik)_(?P<b>Bljk|Bjlk)_(?P<types>[A-Z0-9]+)_\w*?"
    r"MT(?P<tile>\d+x\d+x\d+)(?P<rest>\w*)"
)
_TENSILE_TYPES = (
    ("F8", "FP8"),
    ("B8", "FP8"),
    ("I8", "INT8"),
    ("4xi8", "INT8"),
    ("B", "BF16"),
    ("H", "FP16"),
    ("S", "FP32"),
    ("D", "FP64"),
)
_TRTLLM = re.compile(
    r"(?:bmm|gemm)_(?P<out>\w+?)_(?P<inputs>\w+?)_(?:Fp32|Fp16)_t(?P<tile>\d+x\d+x\d+)"
)
_CUDNN_ENGINE = re.compile(r"(?:wgrad|dgrad)(?:2d)?(?:_alg\d)?(?:_\d+|_engine)|\w*convolve_\w*")
_MARKS = (
    "gemm",
    "Gemm",
    "GEMM",
    "mm_",
    "matmul",
    "xmma",
    "nvjet",
    "cutlass",
    "cudnn",
    "Cijk",
    "gemv",
    "dot_kernel",
    "reduce_1Block",
    "splitKreduce",
    "grad",
    "convolve",
    "cublas",
)
"""Quick filter: a name without any of these is not a matmul."""
_FRAMES = ("device_kernel", "Kernel", "Kernel2")
"""CUTLASS entry points whose template arguments say what they do."""
_WORD = re.compile(r"gemm|matmul|(?:^|_)b?mm_kernel", re.IGNORECASE)
_TILE = re.compile(r"(?:^|_)(\d+x\d+)(?=_|$)")
_LAYOUT = re.compile(r"_([tn]{2})(?=_|$)")
_ALIGN = re.compile(r"align(\d+)")
_VECTOR = ("gemv", "gemmSN", "gemmk1", "dot_kernel", "reduce_1Block_kernel", "splitKreduce")


def matmul(name: str, plain: str) -> Matmul | None:
    """Parse a full name and its bare function name; None if it is not a matmul."""
    if not any(mark in name for mark in _MARKS):
        return None
    for parse in (_xmma, _nvjet, _cutlass_2, _classic, _tensile, _trtllm):
        result = parse(name)
        if result is not None:
            return result
    if plain.startswith(_VECTOR) or "gemvx::" in name:
        return Matmul(plain if plain != "kernel" else "gemvx", "cuBLAS", FP32_CORES)
    if "deep_gemm::" in name:
        return Matmul(plain, "DeepGEMM", FP8 if "fp8" in plain else BF16 if "bf16" in plain else "")
    if "cutlass" in name and re.search(r"[gG]emm", name):
        return Matmul("cutlass gemm" if plain in _FRAMES else plain, "CUTLASS", _cute(name))
    if _CUDNN_ENGINE.match(plain):
        return Matmul(plain, "cuDNN", FP32_CORES if "<float" in name else "")
    if plain == "globalKernel" and "cublasLt" in name:
        return Matmul("cublasLt epilogue", "cuBLAS")
    if _WORD.search(plain):
        return Matmul(plain, "")
    return None


def _xmma(name: str) -> Matmul | None:
    if "_xmma_" not in name:
        return None
    start = re.search(r"sm\d+_xmma_", name)
    if start is None:
        return None
    short = re.match(r"\w+", name[start.start() :]).group()  # type: ignore[union-attr]
    match = _XMMA.match(short)
    library = "cuDNN" if re.match(r"sm\d+_xmma_(fprop|dgrad|wgrad)", short) else "cuBLAS"
    if match is None:
        return Matmul(short, library)
    alignment = re.search(r"aligna(\d+)", short)
    return Matmul(
        short,
        library,
        _xmma_unit(match["formats"]),
        match["tile"],
        match["layout"],
        alignment.group(1) if alignment else "",
    )


def _xmma_unit(formats: str) -> str:
    """Return the unit: in `f32f32_tf32f32_f32` the middle part is the compute dtype."""
    for mark, unit in (
        ("tf32", TF32),
        ("bf16", BF16),
        ("e4m3", FP8),
        ("e5m2", FP8),
        ("i8", INT8),
        ("f64", FP64),
        ("f16", FP16),
    ):
        if mark in formats:
            return unit
    return FP32_CORES


def _nvjet(name: str) -> Matmul | None:
    if not name.startswith("nvjet_"):
        return None
    match = _NVJET.match(name)
    if match is None:
        return Matmul(name, "cuBLAS")
    # Input, accumulator, output: t is bfloat16, h half, s single (TF32), q and o 8-bit.
    unit = {"t": BF16, "h": FP16, "s": TF32, "q": FP8, "o": FP8}.get(match["letters"][0], "")
    return Matmul(name, "cuBLAS", unit, match["tile"], (match["layout"] or "").lower())


def _cutlass_2(name: str) -> Matmul | None:
    if "cutlass_" not in name:
        return None
    match = _CUTLASS_2.search(name)
    if match is None:
        return None
    rest = match["rest"]
    if match["how"] == "simt":
        unit = FP64_CORES if match["op"].startswith("d") else FP32_CORES
    else:
        unit = _tensor_unit(match["body"], match["op"], match["dtype"] or "", rest)
    library = "cuDNN" if match["what"] != "gemm" else "CUTLASS"
    return Matmul(match.group(), library, unit, *_shape(rest))


def _classic(name: str) -> Matmul | None:
    if "gemm_" not in name and "cudnn_" not in name:
        return None
    match = _CLASSIC.search(name)
    if match is None:
        return None
    op, body, rest = match["op"] or "", match["body"], match["rest"]
    if op in ("s", "h", "d", "c"):
        unit = {"s": FP32_CORES, "d": FP64_CORES}.get(op, "")
    else:
        unit = _tensor_unit(body, op, "", rest)
    library = "cuBLAS" if match["what"] == "gemm" else "cuDNN"
    return Matmul(match.group(), library, unit, *_shape(rest))


def _tensile(name: str) -> Matmul | None:
    """hipBLASLt and rocBLAS: `Alik` is a transposed A, `Bjlk` a transposed B."""
    if not name.startswith("Cijk_"):
        return None
    match = _TENSILE.match(name)
    if match is None:
        return Matmul(name.partition("_MT")[0][:60], "Tensile")
    dtype = next((t for mark, t in _TENSILE_TYPES if match["types"].startswith(mark)), "")
    # Matrix instructions (MI) run on matrix cores.
    cores = "matrix cores" if re.match(r"_MI\d", match["rest"]) else "cores"
    layout = ("t" if match["a"].startswith("Al") else "n") + (
        "t" if match["b"].startswith("Bj") else "n"
    )
    return Matmul(
        f"Cijk_{match['a']}_{match['b']}_{match['types']}_MT{match['tile']}",
        "Tensile",
        f"{dtype} {cores}" if dtype else "",
        match["tile"],
        layout,
    )


def _trtllm(name: str) -> Matmul | None:
    if not name.startswith(("bmm_", "gemm_")):
        return None
    match = _TRTLLM.match(name)
    if match is None:
        return None
    inputs = match["inputs"]
    units = (
        ("E4m3", FP8),
        ("E5m2", FP8),
        ("E2m1", FP4),
        ("Bfloat16", BF16),
        ("Fp16", FP16),
    )
    unit = next((u for mark, u in units if mark in inputs), "")
    return Matmul(match.group(), "TensorRT-LLM", unit, match["tile"])


def _tensor_unit(body: str, op: str, dtype: str, rest: str) -> str:
    words = f"{body}_{dtype}"
    if "bf16" in words:
        return BF16
    if "tf32" in words or "tf32" in rest:
        return TF32
    if "f16" in words or "fp16" in words:
        return FP16
    if op.startswith("d"):
        return FP64
    if op.startswith("i"):
        return INT8
    if op.startswith("h") or op in ("s884", "s161616"):
        return FP16
    # 16x8x8 without a 16-bit dtype is TF32; 16x8x16 is a 16-bit dtype that the name does not give.
    return {"s1688": TF32, "s16816": "FP16/BF16 tensor cores"}.get(op, "")


def _shape(rest: str) -> tuple[str, str, str]:
    tile, layout, alignment = (pattern.search(rest) for pattern in (_TILE, _LAYOUT, _ALIGN))
    return (
        tile.group(1) if tile else "",
        layout.group(1) if layout else "",
        alignment.group(1) if alignment else "",
    )


def _cute(name: str) -> str:
    for mark, unit in (
        ("float_e4m3", FP8),
        ("float_e5m2", FP8),
        ("bfloat16_t", BF16),
        ("half_t", FP16),
        ("tfloat32_t", TF32),
    ):
        if mark in name:
            return unit
    return ""
