"""`torch.compile(…, backend="stepscope")` on tiny copies of every model of transformers and timm.

    python benchmarks/families.py                        all; results/families_cpu.jsonl
    python benchmarks/families.py --only llama t5 --resume
    python benchmarks/families.py --kinds causal --workers 2
    python benchmarks/families.py --show                 the models that differ or fail

Each model trains four steps with lengths that change and with padding, next to a copy that the
backend compiles (passes on, `aot_eager` or `--compiler inductor`), from the same weights and random
numbers. Losses, gradients, buffers, random numbers after each step, outputs in eval mode and
generated tokens are compared. A model that plain torch.compile cannot run either says so. A line is
written when a model is finished, so that `--resume` continues with the next one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORD = ROOT / "results" / "families_cpu.jsonl"
STEPS = 4
TOLERANCE = 2e-4
"""Of the largest gradient of the model, in float32; a wrong gradient is far off."""
TIMEOUT_S = 600
NEW_TOKENS = 3
Line = dict[str, Any]


def compared(name: str, compiler: str) -> Line:
    """Return what the backend did with a model, and how far it is from the original."""
    import torch
    from tiny_models import MAX_PARAMETERS, by_name, loss_of

    torch.set_num_threads(1)
    tiny = by_name(name)
    line: Line = {"model": name, "library": tiny.library, "kind": tiny.kind}
    line["torch"] = torch.__version__
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in tiny.build().parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"{size / 1e6:.0f} million parameters with these sizes")
        torch.manual_seed(0)
        original = tiny.build().train()
        loss_of(copy.deepcopy(original), tiny.batch(original, 1)).backward()
    except Exception as error:
        return line | {"status": "not built", "reason": _short(error)}
    try:
        trained = _trained(original, tiny, compiler)
        if trained["status"] == "differs" and _differs_with_plain_compile(original, tiny, trained):
            trained["status"] = "torch.compile differs"
        return line | trained
    except Exception as error:
        if _fails_with_plain_compile(original, tiny):
            return line | {"status": "torch.compile fails", "reason": _short(error)}
        return line | {"status": "failed", "reason": _short(error)}


def _trained(original: Any, tiny: Any, compiler: str, plain: bool = False) -> Line:
    """Compare a model with a copy of it through the backend, or by plain torch.compile."""
    import torch
    from tiny_models import loss_of
    from torch._dynamo.utils import counters

    from stepscope.acceleration.backend import backend, graph_reports

    original.train()
    changed = copy.deepcopy(original)
    through: dict[str, Any] = {"backend": backend, "options": {"compiler": compiler}}
    if plain:
        through = {"backend": compiler}
    run = torch.compile(loss_of, **through)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (original, changed)]
    differences: list[str] = []
    worst = 0.0
    for step in range(STEPS):
        batch = tiny.batch(original, step)
        losses, numbers = [], []
        for model, compute in ((original, loss_of), (changed, run)):
            torch.manual_seed(step)
            loss = compute(model, copy.deepcopy(batch))
            loss.backward()
            losses.append(float(loss))
            numbers.append(torch.get_rng_state())
        worst = max(worst, _relative(losses[1] - losses[0], losses[0]))
        largest = max(
            (float(p.grad.abs().max()) for p in original.parameters() if p.grad is not None),
            default=0.0,
        )
        for (at, one), other in zip(original.named_parameters(), changed.parameters(), strict=True):
            if (one.grad is None) != (other.grad is None):
                differences.append(f"step {step}: {at} has a gradient in one of them only")
            elif one.grad is not None:
                error = float((one.grad - other.grad).abs().max())
                worst = max(worst, _relative(error, largest))
        for (at, one), other in zip(original.named_buffers(), changed.buffers(), strict=True):
            if not torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6):
                differences.append(f"step {step}: buffer {at}")
        if not torch.equal(*numbers):
            differences.append(f"step {step}: random numbers")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # What rounding separates in one step is not compared in the next.
        changed.load_state_dict(original.state_dict())
    if not worst <= TOLERANCE:
        differences.append(f"losses or gradients by {worst:.1e} of the largest gradient")
    reports = graph_reports()
    breaks = sum(counters["graph_break"].values())
    differences += _evaluated(original, changed, tiny, through)
    applied: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for report in reports:
        applied.update(dict.fromkeys({x.name for x in report.applied}, 1))
        left.update({f"{x.name}: {x.reason}" for x in report.left})
    failures = sorted({r.failure for r in reports if r.failure is not None})
    return {
        "status": "differs" if differences else "same",
        "differences": differences[:5],
        "error": worst,
        "graphs": len(reports),
        "graph_breaks": breaks,
        "applied": sorted(applied),
        "left": sorted(left),
        "not_retraced": failures,
    }


def _evaluated(original: Any, changed: Any, tiny: Any, through: dict[str, Any]) -> list[str]:
    """Compare outputs in eval mode, and generated tokens."""
    import torch

    original.eval()
    changed.eval()
    batch = tiny.batch(original, 2)
    run = torch.compile(_outputs, **through)
    differences = []
    with torch.no_grad():
        expected, actual = _outputs(original, batch), run(changed, batch)
        scale = float(expected.abs().max())
        if not _relative(float((expected - actual).abs().max()), scale) <= TOLERANCE:
            differences.append("outputs in eval mode")
        if tiny.kind == "causal" and hasattr(original, "generate"):
            prompt = {k: v for k, v in batch.items() if k != "labels"}
            wanted = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            try:
                tokens = original.generate(**prompt, **wanted)
            except Exception:
                # It cannot generate with these sizes, compiled or not.
                return differences
            changed.forward = torch.compile(changed.forward, **through)
            if not torch.equal(tokens, changed.generate(**prompt, **wanted)):
                differences.append("generated tokens")
    return differences


def _outputs(model: Any, batch: dict[str, Any]) -> Any:
    """Return the logits, or the loss of a model that returns nothing else."""
    output = model(**batch)
    return getattr(output, "logits", output)


def _fails_with_plain_compile(original: Any, tiny: Any) -> bool:
    import torch
    from tiny_models import loss_of

    torch._dynamo.reset()
    model = copy.deepcopy(original).train()
    run = torch.compile(loss_of, backend="aot_eager")
    try:
        for step in range(STEPS):
            run(model, tiny.batch(model, step)).backward()
    except Exception:
        return True
    return False


def _differs_with_plain_compile(original: Any, tiny: Any, found: Line) -> bool:
    """Return whether plain torch.compile changes a model in the same way: between two graphs it
    makes zeros of gradients that are None."""
    import torch

    torch._dynamo.reset()
    try:
        plain = _trained(original, tiny, "aot_eager", plain=True)
    except Exception:
        return False
    return bool(plain["differences"] == found["differences"])


def _relative(error: float, scale: float) -> float:
    error = abs(error)
    return error / scale if scale else (0.0 if error == 0 else math.inf)


def _short(error: BaseException) -> str:
    text = next((x.strip() for x in str(error).splitlines() if x.strip()), "")
    return f"{type(error).__name__}: {text}"[:160]


# Processes


def _quiet() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.pop("TRITON_INTERPRET", None)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE))


def _work(name: str, compiler: str, connection: Connection) -> None:
    _quiet()
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        connection.send(compared(name, compiler))
    except BaseException as error:
        connection.send({"model": name, "status": "failed", "reason": _short(error)})


def run_all(names: Iterable[str], compiler: str, workers: int, out: Path) -> None:
    """Run each model in a process of its own that is forked from one with the libraries."""
    context = multiprocessing.get_context("fork")
    waiting = list(names)
    total = len(waiting)
    running: dict[Connection, tuple[Any, str, float]] = {}
    done = 0
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, compiler, theirs), daemon=True)
            process.start()
            theirs.close()
            running[mine] = (process, name, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        for connection, (process, name, began) in list(running.items()):
            late = time.monotonic() - began > TIMEOUT_S
            if connection not in ready and not late:
                continue
            try:
                line = connection.recv() if connection in ready else None
            except EOFError:
                line = {"model": name, "status": "failed", "reason": "the process ended"}
            if line is None:
                process.terminate()
                line = {"model": name, "status": "failed", "reason": f"over {TIMEOUT_S} s"}
            process.join()
            del running[connection]
            done += 1
            line["seconds"] = round(time.monotonic() - began, 1)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"[{done}/{total}] {name}: {line['status']} {line.get('reason', '')}", flush=True)


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(lines: Sequence[Line]) -> str:
    counts = Counter(line["status"] for line in lines)
    shown = [f"{status}: {count}" for status, count in counts.most_common()]
    for line in lines:
        if line["status"] in ("differs", "failed"):
            shown.append(f"{line['model']}: {line.get('differences') or line.get('reason')}")
    return "\n".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="model types, or names with their head")
    parser.add_argument("--kinds", nargs="+", help="causal, masked, seq2seq, image, audio, …")
    parser.add_argument("--compiler", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--resume", action="store_true", help="skip models with a line")
    parser.add_argument("--show", action="store_true", help="print the summary of the record")
    args = parser.parse_args()
    if not args.show:
        _quiet()
        import transformers  # noqa: F401 - the processes are forked with it
        from tiny_models import all_models

        import stepscope.acceleration.backend  # noqa: F401

        if not args.resume:
            args.out.unlink(missing_ok=True)
        known = {line["model"] for line in read(args.out)}
        names = [
            tiny.name
            for tiny in all_models()
            if tiny.name not in known
            and (args.kinds is None or tiny.kind in args.kinds)
            and (args.only is None or {tiny.name, tiny.name.split("/")[0]} & set(args.only))
        ]
        run_all(names, args.compiler, args.workers, args.out)
    print(summary(read(args.out)))


if __name__ == "__main__":
    main()
