"""The generated parts of docs/accelerate.md, each the lines between two comments: times on an
H200."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from page_parts import replaced

from stepscope.report.tables import col, table
from stepscope.report.text import markdown

PAGE = "docs/accelerate.md"
STARTS = "acceleration-start_h200.jsonl"
BEGIN_STARTS = "<!-- first steps: benchmarks/acceleration.py -->"
GRAPHS = "acceleration-graph_h200.jsonl"
BEGIN_GRAPHS = "<!-- graphs: benchmarks/acceleration.py -->"
SHARDED = "fsdp2_h200.jsonl"
BEGIN_SHARDED = "<!-- FSDP2: benchmarks/fsdp2.py -->"
_SHARDED_FORMS = {
    "bare": "as it is",
    "accelerate": "accelerated",
    "fsdp2-reshard": "FSDP2",
    "fsdp2-reshard-compile-blocks": "FSDP2, compiled blocks",
    "fsdp2-reshard-accelerate": "FSDP2, accelerated",
    "fsdp2-reshard-fp8": "FSDP2, accelerated, gathered in FP8",
    "fsdp2-keep": "FSDP2, weights kept",
    "fsdp2-keep-compile-blocks": "FSDP2, weights kept, compiled blocks",
    "fsdp2-keep-accelerate": "FSDP2, weights kept, accelerated",
    "fsdp2-keep-fp8": "FSDP2, weights kept, accelerated, gathered in FP8",
}
_MODELS = {
    "hf_llama_1b": "Hugging Face Llama 1B, 4 × 2048",
    "hf_llama_1b_short": "Hugging Face Llama 1B, 1 × 512",
    "hf_llama_d1024": "Hugging Face Llama, width 1024, 8 × 512",
    "qwen2_0.5b": "Hugging Face Qwen2 0.5B, 4 × 2048",
    "gpt2": "Hugging Face GPT-2, 8 × 1024",
    "timm_vit_b16": "timm ViT-B/16, 128 images",
    "hf_gemma3": "Hugging Face Gemma 3, 26 layers, 4 × 2048",
    "own_decoder": "own decoder (soft-capped logits), 8 × 2048",
    "linear_2.7b": "own 2.7b of nn.Linear, 4 × 2048",
    "cs336_medium": "own classes (CS336 medium), 8 × 512",
    "x_transformers": "x-transformers decoder (rotary, GLU, RMSNorm), 8 × 1024",
    "modernbert": "Hugging Face ModernBERT base, 16 × 512",
    "hf_smollm3": "Hugging Face SmolLM3 0.36B, 4 × 2048",
    "own_small": "TransformerLM small, 4 × 512",
    "own_xl": "TransformerLM xl, 4 × 512",
}
_FORMS = {
    "compile": "torch.compile",
    "compile-blocks": "torch.compile of blocks",
    "compile-reduce-overhead": "torch.compile, reduce-overhead",
    "compile-blocks-cudnn": "torch.compile of blocks, cuDNN attention",
    "liger": "Liger",
}
_STEPSCOPE = "stepscope-compile-passes"

Line = dict[str, Any]


def with_tables(page: str, results: Path) -> str:
    """Return the page with the lines between the comments regenerated."""
    starts, graphs = (
        [json.loads(line) for line in (results / name).read_text().splitlines()]
        for name in (STARTS, GRAPHS)
    )
    page = replaced(page, BEGIN_GRAPHS, _graphs(graphs))
    page = replaced(page, BEGIN_SHARDED, _sharded(results / SHARDED))
    return replaced(page, BEGIN_STARTS, _starts(starts))


def _sharded(record: Path) -> str:
    """Return the table of FSDP2 on one rank, if it was measured."""
    if not record.exists():
        return "Not measured on a GPU yet (`python benchmarks/fsdp2.py`)."
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    forms = [form for form in _SHARDED_FORMS if _values(lines, form, "median_ms")]
    columns = [
        col("form", lambda form: _SHARDED_FORMS[form]),
        col("step", lambda form: statistics.median(_values(lines, form, "median_ms")), unit="ms"),
        col("peak", lambda form: round(max(_values(lines, form, "steps_gib")), 1), unit="GiB"),
    ]
    return "\n\n".join([
        markdown(table("sharded", "", forms, columns)).strip(),
        f"{_MODELS[lines[0]['row']]}, one rank over NCCL. Records: `results/{SHARDED}`"
        f" ({lines[0]['device']}, torch {lines[0]['torch']}).",
    ])  # fmt: skip


class Speed(NamedTuple):
    """Step times of one model, in milliseconds, and reserved memory in GiB."""

    model: str
    baseline: str
    baseline_ms: float
    baseline_gib: float | None
    ms: float
    gib: float | None


def speeds_of(lines: list[Line]) -> list[Speed]:
    """Return the models with a time of Stepscope and of a baseline: medians of all blocks."""
    rows = (_speed(name, [one for one in lines if one["row"] == name]) for name in _MODELS)
    return [row for row in rows if row is not None]


def _speed(name: str, lines: list[Line]) -> Speed | None:
    forms = dict.fromkeys(one["form"] for one in lines if "median_ms" in one)
    times = {f: statistics.median(_values(lines, f, "median_ms")) for f in forms}
    tried = [form for form in times if form in _FORMS]
    if _STEPSCOPE not in times or not tried:
        return None
    baseline = min(tried, key=times.__getitem__)
    gib = [min(_values(lines, form, "steps_gib"), default=None) for form in (baseline, _STEPSCOPE)]
    return Speed(
        _MODELS[name], _FORMS[baseline], times[baseline], gib[0], times[_STEPSCOPE], gib[1]
    )


def _graphs(lines: list[Line]) -> str:
    columns = [
        col("model, batch", lambda row: row.model),
        col("fastest baseline", lambda row: row.baseline),
        col("baseline", lambda row: row.baseline_ms, unit="ms"),
        col("Stepscope", lambda row: row.ms, unit="ms"),
        col("ratio", lambda row: f"{row.baseline_ms / row.ms:.2f}"),
        col("baseline's memory", lambda row: row.baseline_gib, unit="GiB"),
        col("memory", lambda row: row.gib, unit="GiB"),
    ]
    return (
        f"{markdown(table('graphs', '', speeds_of(lines), columns)).strip()}\n\n"
        f"Records: `results/{GRAPHS}` (NVIDIA H200, torch {lines[-1]['torch']}). Memory is what the"
        " allocator has reserved while steps run."
    )


def _starts(lines: list[Line]) -> str:
    """Return the table of the seconds of first steps."""

    def seconds(row: str, form: str, cache: str) -> str | None:
        found = [
            one["first_step_s"]
            for one in lines
            if (one["row"], one["form"], one["triton_cache"]) == (row, form, cache)
        ]
        return f"{found[-1]:.1f}" if found else None

    rows = [name for name in _MODELS if any(one["row"] == name for one in lines)]
    columns = [
        col("model, batch", lambda row: _MODELS[row]),
        col(
            "torch.compile of blocks, empty caches",
            lambda row: seconds(row, "compile-blocks-cudnn", "empty"),
            unit="s",
        ),
        col("Stepscope, empty cache", lambda row: seconds(row, _STEPSCOPE, "empty"), unit="s"),
        col("Stepscope, later runs", lambda row: seconds(row, _STEPSCOPE, "filled"), unit="s"),
    ]
    return f"{markdown(table('starts', '', rows, columns)).strip()}\n\nRecords: `results/{STARTS}`."


def _values(lines: list[Line], form: str, name: str) -> list[float]:
    return [one[name] for one in lines if one.get("form") == form and name in one]
