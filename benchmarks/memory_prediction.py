"""`stepscope.predict` against the peaks that CUDA's allocator reported for the same models.

    python benchmarks/memory_prediction.py --out results/memory-prediction.jsonl

Predicts each recorded row of `acceleration.py` on fake tensors, which needs no GPU, and compares it
with the recorded peak: as it is (form "plain": eager, bfloat16 autocast, fused AdamW), with
compiled blocks, and compiled as one. A row whose library is missing is skipped with the reason.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch
from acceleration import loss_function
from acceleration_rows import ROWS, Row

import stepscope

RECORD = Path(__file__).resolve().parents[1] / "results" / "acceleration_h200.jsonl"


FORMS: dict[str, Literal["blocks", "model"] | None] = {
    "plain": None,
    "compile-blocks": "blocks",
    "compile": "model",
}


def recorded_peaks() -> dict[tuple[str, str], float]:
    """GiB of each row and form, in its latest record."""
    lines = map(json.loads, RECORD.read_text().splitlines())
    return {
        (line["row"], line["form"]): line["peak_gib"]
        for line in lines
        if line.get("form") in FORMS and "peak_gib" in line
    }


def batch_of(row: Row) -> Any:
    count, length, _ = row.shape
    if row.family == "vit":
        return torch.zeros(count, 3, length, length), torch.zeros(count, dtype=torch.long)
    tokens = torch.zeros(count, length, dtype=torch.long)
    if row.family in ("own", "pairs"):
        return tokens, tokens.clone()
    return {"input_ids": tokens, "labels": tokens}


def predicted(row: Row, form: str, measured_gib: float) -> dict[str, Any]:
    started = time.perf_counter()
    with torch.device("meta"):
        model = row.build(False).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    prediction = stepscope.predict(
        model, optimizer, batch_of(row), loss_fn=loss_function(row), dtype=torch.bfloat16,
        compile=FORMS[form],
    )  # fmt: skip
    gib = prediction.peak.allocated / 2**30
    return {
        "row": row.name,
        "form": form,
        "measured_gib": measured_gib,
        "predicted_gib": gib,
        "error": gib / measured_gib - 1,
        "predicted_reserved_gib": prediction.reserved / 2**30,
        "seconds": time.perf_counter() - started,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write a line of JSON for each row")
    options = parser.parse_args()
    lines = []
    for (name, form), gib in recorded_peaks().items():
        try:
            line = predicted(ROWS[name], form, gib)
        except (ImportError, RuntimeError) as error:
            print(f"{name}: skipped, {str(error).splitlines()[0]}")
            continue
        lines.append(line)
        print(f"{name:20} {form:15} {line['predicted_gib']:8.3f} GiB predicted, {gib:8.3f} GiB"
              f" measured, {line['error']:+.2%}, {line['seconds']:.0f} s", flush=True)  # fmt: skip
        if options.out is not None:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
