"""A step that cannot be one CUDA graph: a skipped case with the reason, not an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.studies.base import CaseSkipped
from stepscope.studies.training import captured
from stepscope.studies.training.captured import CapturedStep


def built_where_the_capture_says(error: Exception, patch: pytest.MonkeyPatch) -> None:
    """As torch does: its end of a capture raises again, over what was raised within."""

    def capture(*_: Any) -> None:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    patch.setattr(captured, "_refuse", lambda *_: None)
    patch.setattr(CapturedStep, "_capture", capture)
    CapturedStep(None, None)  # type: ignore[arg-type]


def test_values_that_are_read_back_skip_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"
    with pytest.raises(CaseSkipped, match=f"cannot be a CUDA graph: RuntimeError: {said}"):
        built_where_the_capture_says(RuntimeError(said), monkeypatch)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("a mistake")])
def test_other_failures_stay_what_they_are(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="previous error") as caught:
        built_where_the_capture_says(error, monkeypatch)
    assert caught.value.__context__ is error
