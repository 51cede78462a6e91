"""Where the first step of an accelerated Llama goes: seconds by phase.

    python benchmarks/first_step.py                                            Llama 1B
    python benchmarks/first_step.py --width 64 --vocabulary 128 --length 32    the trace, on a CPU

Times do not overlap: each phase is without those that it contains. Run it twice with one
`TORCHINDUCTOR_CACHE_DIR` and `TRITON_CACHE_DIR` in an empty folder: the first process fills the
caches, and the second finds them. `--cpu-time` counts the seconds of this thread on a core, which
a busy machine disturbs less. Inductor compiles a backward pass when it first runs, in the
comparison of its region.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections import Counter, defaultdict
from typing import Any

import torch

import stepscope

PHASES = {
    "Dynamo": ("torch._dynamo.convert_frame", "_compile"),
    "guards": ("torch._dynamo.guards", "CheckFunctionManager.__init__"),
    "trace to operators": ("stepscope.acceleration.backend", "retraced"),
    "passes": ("stepscope.acceleration.backend", "run_passes"),
    "other of the backend": ("stepscope.acceleration.backend", "compiled_graph"),
    "split into regions": ("stepscope.acceleration.backend", "compile_regions"),
    "compilation, or caches": ("torch._inductor.compile_fx", "compile_fx"),
    "the model as it is": (
        "stepscope.acceleration.compiled", "CompiledFunction._as_it_is",
    ),
    "comparison of regions": ("stepscope.acceleration.comparison", "Comparison._difference"),
    "other of the comparison": ("stepscope.acceleration.compiled", "difference"),
    "optimizer": ("stepscope.acceleration.train_step", "TrainStep._update"),
    "backward": ("torch", "Tensor.backward"),
}  # fmt: skip


class Phases:
    """Seconds of functions, without those of others that they call."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._inner: list[float] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def time(self, label: str, module: str, path: str) -> None:
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self._clock() - began
                self.seconds[label] += seconds - self._inner.pop()
                self.calls[label] += 1
                if self._inner:
                    self._inner[-1] += seconds

        setattr(owner, name, timed)


def main() -> None:
    options = _options()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = options.width
    with torch.device(device):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=options.layers,
                num_attention_heads=max(width // 64, 4),
                num_key_value_heads=max(width // 256, 2),
                vocab_size=options.vocabulary,
            )
        )
        ids = torch.randint(options.vocabulary, (options.batch, options.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    phases = Phases(clock)
    for label, where in PHASES.items():
        phases.time(label, *where)
    form = {"form": "compiled with passes", "compiler": options.compiler}
    began = clock()
    stepscope.accelerate(model, optimizer, dtype=torch.bfloat16, compile=form)
    step = stepscope.TrainStep(model, optimizer, graph="off")
    times = [clock() - began]
    for _ in range(2):
        began = clock()
        float(step({"input_ids": ids, "labels": ids}))
        times.append(clock() - began)
        if len(times) == 2:
            rows = [(label, phases.seconds[label], phases.calls[label]) for label in PHASES]
    rows.append(("not named", times[1] - sum(seconds for _, seconds, _ in rows), 1))
    print(f"accelerate {times[0]:.2f} s, first step {times[1]:.2f} s, second {times[2]:.2f} s")
    for label, seconds, calls in rows:
        print(f"{label:<26} {seconds:7.2f} s in {calls} calls")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--cpu-time", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
