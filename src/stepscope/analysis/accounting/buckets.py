"""`ddp_bucketed_benchmarking`, question (b): the size of gradient buckets in data parallelism."""

from __future__ import annotations

from stepscope.analysis.accounting.sheet import Calculation, Sheet

_DEFAULTS = {"message_mb": 1000, "buckets": 10, "overhead_us": 20, "bandwidth_gbs": 225}


def _work(sheet: Sheet) -> None:
    sheet.given("s=S", "n_b", "o", "w=W")
    sheet.part("b", "How much time do bucketed all-reduces add, and which bucket size adds least?")
    sheet.let("t", "s/(n_b*w)", "s", "communication of a bucket; its gradients take as long")
    sheet.let("T_backward", "n_b*t", "s", "the buckets, computed one after the other")
    sheet.let(
        "T_end", "t+n_b*(t+o)", "s", "communication starts with the first bucket, with o per call"
    )
    sheet.let("T_extra", "T_end-T_backward", "s", "after backward", closed="s/(n_b*w)+n_b*o")
    sheet.let("n_best", "sqrt(s/(w*o))", "buckets", "derivative by n_b: −s/(n_b²·w) + o = 0")
    sheet.let("bucket_best", "s/n_best", "B", "bytes of a bucket", closed="sqrt(s*w*o)")
    sheet.let("T_best", "s/(n_best*w)+n_best*o", "s", closed="2*sqrt(s*o/w)")
    sheet.answer(
        "overhead",
        "The overhead is {T_extra:f} = {T_extra}: the last bucket has nothing to overlap with, and"
        " every call adds o. It is least for buckets of {bucket_best:f} = {bucket_best}, that is"
        " n_b = {n_best:f} = {n_best}, with {T_best:f} = {T_best}.",
    )


CALCULATION = Calculation(
    "ddp_bucketed_benchmarking", "Overhead of gradient buckets", "2025", _DEFAULTS, _work
)
