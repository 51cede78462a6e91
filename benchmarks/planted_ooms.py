"""Ten planted out-of-memory cases: is the first change suggested by the post-mortem sufficient?

    python benchmarks/planted_ooms.py --out results/planted-ooms_h200.jsonl
    python benchmarks/planted_ooms.py --device cpu --small

Each step is predicted and then allowed only a fraction of its peak: on CUDA by the allocator's
limit (`torch.cuda.set_per_process_memory_fraction`), on a CPU, which has none, by counting every
tensor. It must run out of memory; then the first remedy runs under the same limit. On a GPU it
takes about a minute and a half.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.analysis.predict.plan import Mode
from stepscope.analysis.predict.step import predict
from stepscope.measure.allocator import CudaAllocator
from stepscope.measure.device import Device, pick_device
from stepscope.records.memory import Remedy
from stepscope.training.peaks import counted_peaks
from stepscope.training.plans import plan_of
from stepscope.training.post_mortem import Refusal, examined, read_refusal
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

Planted = tuple[str, int, int, str, str, Mode, float]
PLANTED: tuple[Planted, ...] = (
    ("small", 1024, 4, "float32", "reference", "train-step", 0.90),
    ("small", 1024, 8, "float32", "reference", "train-step", 0.50),
    ("small", 512, 16, "bfloat16", "reference", "train-step", 0.70),
    ("small", 2048, 4, "bfloat16", "sdpa", "train-step", 0.60),
    ("medium", 1024, 4, "float32", "reference", "forward-backward", 0.60),
    ("medium", 512, 8, "float32", "sdpa", "train-step", 0.75),
    ("medium", 1024, 4, "bfloat16", "reference", "train-step", 0.45),
    ("large", 512, 4, "float32", "reference", "train-step", 0.85),
    ("large", 512, 4, "bfloat16-pure", "reference", "train-step", 0.80),
    ("large", 1024, 2, "float32", "sdpa", "forward-backward", 0.70),
)
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Ten planted out-of-memory cases.")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="narrow models, short contexts")
    parser.add_argument("--out", type=Path, help="a JSON Lines file, one line per case")
    options = parser.parse_args()
    device = pick_device(options.device)
    here = {"device": device.name, "torch": torch.__version__}
    outcomes = []
    for number, planted in enumerate(PLANTED, start=1):
        outcome = tried(planted, device, small=options.small)
        outcomes.append(outcome)
        print(f"{number:2} {summary(outcome)}", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("w" if number == 1 else "a") as file:
                file.write(json.dumps(outcome | here) + "\n")
    fitted = sum(outcome.get("fits", False) for outcome in outcomes)
    ran_out = sum("needed" in outcome for outcome in outcomes)
    print(f"{ran_out} of {len(PLANTED)} ran out; the first remedy fitted in {fitted}")
    return 0 if fitted >= 0.9 * len(PLANTED) else 1


def tried(planted: Planted, device: Device, *, small: bool) -> dict[str, Any]:
    """Outcome of one case; an error is an outcome as well, and the next case is tried."""
    work = workload(planted, small=small)
    limit = int(planted[-1] * predict(plan_of(work, device.kind)).peak.allocated)
    outcome: dict[str, Any] = {"case": work.key, "share": planted[-1], "limit": limit}
    try:
        refusal = refused(work, device, limit)
        if refusal is None:
            return outcome
        post_mortem = examined(work, device.kind, limit, refusal)
        outcome |= {
            "needed": post_mortem.needed,
            "asked": post_mortem.asked,
            "phase": post_mortem.phase,
        }
        if not post_mortem.remedies:
            return outcome
        first = post_mortem.remedies[0]
        outcome |= {"remedy": first.words, "remedy_peak": first.peak}
        outcome["fits"] = refused(changed(work, first), device, limit) is None
    except Exception as error:
        traceback.print_exc()
        outcome["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return outcome


def summary(outcome: dict[str, Any]) -> str:
    case, limit = outcome["case"], f"{outcome['limit'] / 2**20:.0f} MiB"
    if "error" in outcome:
        return f"{case}: {outcome['error']}"
    if "needed" not in outcome:
        return f"{case}: did not run out of {limit}"
    if "remedy" not in outcome:
        return f"{case}: no remedy for {limit}"
    return (
        f"{case}: needs {outcome['needed'] / 2**20:.0f} of {limit}; {outcome['remedy']}"
        f" ({outcome['remedy_peak'] / 2**20:.0f} MiB)"
        f" {'fits' if outcome['fits'] else 'DOES NOT FIT'}"
    )


def workload(planted: Planted, *, small: bool = False) -> Workload:
    size, context, batch, dtype, attention, mode, _ = planted
    overrides = {"d_model": 32, "d_ff": 64, "n_heads": 2, "n_layers": 6, "vocab": 32}
    return Workload(
        size=size,
        context=context // 16 if small else context,
        batch=batch,
        dtype="float32" if small else dtype,
        attention=attention,
        mode=mode,
        overrides=overrides if small else {},
    )


def changed(work: Workload, remedy: Remedy) -> Workload:
    return msgspec.convert(msgspec.to_builtins(work) | remedy.changes, Workload)


def refused(work: Workload, device: Device, limit: int) -> Refusal | None:
    """Run under the limit; return the allocator's refusal, or None if it succeeded."""
    if device.kind != "cuda":
        device.release()
        return counted(work, device, limit)
    # As in a new process: an existing cuBLAS workspace would occupy a larger segment.
    CudaAllocator(device.torch_device).library_bytes()
    device.release()
    torch.cuda.set_per_process_memory_fraction(limit / device.memory_bytes)
    message = ""
    try:
        step = TransformerStep(work, device)
        for _ in range(STEPS):
            step.run()
        device.synchronize()
    except torch.OutOfMemoryError as error:
        message = str(error)
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return read_refusal(message) if message else None


def counted(work: Workload, device: Device, limit: int) -> Refusal | None:
    step = TransformerStep(work, device)
    step.run_phases()
    peak = max(counted_peaks(step, device).values())
    return Refusal(asked=0, held=peak, allowed=limit) if peak > limit else None


if __name__ == "__main__":
    sys.exit(main())
