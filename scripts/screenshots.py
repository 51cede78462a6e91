"""Screenshots of the first screens of pages for the documentation: docs/figures/screen-*.png.

python scripts/screenshots.py                        the pages of the records in results/
python scripts/screenshots.py --quick latest.jsonl   also the page of the quick preset
python scripts/screenshots.py --all DIRECTORY        every width, light and dark, to look at

Needs Chromium (`make browser`). `stepscope export` writes the records of a run.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.step import RecordedStep
from stepscope.cli.advice_page import advice_page
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.html import html_page
from stepscope.report.run_index import RunEntry, entry_of, index_page
from stepscope.studies.page import make_page
from stepscope.views.program.cases import STUDY_NAME as INSPECTED

ROOT = Path(__file__).resolve().parent.parent
SIZES = {1280: 800, 1600: 1000, 390: 844}
COMMITTED = {("advise", 1280, "dark"), ("advise", 390, "light")}
"""Screenshots of the documentation besides those of every page at 1280, light."""
COLORS = 256


def pages(quick: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the name of each screenshot and the text of its page."""
    advised = read_records(ROOT / "results" / "advise-slow_h200.jsonl")
    watched = [record for record in advised if record.study != TRIALS]
    base = next(record for record in watched if record.study == INSPECTED)
    yield "advise", html_page(advice_page(RecordedStep(base), advised))
    yield "inspect", html_page(make_page(watched))
    yield "h200", html_page(make_page(_read("h200.jsonl", "profile_h200.jsonl")))
    entries = [_entry(_read(name)) for name in _RUNS]
    yield "compare", index_page(sorted(entries, key=lambda entry: entry.run, reverse=True))
    if quick is not None:
        yield "quick", html_page(make_page(read_records(quick)))


def _read(*names: str) -> list[Record]:
    return [record for name in names for record in read_records(ROOT / "results" / name)]


_RUNS = ("advise-tuned_h200.jsonl", "advise-nano_gpt_h200.jsonl", "advise-slow_h200.jsonl")
"""The runs of the index: one program twice, and another."""


def _entry(records: Sequence[Record]) -> RunEntry:
    page = make_page([record for record in records if record.study != TRIALS])
    return entry_of(records[0].run, page.title, page.subtitle, page.verdict)


def shots(every: bool) -> Iterator[tuple[int, str, bool]]:
    """Yield width, color scheme and whether each page is shown so in the documentation."""
    for width in SIZES:
        for scheme in ("light", "dark"):
            shown = (width, scheme) == (1280, "light")
            if every or shown or any((width, scheme) == one[1:] for one in COMMITTED):
                yield width, scheme, shown


def take(browser: Browser, address: str, width: int, scheme: str, path: Path) -> None:
    page = browser.new_page(
        viewport={"width": width, "height": SIZES[width]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page.goto(address)
    drawn = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    # This method keeps the colors of small areas, such as a legend.
    method = Image.Quantize.MAXCOVERAGE
    drawn.quantize(COLORS, method, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", type=Path, help="records of a run of the quick preset")
    parser.add_argument("--all", type=Path, help="write every screenshot to this directory")
    options = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        print("Chromium is not installed (`make browser`)", file=sys.stderr)
        return 1
    target = options.all or ROOT / "docs" / "figures"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, text in pages(options.quick):
            file = Path(folder) / f"{name}.html"
            file.write_text(text, encoding="utf-8")
            for width, scheme, shown in shots(options.all is not None):
                if options.all or shown or (name, width, scheme) in COMMITTED:
                    suffix = ("" if width == 1280 else f"-{width}") + (
                        "-dark" if scheme == "dark" else ""
                    )
                    path = target / f"screen-{name}{suffix}.png"
                    take(browser, file.as_uri(), width, scheme, path)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
