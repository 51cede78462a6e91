"""Draw equal figures once: pages of many tests show the same records, and matplotlib takes most of
the time of a page."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from stepscope.report import plots
from stepscope.report.blocks import Figure


def install(patched: pytest.MonkeyPatch) -> None:
    """Keep what `plots` draws in this process. Equal figures have equal drawings."""
    draw = plots._save
    drawn: dict[bytes, str | bytes] = {}

    def save(figure: Figure, out: io.StringIO | io.BytesIO, **options: Any) -> None:
        key = msgspec.msgpack.encode((figure, options))
        if key not in drawn:
            draw(figure, out, **options)
            drawn[key] = out.getvalue()
        else:
            out.write(drawn[key])  # type: ignore[arg-type]

    patched.setattr(plots, "_save", save)
