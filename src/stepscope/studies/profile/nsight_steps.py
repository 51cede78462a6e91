"""Program that Nsight Systems profiles: warm up, then steps between cudaProfilerStart and Stop.

    python -m stepscope.studies.profile.nsight_steps CONFIG

CONFIG is a case of the profile study as JSON, as `stepscope profile-nsys` writes it.
"""

from __future__ import annotations

import sys

import msgspec

from stepscope.errors import StepscopeError
from stepscope.records.decoding import from_json
from stepscope.training.factory import make_step
from stepscope.training.workload import Workload


class NsightCase(Workload, frozen=True, kw_only=True):
    warmup: int = 5
    traced: int = 3


def main(words: list[str]) -> None:
    import torch

    from stepscope.measure.device import pick_device
    from stepscope.torch_tools.ranges import mark_for_nsight, named

    config = read_config(words)
    device = pick_device("cuda")
    step = make_step(config, device)

    def run() -> None:
        step.run_phases()
        device.synchronize()

    for _ in range(config.warmup):
        run()
        step.reset()
    mark_for_nsight(True)
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
    for index in range(config.traced):
        with named(f"step {index}"):
            run()
        step.reset()
        device.synchronize()
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]


def read_config(words: list[str]) -> NsightCase:
    try:
        return from_json(words[0], NsightCase)
    except (IndexError, msgspec.DecodeError) as error:
        raise StepscopeError(f"expected one case as JSON: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
