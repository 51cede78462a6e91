"""Dense peak rates from vendors' datasheets, by exact device name; unknown devices have none."""

from __future__ import annotations

from stepscope.records.schema import Ceiling

_HOPPER = "NVIDIA H200 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"

# Device name: source, then TFLOP/s in float32, tf32, float16, bfloat16, FP8, then memory in TB/s.
_PEAKS: dict[
    str, tuple[str, float, float | None, float, float | None, float | None, float]
] = {
    "NVIDIA H200": (_HOPPER, 67.0, 494.7, 989.4, 989.4, 1978.9, 4.8),
    "NVIDIA H100 80GB HBM3": (_H100, 67.0, 494.7, 989.4, 989.4, 1978.9, 3.35),
    "NVIDIA H100 PCIe": (_H100, 51.0, 378.0, 756.0, 756.0, 1513.0, 2.0),
    "NVIDIA A100-SXM4-80GB": (_A100, 19.5, 156.0, 312.0, 312.0, None, 2.039),
    "NVIDIA A100-SXM4-40GB": (_A100, 19.5, 156.0, 312.0, 312.0, None, 1.555),
    "NVIDIA A100 80GB PCIe": (_A100, 19.5, 156.0, 312.0, 312.0, None, 1.935),
    "NVIDIA A10": ("NVIDIA A10 datasheet", 31.2, 62.5, 125.0, 125.0, None, 0.6),
    "NVIDIA L4": ("NVIDIA L4 datasheet", 30.3, 60.0, 121.0, 121.0, 242.0, 0.3),
    "NVIDIA L40S": ("NVIDIA L40S datasheet", 91.6, 183.0, 362.0, 362.0, 733.0, 0.864),
    "NVIDIA GeForce RTX 4090": (
        "NVIDIA Ada GPU architecture whitepaper", 82.6, 82.6, 165.2, 165.2, 330.3, 1.008,
    ),
    "NVIDIA GeForce RTX 3090": (
        "NVIDIA Ampere GA102 whitepaper", 35.6, 35.6, 71.0, 71.0, None, 0.936,
    ),
    "AMD Instinct MI300X": (
        "AMD Instinct MI300X data sheet", 163.4, None, 1307.4, 1307.4, 2614.9, 5.3,
    ),
    "Tesla T4": ("NVIDIA T4 datasheet", 8.1, None, 65.0, None, None, 0.32),
    "Tesla V100-SXM2-16GB": ("NVIDIA V100 datasheet", 15.7, None, 125.0, None, None, 0.9),
    "Tesla V100-SXM2-32GB": ("NVIDIA V100 datasheet", 15.7, None, 125.0, None, None, 0.9),
}  # fmt: skip


def datasheet_ceilings(device_name: str) -> tuple[Ceiling, ...]:
    if device_name not in _PEAKS:
        return ()
    source, float32, tf32, float16, bfloat16, fp8, memory = _PEAKS[device_name]
    rates = {
        "float32": float32,
        "tf32": tf32,
        "float16": float16,
        "bfloat16": bfloat16,
        "fp8": fp8,
    }
    matrix = tuple(
        Ceiling(name=f"matmul.{name}", value=rate * 1e12, unit="FLOP/s", source=source)
        for name, rate in rates.items()
        if rate is not None
    )
    copy = Ceiling(name="memory.copy", value=memory * 1e12, unit="B/s", source=source)
    return (*matrix, copy)
