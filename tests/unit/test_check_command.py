"""The command `stepscope check`: what it grades, its exit code and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graded import SIMPLE, planted
from stepscope.cli import main
from stepscope.grading.check.kinds import ADAPTERS, KINDS
from stepscope.records.store import Store

ADAPTERS_FILE = """
import torch
from mine import FlashAttention, DDP


def get_flashattention_autograd_function_pytorch() -> type:
    \"\"\"Return the class.\"\"\"
    return FlashAttention


def get_ddp_individual_parameters(module):
    return DDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()


def get_fsdp(module, compute_dtype=None):
    \"\"\"Not yet.\"\"\"
    # For example: return FSDP(module)
    raise NotImplementedError
"""


def check(out: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["check", "--out", str(out), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def found(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["code"]: one for one in facts["findings"]}


def test_a_mistake_sets_the_exit_code_and_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = planted(tmp_path, ("mean(-1, keepdim=True) + eps)", "mean(-1, keepdim=True))"))
    only = ("--only", "small", "values", "widths")
    code, facts = check(tmp_path, f"{mine}:rmsnorm", *only, capsys=capsys)
    assert code == 1
    assert facts["fails"] == ["rmsnorm"]
    finding = found(facts)["check.missing-eps"]
    assert finding["values"]["implementation"] == "rmsnorm"
    assert finding["values"]["required"] is True
    assert finding["values"]["criteria"] == "values, small, widths"
    assert "eps is not added" in finding["sentence"]
    with Store(tmp_path / "records.db", create=False) as store:
        records = store.records(facts["run"])
    assert {record.case for record in records} == {
        f"mine.rmsnorm_{one}" for one in ("small", "values", "widths")
    }
    assert main(["show", "latest", "--full", "--out", str(tmp_path)]) == 0
    assert "fails: missing-eps" in capsys.readouterr().out


def test_a_correct_file_passes_with_its_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, facts = check(tmp_path, f"{SIMPLE}:rmsnorm", "--rounds", "3", capsys=capsys)
    assert code == 0
    codes = found(facts)
    assert codes.keys() == {"check.passed", "check.speed"}
    assert codes["check.passed"]["values"]["holding"] == len(KINDS["rmsnorm"].criteria)
    assert {"ms", "stepscope", "torch", "torch_ratio"} <= codes["check.speed"]["values"].keys()


def test_a_crash_and_a_failed_import_are_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit = ("    wide = x.float()", "    import os\n\n    os.abort()\n    wide = x.float()")
    mine = planted(tmp_path, edit)
    broken = tmp_path / "broken.py"
    broken.write_text("import not_installed\n\nrmsnorm = 1\n")
    code, facts = check(
        tmp_path, f"{mine}:rmsnorm", f"{broken}:rmsnorm", "--only", "values", capsys=capsys
    )
    assert code == 1
    assert found(facts).keys() == {"check.crashes", "check.import"}
    assert "not_installed" in found(facts)["check.import"]["sentence"]


def test_adapters_of_the_course(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "adapters.py").write_text(ADAPTERS_FILE)
    planted(tmp_path, ("        self.handles.clear()\n", "        self.handles.clear()\n"))
    words = ("--adapters", str(tests / "adapters.py"), "--only", "causal", "weights")
    code, facts = check(tmp_path, *words, capsys=capsys)
    assert code == 0
    assert facts["not_implemented"] == ["get_fsdp"]
    graded = {(one["implementation"], one["criterion"]) for one in facts["criteria"]}
    assert graded == {
        ("get_flashattention_autograd_function_pytorch", "causal"),
        ("get_ddp_individual_parameters", "weights"),
    }
    assert found(facts).keys() == {"check.passed"}


def test_adapters_without_an_implementation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "adapters.py"
    file.write_text(
        "\n".join(f"def {a.function}():\n    raise NotImplementedError" for a in ADAPTERS)
    )
    assert main(["check", "--adapters", str(file)]) == 0
    assert all(adapter.function in capsys.readouterr().err for adapter in ADAPTERS[:1])


def test_the_list_names_every_criterion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--list"]) == 0
    text = capsys.readouterr().out
    for kind in KINDS.values():
        assert kind.name in text
        assert all(one.title in text for one in kind.criteria)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to grade"),
        (["no_such.py:DDP"], "there is no file"),
        (["{file}:DDPBucket"], "perhaps you meant DDPBucketed"),
        (["{file}:Gather"], "add --as"),
        (["{file}:Gather", "--as", "FDSP"], "perhaps you meant FSDP"),
        (["{file}:DDP", "--only", "wieghts"], "perhaps you meant weights"),
        (["{file}:DDP", "--rounds", "0"], "--rounds"),
        (["stepscope.attention"], "names no class"),
        (["--adapters", "{file}"], "none of the course's adapters"),
        (["{broken}:DDP"], "line 1"),
    ],
)
def test_an_invalid_request_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    named = [word.format(file=SIMPLE, broken=broken) for word in words]
    assert main(["check", *named]) == 2
    assert said in capsys.readouterr().err
