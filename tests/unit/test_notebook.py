"""Results in a notebook: HTML that needs no network."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import torch

import stepscope
from sample_records import record, times
from stepscope.analysis.compare import compare_records
from stepscope.analysis.verdict import Estimate, Verdict
from watched_models import Network, train


def frame(result: Any) -> str:
    """The page within the frame of a result."""
    text = result._repr_html_()
    match = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" .*></iframe>', text)
    assert match, text[:200]
    page = html.unescape(match[1])
    assert page.startswith("<!doctype html>")
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    return page


def test_scope_shows_its_progress_then_its_verdict() -> None:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    scope = stepscope.Scope(model, optimizer, warmup=1, timed=5, traced=1, name="<my> step")
    assert scope._repr_html_() == "<p>Stepscope: step 0 of 9</p>"
    while not scope.done:
        with scope.step():
            train(model, optimizer)
    page = frame(scope)
    assert 'class="verdict"' in page
    assert "&lt;my&gt; step" in page
    assert frame(scope.record()) == page
    verdict = scope.verdict()
    assert verdict is not None
    assert verdict.step is not None
    assert 'class="verdict"' in frame(verdict)


def test_a_scope_that_failed_says_why() -> None:
    model = Network()
    scope = stepscope.Scope(model, torch.optim.AdamW(model.parameters()))
    scope._recorder.notes["recording_failed"] = "OSError: <full>"
    scope.close()
    assert scope._repr_html_() == ("<p>Stepscope: the recording failed: OSError: &lt;full&gt;</p>")


def test_comparisons_are_a_table() -> None:
    base, new = (record(series=(times("step", ms, seed=1),)) for ms in (100.0, 120.0))
    comparisons = compare_records(base, new)
    page = frame(comparisons)
    assert "New against base" in page
    assert ">1 slower<" in page
    assert ">slower<" in frame(comparisons[0])


def test_text_of_a_record_is_escaped() -> None:
    verdict = Verdict(
        subject='"><script>alert(1)</script>',
        device="d",
        step=Estimate(value=1.0, low=1.0, high=1.0),
    )
    page = frame(verdict)
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_what_cannot_be_rendered_is_an_error() -> None:
    from stepscope.display import html_of

    with pytest.raises(TypeError, match="int has no form"):
        html_of(3)
