"""Results as HTML for notebooks: `_repr_html_` of scopes, records, verdicts and comparisons."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch

from stepscope.analysis.compare import Comparison, Comparisons
from stepscope.analysis.verdict import Verdict
from stepscope.records.plans import FittedStep
from stepscope.records.schema import Record
from stepscope.report.blocks import Page
from stepscope.report.html import html_frame
from stepscope.report.plots import svg
from stepscope.report.svg import standalone_svg
from stepscope.studies.page import make_page
from stepscope.views.comparison import comparison_table
from stepscope.views.prediction import fitted_findings, fitted_table, frontier_figure


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


@render.register
def _(fitted: FittedStep) -> str:
    figure = frontier_figure(fitted.frontier.plans, fitted.plan)
    note = " ".join(finding.text for finding in fitted_findings(fitted))
    frame = html_frame(table=fitted_table(fitted), note=note)
    return f"{standalone_svg(svg(figure))}{frame}"
