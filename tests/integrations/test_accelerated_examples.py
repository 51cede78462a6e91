"""The examples of other libraries train the same with `--accelerate`, and say what runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import vision

ROOT = Path(__file__).parents[2]

CASES = {
    "hf_llama": "tokens",
    "hf_trainer": "tokens",
    "lightning_gpt": "tokens",
    "timm_vit": "images",
}
"""What is counted."""


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    if name == "timm_vit":
        vision.require("timm")
    unit = CASES[name]
    outputs = []
    for flags in ([], ["--accelerate"]):
        arguments = [f"{name}.py", "--device", "cpu", "--steps", "12", *flags]
        monkeypatch.setattr("sys.argv", arguments)
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        outputs.append(capsys.readouterr().out)
    plain, fused = (
        [float(value) for value in re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", out)[0]]
        for out in outputs
    )
    assert fused == pytest.approx(plain, rel=1e-4)
    for output in outputs:
        assert re.search(rf"^step [\d.]+ ms, [\d,]+ {unit}/s$", output, re.MULTILINE)
        assert re.search(r"^peak memory [\d.]+ GiB$", output, re.MULTILINE)
    assert "on a CPU it is compiled on request only" in outputs[1]
    assert "accelerated" not in outputs[0]
