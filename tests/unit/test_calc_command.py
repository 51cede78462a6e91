"""`stepscope calc`: list, derivation, JSON and errors."""

from __future__ import annotations

import json

import pytest

from stepscope.analysis.accounting import CALCULATIONS
from stepscope.cli import main


def test_without_a_name_it_lists_the_calculations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in CALCULATIONS)
    assert main(["calc", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["calculations"]
    assert [one["name"] for one in listed] == list(CALCULATIONS)
    assert listed[2]["defaults"]["dp"] == 8


@pytest.mark.parametrize("name", CALCULATIONS)
def test_it_prints_every_line_of_a_derivation(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calc", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    for answer in CALCULATIONS[name].worked().answers:
        assert any(answer.question in line for line in lines)
        for line in answer.lines:
            assert any(form in shown for form in line.forms for shown in lines)
            assert any(shown.endswith(line.shown) for shown in lines)
        words = " ".join(line.strip().removeprefix("→ ") for line in lines)
        assert answer.text in words


def test_flags_replace_the_numbers_of_the_course(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fsdp_calcs --batch 16 --context 128 --d-model 64 --d-ff 256 --layers 3 --fsdp 4"
    assert main(["calc", *words.split(), "--bandwidth-gbs", "2.5", "--tflops", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["calculation"]
    given = {one["symbol"]: one["value"] for one in facts["givens"]}
    assert given == {
        "B": 2048, "D": 64, "D_FF": 256, "L": 3, "N_FSDP": 4, "C": 4e12, "W": 2.5e9
    }  # fmt: skip
    answers = {answer["part"]: answer["values"] for answer in facts["answers"]}
    assert answers["a"]["F_fwd"] == 3 * 3 * 2 * 512 * 64 * 256
    assert answers["b"]["bytes_fwd"] == 3 * 3 * 2 * 64 * 256 * 3 / 4


def test_a_size_gives_the_shape_and_flags_replace_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc", "fsdp_accounting", "--size", "8b", "--d-ff", "512", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["calculation"]
    given = {one["symbol"]: one["value"] for one in facts["givens"]}
    assert (given["D"], given["D_FF"], given["L"], given["V"]) == (4096, 512, 34, 151_936)
    # A calculation of a single layer takes the widths and the layers, and no vocabulary.
    assert main(["calc", "tp_calcs", "--size", "small", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["calculation"]
    given = {one["symbol"]: one["value"] for one in facts["givens"]}
    assert (given["D"], given["L"]) == (768, 12)
    assert "V" not in given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data_parallel_calc", "perhaps you meant data_parallel_calcs"),
        ("tp_calcs --tp 3", "--tp 3 does not divide the 10,240 columns of d_ff"),
        ("tp_calcs --tp -4", "--tp is -4"),
        ("tp_calcs --fsdp 4", "tp_calcs does not depend on --fsdp"),
        ("tp_calcs --size huge", "'huge'"),
        ("pipeline --pp 64", "--pp 64 does not divide the 32 layers"),
    ],
)
def test_invalid_requests_give_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calc", *words.split()]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert not output.out
