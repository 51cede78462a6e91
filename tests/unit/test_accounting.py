"""Formulas of `stepscope calc` against a simulated schedule: every FLOP and byte is counted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated_schedule import (
    Layer,
    Mesh,
    Network,
    Run,
    alternate_all_reduce,
    bucketed_overhead,
    pipeline,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    train,
)
from stepscope.analysis.accounting import CALCULATIONS, Answer, Worked
from stepscope.analysis.accounting.formula import Formula, number, quantity
from stepscope.errors import UsageError
from stepscope.model import cost
from stepscope.model.sizes import find_size
from stepscope.report.blocks import Finding, Table
from stepscope.views.accounting import accounting

BANDWIDTH = 3e9
RATE = 7e12
few = settings(max_examples=15, deadline=None)
sizes = st.integers(1, 3)
axes = st.integers(1, 4)


def worked(name: str, **given: float) -> dict[str, Answer]:
    return {answer.part: answer for answer in CALCULATIONS[name].worked(**given).answers}


def layer_inputs(**given: float) -> dict[str, float]:
    return {"bandwidth_gbs": BANDWIDTH / 1e9, "tflops": RATE / 1e12, "context": 1, **given}


class Subject:
    """A layer whose sizes every axis divides, run on a mesh and on one device."""

    def __init__(self, rows: int, width: int, inner: int, data: int, tensor: int) -> None:
        self.mesh = Mesh(data, tensor, BANDWIDTH)
        self.batch, self.d_ff = rows * data * tensor, inner * data * tensor
        self.d_model = width * data * tensor
        draw = np.random.default_rng(0).standard_normal
        self.x, self.dy = draw((self.batch, self.d_model)), draw((self.batch, self.d_model))
        wide = (self.d_model, self.d_ff)
        self.layer = Layer(draw(wide), draw(wide), draw(wide[::-1]))

    def run(self, *, sharded: bool) -> dict[str, Run]:
        """Both passes, whose results are those of one device."""
        runs = train(self.x, self.dy, self.layer, self.mesh, sharded=sharded)
        alone = train(self.x, self.dy, self.layer, Mesh(1, 1, BANDWIDTH), sharded=False)
        got, expected = runs["backward"], alone["backward"]
        np.testing.assert_allclose(got.y, expected.y)
        np.testing.assert_allclose(got.dx, expected.dx)
        for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
            np.testing.assert_allclose(mine, theirs)
        return runs

    @property
    def inputs(self) -> dict[str, float]:
        return layer_inputs(batch=self.batch, d_model=self.d_model, d_ff=self.d_ff)


def one_value(values: list[float]) -> float:
    """The value that all ranks share."""
    assert values == [values[0]] * len(values)
    return values[0]


def flops(run: Run) -> float:
    return one_value([float(rank.flops) for rank in run.ranks])


def sent(run: Run, axis: str) -> float:
    return one_value([float(count) for network in run.networks[axis] for count in network.sent])


def seconds(run: Run, axis: str) -> float:
    return one_value([network.seconds for network in run.networks[axis]])


def saved(run: Run) -> float:
    return one_value([float(rank.saved) for rank in run.ranks])


@few
@given(sizes, sizes, sizes, axes)
def test_data_parallelism_against_the_schedule(rows: int, width: int, inner: int, dp: int) -> None:
    subject = Subject(rows, width, inner, dp, 1)
    runs = subject.run(sharded=False)
    answers = worked("data_parallel_calcs", **subject.inputs, dp=dp)
    backward = runs["backward"]
    assert answers["a"].values["F_bwd"] == flops(backward)
    assert answers["b"].values["bytes"] == sent(backward, "data")
    assert answers["b"].values["T_comm"] == pytest.approx(seconds(backward, "data"))
    assert sent(runs["forward"], "data") == 0
    hidden = seconds(backward, "data") <= flops(backward) / RATE
    assert answers["c"].values["compute_bound"] == hidden
    state = 16 * sum(weight.size for weight in subject.layer)
    assert answers["memory"].values["M_state"] == state
    assert answers["memory"].values["M_act"] == saved(runs["forward"])


@few
@given(sizes, sizes, sizes, axes)
def test_fsdp_against_the_schedule(rows: int, width: int, inner: int, fsdp: int) -> None:
    subject = Subject(rows, width, inner, fsdp, 1)
    runs = subject.run(sharded=True)
    answers = worked("fsdp_calcs", **subject.inputs, fsdp=fsdp)
    for short, run in (("fwd", runs["forward"]), ("bwd", runs["backward"])):
        assert answers["a"].values[f"F_{short}"] == flops(run)
        assert answers["b"].values[f"bytes_{short}"] == sent(run, "data")
        assert answers["b"].values[f"T_{short}"] == pytest.approx(seconds(run, "data"))
    state = 16 * sum(weight.size for weight in subject.layer) / fsdp
    assert answers["memory"].values["M_state"] == pytest.approx(state)
    assert answers["memory"].values["M_act"] == saved(runs["forward"])


@few
@given(sizes, sizes, sizes, axes)
def test_tensor_parallelism_against_the_schedule(
    rows: int, width: int, inner: int, tp: int
) -> None:
    subject = Subject(rows, width, inner, 1, tp)
    runs = subject.run(sharded=False)
    answers = worked("tp_calcs", **subject.inputs, tp=tp)
    for short, run in (("fwd", runs["forward"]), ("bwd", runs["backward"])):
        assert answers["b"].values[f"F_{short}"] == flops(run)
        assert answers["c"].values["bytes"] == sent(run, "tensor")
        assert answers["c"].values["T_comm"] == pytest.approx(seconds(run, "tensor"))
    assert answers["memory"].values["M_act"] == saved(runs["forward"])


@few
@given(sizes, sizes, sizes, st.integers(1, 3), st.integers(1, 3))
def test_fsdp_with_tensor_parallelism_against_the_schedule(
    rows: int, width: int, inner: int, fsdp: int, tp: int
) -> None:
    subject = Subject(rows, width, inner, fsdp, tp)
    runs = subject.run(sharded=True)
    answers, forward = worked("fsdp_tp_calcs", **subject.inputs, fsdp=fsdp, tp=tp), runs["forward"]
    times = seconds(forward, "data"), seconds(forward, "tensor")
    assert answers["a"].values["F_fwd"] == flops(forward)
    assert answers["b"].values["bytes_FSDP"] == sent(forward, "data")
    assert answers["b"].values["bytes_TP"] == sent(forward, "tensor")
    assert answers["b"].values["T_comm"] == pytest.approx(max(times))
    assert answers["d"].values["T_sum"] == pytest.approx(sum(times))
    assert answers["memory"].values["M_act"] == saved(forward)


@few
@given(st.integers(2, 9), st.integers(1, 5))
def test_ring_collectives_against_the_schedule(ranks: int, elements: int) -> None:
    draw = np.random.default_rng(1).standard_normal
    tensors = [draw(ranks * elements) for _ in range(ranks)]
    total = np.sum(tensors, axis=0)
    chunks = np.split(total, ranks)
    expected = {
        "all-gather": (ring_all_gather, chunks, [total] * ranks),
        "reduce-scatter": (ring_reduce_scatter, tensors, chunks),
        "all-reduce": (ring_all_reduce, tensors, [total] * ranks),
        "a": (alternate_all_reduce, tensors, [total] * ranks),
    }
    inputs = {"message_mb": 2e-6 * total.size, "ranks": ranks, "bandwidth_gbs": BANDWIDTH / 1e9}
    answers = worked("ring_collectives", **inputs)
    answers |= worked("alternate_ring_all_reduce", **inputs)
    for part, answer in answers.items():
        network = Network(ranks, BANDWIDTH)
        collective, given_tensors, results = expected[part]
        for mine, right in zip(collective(network, given_tensors), results, strict=True):
            np.testing.assert_allclose(mine, right)
        assert answer.values["steps"] == network.steps
        assert answer.values["bytes"] == pytest.approx(one_value([float(s) for s in network.sent]))
        assert answer.values["T"] == pytest.approx(network.seconds)


@few
@given(st.integers(1, 6), st.integers(1, 8))
def test_pipelines_against_the_schedule(stages: int, microbatches: int) -> None:
    answers = worked("pipeline", batch=8 * microbatches, microbatches=microbatches,
                     layers=2 * stages, pp=stages)  # fmt: skip
    times, memory = answers["bubble"].values, answers["memory"].values
    in_flight = {}
    for one_f_one_b in (False, True):
        run = pipeline(
            stages, microbatches, times["t_fwd"], times["t_bwd"], one_f_one_b=one_f_one_b
        )
        assert times["T_step"] == pytest.approx(run.seconds)
        assert times["bubble"] == pytest.approx(run.idle)
        in_flight[one_f_one_b] = run.in_flight
    assert memory["M_GPipe"] == pytest.approx(memory["M_state"] + in_flight[False] * memory["A"])
    assert memory["M_1F1B"] == pytest.approx(memory["M_state"] + in_flight[True] * memory["A"])


@pytest.mark.parametrize("buckets", [1, 2, 7, 40])
def test_bucket_overhead_against_the_schedule(buckets: int) -> None:
    given_values = {"message_mb": 800.0, "overhead_us": 30.0, "bandwidth_gbs": 10.0}
    answer = worked("ddp_bucketed_benchmarking", buckets=buckets, **given_values)["b"].values

    def overhead(count: int) -> float:
        one = 0.8e9 / 10e9 / count
        return bucketed_overhead(count, one, one, 30e-6)

    assert answer["T_extra"] == pytest.approx(overhead(buckets))
    best = min(range(1, 500), key=overhead)
    assert abs(answer["n_best"] - best) <= 1
    assert answer["T_best"] <= overhead(best) * (1 + 1e-9)


def largest(fits: Callable[[int], bool]) -> int:
    count = 1
    while fits(count + 1):
        count += 1
    return count


@pytest.mark.parametrize("seed", range(6))
def test_limits_of_devices_are_those_of_a_search(seed: int) -> None:
    draw = random.Random(seed)
    p, q = draw.uniform(0.2, 12), draw.uniform(0.2, 6)
    d_ff = 1024
    # B·W/C = p and 3/2·D_FF·W/C = q, for a batch and a bandwidth that are not integers of either.
    tflops, bandwidth = 500.0, q / (1.5 * d_ff) * 500e3
    batch = max(1, round(p * tflops * 1e3 / bandwidth))
    inputs = {"batch": batch, "d_ff": d_ff, "d_model": 64, "context": 1,
              "bandwidth_gbs": bandwidth, "tflops": tflops}  # fmt: skip

    data = largest(lambda n: _hides(n, 1, batch, d_ff, bandwidth, tflops)[0])
    for name, axis in (("data_parallel_calcs", "dp"), ("fsdp_calcs", "fsdp")):
        limit = worked(name, **inputs, **{axis: 1})["c"].values["N_max"]
        assert data == math.floor(limit)
    forward = worked("tp_calcs", **inputs, tp=1)["d"].values
    tensor = largest(lambda n: _hides(1, n, batch, d_ff, bandwidth, tflops)[0])
    assert tensor == math.floor(forward["N_fwd"])
    both = worked("fsdp_tp_calcs", **inputs, fsdp=1, tp=1)
    grid = [(m, n) for m in range(1, 40) for n in range(1, 40)]
    for index, part, name in ((0, "c", "N_max"), (1, "d", "N_max_sum")):
        best = max(m * n for m, n in grid if _hides(m, n, batch, d_ff, bandwidth, tflops)[index])
        assert best <= both[part].values[name] * (1 + 1e-9)
    fine = np.linspace(1, 1 + batch * bandwidth / tflops / 1e3, 4001)
    left = 1 + q * (1 - (fine - 1) / (fine[-1] - 1 or 1))
    assert float(np.max(fine * left)) == pytest.approx(both["d"].values["N_max_sum"], rel=1e-4)


def _hides(
    m: int, n: int, batch: int, d_ff: int, bandwidth: float, tflops: float
) -> tuple[bool, bool]:
    """Whether compute hides the forward pass on m × n devices, for overlapping axes and for
    consecutive collectives; from bytes per device, not from the closed forms."""
    compute = 3 * 2 * (batch / m) * 64 * (d_ff / n) / (tflops * 1e12)
    gathered = 3 * 2 * 64 * d_ff / n
    gather = (m - 1) * gathered / m / (bandwidth * 1e9)
    reduced = 2 * (batch / m) * 64
    reduce = 2 * (n - 1) * reduced / n / (bandwidth * 1e9)
    slack = compute * (1 + 1e-12)
    return max(gather, reduce) <= slack, gather + reduce <= slack


@pytest.mark.parametrize("name", ["data_parallel_calcs", "fsdp_calcs", "fsdp_tp_calcs"])
def test_compute_hides_communication_exactly_from_the_smallest_batch_on(name: str) -> None:
    mesh = {"data_parallel_calcs": {"dp": 8}, "fsdp_calcs": {"fsdp": 8},
            "fsdp_tp_calcs": {"fsdp": 8, "tp": 4}}[name]  # fmt: skip
    inputs = {"context": 1, "d_model": 512, "d_ff": 65536, "bandwidth_gbs": 50.0, "tflops": 400.0}
    answers = worked(name, batch=8, **inputs, **mesh)["batch"].values
    for key, part in (("B_min", "c"), ("B_max", "c"), ("B_sum", "d")):
        if key in answers:
            # The next batches that the mesh divides.
            above = 8 * math.ceil(answers[key] / 8)
            for batch, hides in ((above, True), (above - 8, False)):
                values = worked(name, batch=batch, **inputs, **mesh)[part].values
                assert values["compute_bound"] is hides, (key, batch)


def test_the_xxl_model_of_2025() -> None:
    answers = worked("communication_accounting", batch=1, context=2048)
    blocks = [(16384, 53248), (53248, 16384)] * 126
    parameters = sum(a * b for a, b in blocks)
    assert answers["a"].values["P"] == parameters == 219_848_638_464
    assert answers["a"].values["M_state"] == parameters * (4 + 4 + 8)
    assert answers["a"].values["GPUs_state"] == pytest.approx(43.97, abs=0.01)
    # Each matmul saves its input.
    activations = sum(2 * 2048 * a for a, _ in blocks)
    assert answers["a"].values["A"] == activations

    def memory(devices: int) -> float:
        return (16 * parameters + activations / 2) / devices + activations / 2

    needed = next(n for n in range(1, 1000) if memory(n) < 95e9)
    assert answers["b"].values["N_FSDP"] == needed == 46
    assert answers["b"].values["N_state"] == 38
    values = answers["c"].values
    assert values["B_shard"] == pytest.approx(4.6e14 / (2 * 1.8e11))
    assert values["B_device"] == pytest.approx(319.44, abs=0.01)
    assert values["B_total"] == pytest.approx(20444.4, abs=0.1)
    assert not worked("communication_accounting", context=2**20)["b"].values["fits"]
    assert not worked("communication_accounting", tp=32)["c"].values["compute_bound"]


@pytest.mark.parametrize(("fsdp", "tp"), [(16, 4), (8, 2), (4, 16)])
def test_the_xxl_batch_is_where_its_times_meet(fsdp: int, tp: int) -> None:
    def times(batch: float) -> tuple[float, float, float]:
        values = worked("communication_accounting", fsdp=fsdp, tp=tp, batch=round(batch),
                        context=1)["c"].values  # fmt: skip
        return values["T_math"], values["T_FSDP"], values["T_TP"]

    found = worked("communication_accounting", fsdp=fsdp, tp=tp)["c"].values
    math_time, gather, reduce = times(found["B_total"])
    assert math_time == pytest.approx(max(gather, reduce), rel=1e-3)
    math_time, gather, reduce = times(found["B_sum"])
    assert math_time == pytest.approx(gather + reduce, rel=1e-3)
    # Bytes of a device: its tensor-parallel shard of two weights, and activations in and out.
    shard = 126 * 2 * 2 * 16384 * 53248 / tp
    assert gather == pytest.approx(shard / (1.8e11 * 2))
    passed = 126 * 2 * 2 * 16384 * round(found["B_sum"]) / fsdp
    assert reduce == pytest.approx(passed / 1.8e11)


@pytest.mark.parametrize(("size", "ranks"), [("xl", 2), ("small", 8), ("8b", 2)])
def test_sharded_state_counts_the_parameters_of_the_model(size: str, ranks: int) -> None:
    model = find_size(size, "2026")
    parts = cost.parameters(model)
    shape = {"d_model": model.d_model, "d_ff": model.d_ff, "layers": model.n_layers,
             "vocab": model.vocab, "fsdp": ranks}  # fmt: skip
    optimizer = worked("optimizer_state_sharding_accounting", **shape)
    assert optimizer["a"].values["P"] == parts.total
    assert optimizer["a"].values["saved"] == pytest.approx(8 * parts.total * (1 - 1 / ranks))
    fsdp = worked("fsdp_accounting", **shape)
    kept = 16 * parts.norms + 16 * (parts.total - parts.norms) / ranks
    assert fsdp["a"].values["M_FSDP"] == pytest.approx(kept)
    sharded = 8 * parts.total + 8 * parts.total / ranks
    assert fsdp["a"].values["saved"] == pytest.approx(sharded - kept)


def test_communication_of_a_sharded_optimizer_is_that_of_its_rings() -> None:
    ranks, elements = 4, 24
    gradients = [np.ones(elements)] * ranks
    ours, zero = Network(ranks, 1.0), Network(ranks, 1.0)
    ring_all_reduce(ours, gradients)
    ring_all_gather(ours, np.split(np.ones(elements), ranks))
    ring_reduce_scatter(zero, gradients)
    ring_all_gather(zero, np.split(np.ones(elements), ranks))
    values = worked("optimizer_state_sharding_accounting", fsdp=ranks)["c"].values
    assert values["bytes_here"] / values["bytes_zero"] == ours.sent[0] / zero.sent[0]


def random_inputs(name: str, seed: int) -> dict[str, float]:
    """Inputs of a calculation with meshes that divide their axes."""
    draw = random.Random(f"{name} {seed}")
    limits = {"fsdp": 3, "dp": 4, "tp": 3, "pp": 3, "microbatches": 3, "ranks": 4}
    powers: dict[str, float] = {}
    for field, value in CALCULATIONS[name].defaults.items():
        powers[field] = (
            2 ** draw.randint(1, limits[field])
            if field in limits
            else draw.uniform(0.5, 2) * value
            if field.endswith(("gbs", "flops", "gb", "mb", "us"))
            else draw.randint(1, 4)
            if field.endswith("axes")
            # Wide enough for tensor parallelism to leave time for FSDP in about half of the draws.
            else 1024 * draw.randint(1, 20)
            if field == "d_ff"
            else 16 * draw.randint(1, 40)
        )
    return powers


@pytest.mark.parametrize("name", CALCULATIONS)
def test_all_forms_of_a_line_have_the_same_value(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.analysis.accounting.sheet import Sheet

    compared: list[tuple[float, float]] = []
    plain_let = Sheet.let

    def let(sheet: Sheet, symbol: str, source: str, *words: str, closed: str = "") -> object:
        value = plain_let(sheet, symbol, source, *words, closed=closed)
        if closed:
            again = Formula(closed).value({name: sheet.value(name) for name in sheet.names})
            compared.append((float(value), float(again)))
        return value

    monkeypatch.setattr(Sheet, "let", let)
    for seed in range(8):
        inputs = random_inputs(name, seed)
        # Tiny batches, too, at which FSDP does not pay.
        tiny = {"batch": 16, "context": 1} if seed % 2 and "context" in inputs else {}
        CALCULATIONS[name].worked(**(inputs | tiny))
    for value, closed_value in compared:
        assert value == pytest.approx(closed_value)
    assert compared or name in ("fsdp_accounting",)


@pytest.mark.parametrize(
    ("name", "part"),
    [("data_parallel_calcs", "c"), ("fsdp_calcs", "c"), ("pipeline", "communication")],
)
def test_the_inequalities_of_a_derivation_are_equivalent(name: str, part: str) -> None:
    truths = set()
    for seed in range(60):
        slower = {"bandwidth_gbs": 10.0 ** (seed % 4 - 2)}
        answer = worked(name, **(random_inputs(name, seed) | slower))[part]
        checks = {line.value for line in answer.lines if not line.left}
        assert len(checks) == 1
        truths |= checks
    assert truths == {True, False}


@pytest.mark.parametrize("name", CALCULATIONS)
def test_answers_are_data_with_values_and_sentences(name: str) -> None:
    result = CALCULATIONS[name].worked()
    assert isinstance(result, Worked)
    assert len({answer.code for answer in result.answers}) == len(result.answers)
    for answer in result.answers:
        assert answer.lines
        assert answer.text.endswith(".")
        assert "{" not in answer.text
        assert answer.question.endswith("?")
    section = accounting(name)
    findings = [block for block in section.blocks if isinstance(block, Finding)]
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert [block.values for block in findings] == [answer.values for answer in result.answers]
    assert len(tables) == 1 + len(findings)
    assert len({block.name for block in tables}) == len(tables)


@pytest.mark.parametrize(
    ("source", "text", "value"),
    [
        ("2*(N-1)/N*S/W", "2·(N − 1)/N·S/W", 14),
        ("S/(N*W)", "S/(N·W)", 1),
        ("2*(S/N)*W", "2·(S/N)·W", 200),
        ("S-(N-W)", "S − (N − W)", 82),
        ("S-N+W", "S − N + W", 82),
        ("S+(N+W)", "S + N + W", 98),
        ("N*(S*W)", "N·S·W", 6400),
        ("(S+N)**2", "(S + N)^2", 7744),
        ("max(S, N*W)", "max(S, N·W)", 80),
        ("S/N/W", "S/N/W", 1),
        ("S/(N/W)", "S/(N/W)", 100),
    ],
)
def test_a_formula_is_shown_as_it_is_evaluated(source: str, text: str, value: float) -> None:
    names = {"N": 8, "S": 80, "W": 10}
    formula = Formula(source)
    assert formula.text() == text
    assert formula.value(names) == value
    shown = formula.text(names).replace("·", "*").replace("−", "-").replace("^", "**")
    assert eval(shown) == value


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (3517578215424, "B", "3.52 TB"),
        (12, "B", "12 bytes"),
        (0, "B", "0 bytes"),
        (0.0006117, "s", "611.7 µs"),
        (999.99e6, "B/s", "1 GB/s"),
        (12.5, "s", "12.5 s"),
        (14.9981, "devices", "14.998 devices"),
        (8, "devices", "8 devices"),
        (20444.4444, "tokens", "20,444.4 tokens"),
    ],
)
def test_quantities_have_units_and_never_round_to_an_integer(
    value: float, unit: str, shown: str
) -> None:
    assert quantity(value, unit) == shown


def test_numbers_in_formulas_are_short() -> None:
    assert [number(v) for v in (8, 524288, 4.5e11, 0.25, 6.117e-4)] == [
        "8", "524288", "4.5e11", "0.25", "6.117e-4"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given_values", "words"),
    [
        ("data_parallel_calcs", {"dp": 7}, "--dp 7 does not divide the 524,288 tokens"),
        ("data_parallel_calcs", {"batch": 1, "context": 1}, "does not divide the 1 tokens"),
        ("tp_calcs", {"tp": 3}, "--tp 3 does not divide the 10,240 columns of d_ff"),
        ("fsdp_tp_calcs", {"fsdp": 3}, "--fsdp 3 does not divide"),
        ("communication_accounting", {"tp": 3}, "--tp 3 does not divide"),
        ("pipeline", {"pp": 5}, "--pp 5 does not divide the 32 layers"),
        ("pipeline", {"microbatches": 7}, "--microbatches 7 does not divide the 256 sequences"),
        ("fsdp_calcs", {"fsdp": 0}, "--fsdp is 0"),
        ("fsdp_calcs", {"bandwidth_gbs": float("nan")}, "--bandwidth-gbs is nan"),
        ("fsdp_calcs", {"tflops": float("inf")}, "--tflops is inf"),
        ("alternate_ring_all_reduce", {"ranks": 1}, "--ranks is 1"),
        ("fsdp_calcs", {"tp": 2}, "fsdp_calcs does not depend on --tp"),
    ],
)
def test_an_invalid_mesh_is_an_error(name: str, given_values: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CALCULATIONS[name].worked(**given_values)
