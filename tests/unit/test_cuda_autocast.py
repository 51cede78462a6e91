"""The dtypes that CUDA's autocast gives, derived without a GPU and compared with one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quiet_bench import QuietBench
from stepscope.measure.autocast_rules import NARROW, WIDE, WIDEST, CudaAutocast
from stepscope.records.jsonl import read_records
from stepscope.studies.autocast import STUDY
from stepscope.studies.autocast.cases import AutocastFlags, Formats

RECORDS = read_records(Path(__file__).parents[2] / "results" / "autocast_h200.jsonl")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("subject", "on_gpu"), [("toy", "toy"), ("tiny", "small")])
def test_derived_dtypes_are_those_of_a_gpu(subject: str, on_gpu: str, dtype: str) -> None:
    (case,) = STUDY.cases(AutocastFlags(subject=(subject,), dtype=(dtype,), context=8))
    derived = STUDY.measure(case, QuietBench()).attachments["cuda_formats"]
    (record,) = (r for r in RECORDS if (r.config["subject"], r.config["dtype"]) == (on_gpu, dtype))
    assert derived == record.required("formats", Formats)


def test_the_lists_name_operators_that_autocast_knows_on_cuda() -> None:
    assert len(NARROW | WIDE | WIDEST) == len(NARROW) + len(WIDE) + len(WIDEST)
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    operators = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    listed = (NARROW | WIDE | WIDEST) & operators
    assert len(listed) > 60
    assert {name for name in listed if not known(f"aten::{name}", "AutocastCUDA")} == set()


def test_inputs_are_promoted_to_the_widest() -> None:
    with CudaAutocast(torch.float16):
        mixed = torch.cat([torch.zeros(2), torch.zeros(2, dtype=torch.float16)])
        product = torch.zeros(2, 2) @ torch.zeros(2, 2)
        power = torch.zeros(2, dtype=torch.float16) ** 2
    assert (mixed.dtype, product.dtype) == (torch.float32, torch.float16)
    assert power.dtype == torch.float32
