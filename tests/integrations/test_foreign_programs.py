"""Programs of other libraries under `inspect` and `advise`: their output is unchanged, the records
are plausible, and nothing is advised that the program already does."""

from __future__ import annotations

import json

import foreign_runs as runs
import pytest
import vision
from foreign_runs import ALL, BY_NAME, Program

import stepscope
from stepscope.analysis.trace.summary import Summary


def only(*programs: Program) -> pytest.MarkDecorator:
    cases = [
        pytest.param(one, id=one.name, marks=vision.needed(one.needs) if one.needs else ())
        for one in programs
    ]
    return pytest.mark.parametrize("program", cases)


each = only(*ALL)


def summary_of(program: Program) -> Summary:
    watched = runs.inspected_run(program).watched
    assert watched.missing == ""
    assert watched.summary is not None
    return watched.summary


@each
def test_program_runs_as_it_does_without_inspect(program: Program) -> None:
    plain, watched = runs.plain_run(program), runs.inspected_run(program).done
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert watched.returncode == 0, watched.stderr[-2000:]
    assert "loss" in plain.stdout
    assert watched.stdout == plain.stdout


@each
def test_record_has_step_times(program: Program) -> None:
    records = runs.inspected_run(program).records
    assert len(records) == program.ranks
    for record in records:
        steps = record.find("step")
        assert steps is not None
        assert len(steps.values) >= 3
        assert min(steps.values) > 0


@each
def test_phases_add_up_to_the_step(program: Program) -> None:
    summary = summary_of(program)
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.wall_ms, rel=0.02)
    assert summary.doubt == ""
    for phase in ("forward", "backward", "optimizer"):
        assert summary.phase_ms(phase) > 0, phase


@each
def test_flops_equal_an_independent_count(program: Program) -> None:
    flops = runs.inspected_run(program).records[0].quantity("flops")
    assert flops == pytest.approx(runs.counted_flops(program), rel=0.01)


@each
def test_saved_activations_name_the_model_source(program: Program) -> None:
    account = runs.inspected_run(program).watched.account
    assert account is not None
    sizes: dict[str, int] = {}
    for tensor in account.saved:
        file = tensor.code.partition(":")[0]
        sizes[file] = sizes.get(file, 0) + tensor.bytes * tensor.times
    ours = {path.name for path in (runs.ROOT / "src/stepscope/advisor/scope").rglob("*.py")}
    ours |= {path.name for path in (runs.ROOT / "src/stepscope/measure").rglob("*.py")}
    assert not ours & set(sizes)
    assert any(file in sizes for file in program.code_files), sizes


@each
def test_advice_is_given_on_the_records(program: Program) -> None:
    output = runs.advice_on_records(program)
    record = runs.inspected_run(program).records[0]
    step = record.find("step")
    assert step is not None
    for advice in output["advice"]:
        assert advice["gain_ms"] < max(step.values), advice
        assert advice["why"]
        assert advice["lines"]


@only(*(one for one in ALL if not one.naive_attention))
def test_fused_attention_is_not_advised_without_naive_attention(program: Program) -> None:
    codes = {one["code"] for one in runs.advice_on_records(program)["advice"]}
    assert "fused-attention" not in codes
    assert program.attention_dropout or "attention-fast-path" not in codes


@only(BY_NAME["torch_mnist"], BY_NAME["torch_time_sequence"])
def test_fused_optimizer_is_not_advised_if_the_optimizer_has_none(program: Program) -> None:
    """Adadelta and L-BFGS have no fused implementation."""
    codes = {one["code"] for one in runs.advice_on_records(program)["advice"]}
    assert "fused-optimizer" not in codes


@only(*(one for one in ALL if one.closure))
def test_forward_and_backward_of_a_closure_are_not_optimizer_time(program: Program) -> None:
    summary = summary_of(program)
    # An optimizer with a search of its own may take as long as a small forward pass.
    computed = summary.phase_ms("forward") + summary.phase_ms("backward")
    assert summary.phase_ms("optimizer") < computed


@only(BY_NAME["hf_bert_accelerate"], BY_NAME["nano_gpt"], BY_NAME["lightning_transformer"])
def test_accumulated_gradients_are_one_step_with_two_forwards(program: Program) -> None:
    assert runs.inspected_run(program).watched.micro_batches == 2


@only(BY_NAME["peft_lora_llama"])
def test_parameters_are_those_that_the_optimizer_trains(program: Program) -> None:
    """Two adapters of rank 8 in each of four layers, of width 192."""
    record = runs.inspected_run(program).records[0]
    assert record.quantity("parameters") == 4 * 2 * (8 * 192 + 192 * 8)


@only(BY_NAME["torch_ddp"])
def test_ranks_of_torchrun_share_one_page(program: Program) -> None:
    watched = runs.inspected_run(program)
    assert [record.config["rank"] for record in watched.records] == [0, 1]
    assert len([line for line in watched.messages if "page:" in line]) == 1


@only(BY_NAME["torch_vae"], BY_NAME["hf_llama"])
def test_early_end_is_reported_in_one_line(program: Program) -> None:
    short = runs.inspect(program, "--steps", "2", name=f"{program.name}-short")
    assert short.done.returncode == 0
    reasons = [line for line in short.messages if "page:" not in line]
    assert len(reasons) == 1
    assert "step" in reasons[0]


def test_output_of_a_program_without_optimizer_is_unchanged() -> None:
    """Weights are updated manually: this is recognised, or one line says what is missing."""
    program = BY_NAME["torch_word_language_model"]
    words = ("--steps", str(runs.STEPS), "--plain-sgd")
    plain = runs.run(str(program.path), *words)
    watched = runs.inspect(program, *words, name="plain-sgd")
    assert (watched.done.returncode, watched.done.stdout) == (0, plain.stdout)
    if watched.page.exists():
        assert watched.watched.step_ms
    else:
        assert len(watched.messages) == 1
        assert "optimizer" in watched.messages[0]


def test_exit_code_of_a_failing_program_is_unchanged() -> None:
    program = BY_NAME["torch_vae"]
    watched = runs.inspect(program, "--no-such-flag", name="failed")
    assert watched.done.returncode == 2
    assert len(watched.messages) == 1
    assert "no-such-flag" in watched.done.stderr


@pytest.mark.parametrize("name", ["hf_llama", "lightning_cnn"])
def test_first_advice_is_verified(name: str) -> None:
    """A trial ends with a verdict and does not fail on programs of other libraries."""
    program = [str(BY_NAME[name].path), "--steps", "10000"]
    advised = runs.run("-m", "stepscope", "advise", "--json", *program)
    assert advised.returncode == 0, advised.stderr[-2000:]
    reachable = [one["code"] for one in json.loads(advised.stdout)["advice"] if one["setting"]]
    assert reachable
    options = ["--verify", "--resume", "--only", reachable[0], "--rounds", "5", "--json"]
    done = runs.run("-m", "stepscope", "advise", *options, *program)
    assert done.returncode == 0, done.stderr[-2000:]
    output = json.loads(done.stdout)
    assert [one["change"] for one in output["tried"]] == reachable[:1]
    for trial in output["tried"]:
        assert trial["verdict"].startswith(("kept", "dropped: no gain", "dropped: slower")), trial


def test_programs_do_not_mention_stepscope() -> None:
    sources = [path.read_text() for path in runs.PROGRAMS.glob("*.py")]
    assert len(sources) > len(ALL)
    assert not any(stepscope.__name__ in source.lower() for source in sources)
