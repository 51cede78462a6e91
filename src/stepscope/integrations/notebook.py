"""Results as HTML for notebooks: `_repr_html_` of scopes, records, verdicts and comparisons."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch

from stepscope.analysis.compare import Comparison, Comparisons
from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Record
from stepscope.report.blocks import Page
from stepscope.report.html import html_frame
from stepscope.studies.page import make_page
from stepscope.views.comparison import comparison_table


@singledispatch
def render(result: object) -> str:
    raise TypeError(f"{type(result).__name__} has no form for notebooks")


@render.register
def _(verdict: Verdict) -> str:
    return html_frame(verdict)


@render.register
def _(record: Record) -> str:
    page: Page = make_page([record])
    return html_frame(page.verdict, page.headline, page.banner)


@render.register
def _(comparison: Comparison) -> str:
    return html_frame(table=comparison_table([comparison]))


@render.register
def _(comparisons: Comparisons) -> str:
    verdicts = Counter(one.verdict for one in comparisons)
    summary = ", ".join(f"{times} {verdict}" for verdict, times in verdicts.items())
    return html_frame(table=comparison_table(comparisons), note=summary)
