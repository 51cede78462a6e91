"""Display of results in notebooks.

Records, verdicts and comparisons are data, and their packages do not import the one that renders
them. `html_of` imports it when a notebook asks for HTML.
"""

from __future__ import annotations

import importlib

_RENDERERS = "stepscope.integrations.notebook"


def html_of(result: object) -> str:
    """Return a result as HTML for the output of a notebook's cell; it loads nothing."""
    html: str = importlib.import_module(_RENDERERS).render(result)
    return html
