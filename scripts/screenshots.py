"""Screenshots of first screens for the documentation: docs/figures/screen-*.png.

python scripts/screenshots.py    needs Chromium (`make browser`)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.html import html_page
from stepscope.studies.page import make_page

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"": (1280, 800), "-phone": (390, 844)}


def pages() -> dict[str, tuple[Record, ...]]:
    """The records of each page by the name of its screenshot."""
    advised = read_records(ROOT / "results" / "advise-slow_h200.jsonl")
    return {
        "advise": advised,
        "inspect": tuple(record for record in advised if record.study != TRIALS),
        "profile": read_records(ROOT / "results" / "profile_h200.jsonl"),
        "h200": read_records(ROOT / "results" / "h200.jsonl"),
    }


def main() -> int:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        print("Chromium is not installed (`make browser`)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, records in pages().items():
            file = Path(folder) / f"{name}.html"
            file.write_text(html_page(make_page(records)), encoding="utf-8")
            for scheme in ("light", "dark"):
                for suffix, (width, height) in SIZES.items():
                    if scheme == "dark" and suffix:
                        continue
                    page = browser.new_page(
                        viewport={"width": width, "height": height}, color_scheme=scheme
                    )
                    page.goto(file.as_uri())
                    dark = "-dark" if scheme == "dark" else ""
                    path = ROOT / "docs" / "figures" / f"screen-{name}{suffix}{dark}.png"
                    page.screenshot(path=path)
                    page.close()
                    print(f"wrote {path.relative_to(ROOT)}")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
