"""A step that cannot be captured as a CUDA graph is a skipped case with a reason, not an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.studies.base import CaseSkipped
from stepscope.training import captured
from stepscope.training.captured import CapturedStep


def build_with_failing_capture(error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Fail as torch does: the end of a capture raises another error over the original one."""

    def capture(*_: Any) -> None:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    patch.setattr(captured, "_refuse", lambda *_: None)
    patch.setattr(CapturedStep, "_capture", capture)
    CapturedStep(SimpleNamespace(device=None), None)  # type: ignore[arg-type]


def test_a_host_synchronization_skips_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"
    with pytest.raises(CaseSkipped, match=f"cannot be a CUDA graph: RuntimeError: {message}"):
        build_with_failing_capture(RuntimeError(message), monkeypatch)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("a mistake")])
def test_other_failures_propagate(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="previous error") as caught:
        build_with_failing_capture(error, monkeypatch)
    assert caught.value.__context__ is error
