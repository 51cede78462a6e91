"""Stepscope on programs of other libraries, compared with independent measurements.

    python benchmarks/foreign.py                         all programs; results/foreign_DEVICE.jsonl
    python benchmarks/foreign.py --only hf_llama nano_gpt --resume
    python benchmarks/foreign.py --show                  print the table of the results

For each program of `benchmarks/programs`:

- plain: the program runs with `independent_hook.py`, which times its steps and counts its FLOPs;
- inspect: the same under `stepscope inspect`. The recorded steps are compared with the hook's times
  of the same steps, and the steps after the recording with those of the plain run;
- advise: `stepscope advise --verify`, without corrections from earlier trials; on a GPU only the
  first advice is tried;
- hand: the first change applied with the program's own flag, timed by the hook in ABBA order.

A part that fails adds one line to `errors`, and the others continue. A line is written when a
program is finished, so that `--resume` continues with the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "scripts"))

from foreign_page import Line, first_trial, foreign_table, summary_sentences  # noqa: E402
from page_parts import lines_of  # noqa: E402

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS  # noqa: E402
from stepscope.advisor.advise.outcome import Tried  # noqa: E402
from stepscope.records.jsonl import read_records  # noqa: E402
from stepscope.records.schema import Record  # noqa: E402
from stepscope.records.store import Store  # noqa: E402
from stepscope.report.text import markdown  # noqa: E402
from stepscope.views.program.rows import ProgramRecord  # noqa: E402

STEPS = 44
"""Steps of a timed run: a full recording has 20 on a CPU and up to 30 on a GPU."""
ENDLESS = 100_000
"""Steps for trials, which end the program themselves."""
LEAD_IN = 5
COUNTED = 20
"""Step of a plain run after which its FLOPs are counted."""
AFTER = 10
"""Steps at the end of a run that are never recorded."""


class Program(NamedTuple):
    name: str
    library: str
    ranks: int = 1
    on_gpu: bool = True
    """True if it is measured on a GPU by default."""

    @property
    def path(self) -> Path:
        return HERE / "programs" / f"{self.name}.py"


PROGRAMS = (
    Program("hf_llama", "transformers"),
    Program("hf_gpt2_trainer", "transformers"),
    Program("hf_bert_accelerate", "accelerate"),
    Program("peft_lora_llama", "peft"),
    Program("hf_vit", "transformers"),
    Program("timm_vit", "timm"),
    Program("timm_convnext", "timm"),
    Program("torchvision_reference", "torchvision", on_gpu=False),
    Program("lightning_cnn", "lightning", on_gpu=False),
    Program("lightning_transformer", "lightning"),
    Program("torch_mnist", "torch", on_gpu=False),
    Program("torch_word_language_model", "torch"),
    Program("torch_dcgan", "torch"),
    Program("torch_vae", "torch"),
    Program("nano_gpt", "torch"),
    Program("torch_time_sequence", "torch", on_gpu=False),
    Program("torch_optimizer_in_backward", "torch", on_gpu=False),
    Program("torch_ddp", "torch", ranks=2, on_gpu=False),
)
FLAGS = {
    "bfloat16": ["--bf16"],
    "tf32": ["--tf32"],
    "fused-attention": ["--sdpa"],
    "fused-optimizer": ["--fused"],
    "compile": ["--compile"],
    "larger-batch": ["--batch-factor", "2"],
    "data-ahead": ["--workers", "8"],
}
"""Flags with which a program applies a change itself, by code of the advice."""


class FailedError(Exception):
    """A part of a measurement failed; the message has one line."""


class Bench:
    """One program on this machine; each part runs in separate processes."""

    def __init__(self, program: Program, args: argparse.Namespace, folder: Path) -> None:
        self.program, self.args, self.folder = program, args, folder
        self.command = [str(program.path), "--scale", args.scale, "--device", args.device]
        self.deadline = time.monotonic() + args.limit
        self.environment = os.environ | {
            "XDG_CACHE_HOME": str(args.cache),
            "STEPSCOPE_OUT": str(folder),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise FailedError(f"no time left of {self.args.limit:.0f} s")
        with subprocess.Popen(
            command,
            env=self.environment | environment,
            cwd=ROOT,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                out, err = process.communicate(timeout=left)
            except BaseException as error:
                os.killpg(process.pid, 9)
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise FailedError(f"took longer than {self.args.limit:.0f} s") from None
                raise
        if process.returncode:
            last = (err.strip() or out.strip() or "no output").splitlines()[-1]
            raise FailedError(f"exit code {process.returncode}: {last[:200]}")
        return subprocess.CompletedProcess(command, 0, out, err)

    def hooked(self, name: str, *arguments: str) -> tuple[list[str], Path]:
        """The command line that runs the program under the hook, and the file of its times."""
        times = self.folder / f"{name}.json"
        return [str(HERE / "independent_hook.py"), str(times), *self.command, *arguments], times

    def python(self, *arguments: str) -> list[str]:
        if self.program.ranks == 1:
            return [sys.executable, *arguments]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(self.program.ranks),
            *arguments,
        ]

    def plain(self) -> Line:
        command, times = self.hooked("plain", "--steps", str(STEPS))
        begun = time.monotonic()
        self.run(self.python(*command), COUNT_FLOPS=str(COUNTED))
        hooked = json.loads(times.read_text())
        return {
            "plain_ms": statistics.median(_steps(hooked)[LEAD_IN : COUNTED - 1]),
            "plain_after_ms": statistics.median(_steps(hooked)[-AFTER:]),
            "plain_s": time.monotonic() - begun,
            "hook_flops": hooked["flops"],
        }

    def inspect(self) -> Line:
        command, times = self.hooked("inspect", "--steps", str(STEPS))
        page = self.folder / "inspect.html"
        begun = time.monotonic()
        self.run(self.python("-m", "stepscope", "inspect", "--page", str(page), *command))
        took = time.monotonic() - begun
        if not page.with_suffix(".jsonl").exists():
            raise FailedError("inspect left no records")
        record = read_records(page.with_suffix(".jsonl"))[0]
        hooked = json.loads(times.read_text())
        recorded = record.find("step")
        if recorded is None:
            raise FailedError(ProgramRecord(record).missing or "the record has no step time")
        same = same_steps(recorded.values, hooked[f"{recorded.clock}_ms"])
        return {
            "inspect_ms": statistics.median(recorded.values),
            "hook_ms": statistics.median(same),
            "inspect_flops": record.quantity("flops"),
            "after_ms": statistics.median(_steps(hooked)[-AFTER:]),
            "inspect_s": took,
            "missing": ProgramRecord(record).missing,
        } | _environment(record)

    def advise(self) -> Line:
        """Every change that was tried alone, in the order of the advice."""
        # Without corrections learned from other programs.
        (self.args.cache / "stepscope" / "advice.jsonl").unlink(missing_ok=True)
        options = ["--verify", "--total-timeout", str(self.args.within)]
        if self.args.first_only:
            advised = [one["code"] for one in self.advice()["advice"]]
            if not advised:
                return {"advised": [], "tried": []}
            options = ["--verify", "--resume", "--only", advised[0]]
        printed = self.advice(*options)
        reported = {one["change"]: one for one in printed["tried"]}
        with Store(self.folder / "records.db", create=False) as store:
            records = [record for record in store.records() if record.study == TRIALS]
        trials = {one.trial.code: one for one in map(Tried, records)}
        tried = [
            _trial(one, reported[one["code"]], trials[one["code"]])
            for one in printed["advice"]
            if one["code"] in reported
        ]
        return {"advised": [one["code"] for one in printed["advice"]], "tried": tried}

    def advice(self, *options: str) -> dict[str, Any]:
        """The JSON that `stepscope advise` prints for the program."""
        command = [sys.executable, "-m", "stepscope", "advise", *options, "--json"]
        done = self.run([*command, *self.command, "--steps", str(ENDLESS)])
        printed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return printed

    def _flag(self, code: str) -> list[str] | None:
        """The program's own flag for a change; None if it has none."""
        source = self.program.path.read_text()
        flag = FLAGS.get(code)
        if flag is None:
            return None
        attribute = flag[0].removeprefix("--").replace("-", "_")
        return flag if f'"{flag[0]}"' in source or f"given.{attribute}" in source else None

    def by_hand(self, code: str) -> Line:
        """Time the same change with the program's flag, and the step without it, in ABBA order."""
        flag = self._flag(code)
        if flag is None:
            return {}
        more = 2 if code == "larger-batch" else 1
        times: dict[bool, list[float]] = {False: [], True: []}
        order = (False, True, True, False)[: 4 if self.args.hand_runs > 1 else 2]
        for number, changed in enumerate(order):
            command, path = self.hooked(
                f"hand-{number}", "--steps", str(STEPS), *(flag if changed else [])
            )
            self.run(self.python(*command))
            steps = _steps(json.loads(path.read_text()))[-2 * AFTER :]
            times[changed].append(statistics.median(steps) / (more if changed else 1))
        base, changed_ms = (statistics.mean(times[changed]) for changed in (False, True))
        return {"flag": " ".join(flag), "hand_base_ms": base, "hand_ms": base - changed_ms}


def _trial(advice: Line, reported: Line, tried: Tried) -> Line:
    """The prediction for a change and the result of its trial."""
    predicted, ends = reported["predicted_ms"], [advice.get("low_ms"), advice.get("high_ms")]
    # The base step of a trial may take longer than the recorded one: the prediction is relative.
    scale = predicted / advice["gain_ms"] if predicted is not None and advice["gain_ms"] else 1.0
    return {
        "code": advice["code"],
        "verdict": reported["verdict"],
        "base_ms": tried.base_ms,
        "without_effect": tried.without_effect,
        "predicted_ms": predicted,
        "range_ms": None if None in ends else [scale * end for end in ends],
        "verified_ms": reported["realized_ms"],
        "interval_ms": reported["interval_ms"],
    }


def _steps(times: dict[str, Any]) -> list[float]:
    """The device times if there are any, otherwise the host times."""
    steps: list[float] = times["device_ms"] or times["host_ms"]
    return steps


def same_steps(recorded: Sequence[float], hooked: Sequence[float]) -> list[float]:
    """The hook's times of the recorded steps: the window of the same length that differs least
    from them."""
    count = len(recorded)

    def difference(start: int) -> float:
        pairs = zip(recorded, hooked[start : start + count], strict=True)
        return sum(abs(one - other) for one, other in pairs)

    best = min(range(len(hooked) - count + 1), key=difference)
    return list(hooked[best : best + count])


def _environment(record: Record) -> Line:
    here = record.environment
    return {
        "device": here.device_name,
        "cores": here.cpu_cores,
        "torch": here.torch,
        "python": here.python,
        "commit": here.commit,
        "dirty": here.dirty,
        "load_average": here.load_average,
    }


def measure(program: Program, args: argparse.Namespace, before: Line) -> Line:
    """Measure a program; `before` has the parts that are not measured again."""
    line: Line = {**before, "program": program.name, "library": program.library}
    line["errors"] = [one for one in before.get("errors", []) if one.split(":")[0] in args.without]
    folder = Path(tempfile.mkdtemp(prefix=f"foreign-{program.name}-"))
    bench = Bench(program, args, folder)

    def part(name: str, make: Callable[[], Line]) -> None:
        if name in args.without:
            return
        begun = time.monotonic()
        try:
            line.update(make())
            print(f"  {name}: {time.monotonic() - begun:.0f} s", flush=True)
        except FailedError as error:
            line["errors"].append(f"{name}: {error}")
            print(f"  {name} failed: {error}", flush=True)

    begun = time.monotonic()
    try:
        part("plain", bench.plain)
        part("inspect", bench.inspect)
        if program.ranks == 1:
            part("advise", bench.advise)
            if (trial := first_trial(line)) is not None:
                part("hand", lambda: bench.by_hand(trial["code"]))
    finally:
        if args.keep:
            shutil.copytree(folder, args.keep / program.name, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    line["took_s"] = time.monotonic() - begun + (before.get("took_s", 0.0) if args.without else 0.0)
    return line


def arguments() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in PROGRAMS])
    parser.add_argument(
        "--without", nargs="+", default=[], choices=["plain", "inspect", "advise", "hand"]
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--scale", default="gpu" if on_gpu else "cpu", choices=["cpu", "gpu"])
    parser.add_argument("--machine", default="h200" if on_gpu else "cpu", help="suffix of the file")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--keep", type=Path, help="folder for the records and pages of all programs"
    )
    parser.add_argument("--resume", action="store_true", help="skip programs that have a line")
    parser.add_argument("--limit", type=float, default=120 if on_gpu else 900, help="s per program")
    parser.add_argument("--within", type=float, default=240, help="s for the trials of a program")
    parser.add_argument(
        "--first-only",
        action="store_true",
        default=on_gpu,
        help="only try the first advice, without a time limit",
    )
    parser.add_argument("--hand-runs", type=int, default=1 if on_gpu else 2)
    parser.add_argument("--show", action="store_true", help="print the table without measuring")
    args = parser.parse_args()
    args.out = args.out or ROOT / "results" / f"foreign_{args.machine}.jsonl"
    args.cache = Path(tempfile.gettempdir()) / f"foreign-cache-{os.getuid()}"
    args.on_gpu = args.device == "cuda"
    return args


def wanted(args: argparse.Namespace) -> list[Program]:
    if args.only:
        return [one for one in PROGRAMS if one.name in args.only]
    return [one for one in PROGRAMS if one.on_gpu or not args.on_gpu]


def main() -> int:
    args = arguments()
    lines = {line["program"]: line for line in lines_of(args.out)}
    begun = time.monotonic()
    for program in [] if args.show else wanted(args):
        if args.resume and program.name in lines:
            continue
        print(f"{program.name} ({time.monotonic() - begun:.0f} s so far)", flush=True)
        lines[program.name] = measure(program, args, lines.get(program.name, {}))
        order = [one.name for one in PROGRAMS]
        results = sorted(lines.values(), key=lambda line: order.index(line["program"]))
        partial = args.out.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in results))
        partial.replace(args.out)
    results = lines_of(args.out)
    print(markdown(foreign_table(results)))
    print("\n".join(summary_sentences(results)))
    return 1 if any(line["errors"] for line in results) else 0


if __name__ == "__main__":
    sys.exit(main())
