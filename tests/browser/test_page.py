"""The page in a real browser: sorting, expanding, filtering, color schemes; it loads nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from sample_page import HOSTILE, hostile_page, sample_page
from stepscope.records.jsonl import read_records
from stepscope.report.html import html_page
from stepscope.studies.page import make_page

RESULTS = Path(__file__).parents[2] / "results"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

TABLE = "#benchmark-2"
STEP = 8
"""Index of the column with the step time."""

LEAST_CONTRAST = """() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    throw new Error("no background");
  };
  let least = { ratio: 99, text: "", count: 0 };
  let count = 0;
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("script, title, desc, [hidden]")) continue;
    const style = getComputedStyle(e);
    const ink = light(parse(e.matches("svg text") ? style.fill : style.color));
    const paper = light(behind(e));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    count += 1;
    if (ratio < least.ratio) least = { ratio, text: e.textContent.trim().slice(0, 40) };
  }
  return { ...least, count };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("page")
    pages = {
        "sample": sample_page(),
        "hostile": hostile_page(),
        "advice": make_page(read_records(RESULTS / "advise-slow_h200.jsonl")),
    }
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(html_page(page), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture(params=["sample"])
def page(
    request: pytest.FixtureRequest, browser: Browser, files: dict[str, Path]
) -> Iterator[Page]:
    """An open page; any console message or network request fails the test."""
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    messages: list[str] = []
    requests: list[str] = []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda sent: requests.append(sent.url))
    url = files[request.param].as_uri()
    opened.goto(url)
    if request.param != "advice":
        opened.evaluate("for (const d of document.querySelectorAll('.evidence')) d.open = true")
    yield opened
    opened.close()
    assert messages == []
    assert [sent for sent in requests if sent != "data:,"] == [url]


def column(page: Page, index: int) -> list[str]:
    return page.locator(f"{TABLE} tr[data-row] > td:nth-child({index + 1})").all_inner_texts()


def values(page: Page, index: int) -> list[float]:
    cells = page.locator(f"{TABLE} tr[data-row] > td:nth-child({index + 1})[data-value]")
    return [float(value) for value in cells.evaluate_all("c => c.map(e => e.dataset.value)")]


def test_a_click_sorts_by_value_and_a_second_click_reverses(page: Page) -> None:
    header = page.locator(f"{TABLE} th").nth(STEP)
    before = column(page, STEP)
    assert header.get_attribute("aria-sort") == "none"
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    rising = values(page, STEP)
    assert rising == sorted(rising)
    assert column(page, STEP) != before
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert values(page, STEP) == sorted(rising, reverse=True)
    assert sorted(column(page, STEP)) == sorted(before)


def test_missing_values_sort_last_and_text_before_them(page: Page) -> None:
    button = page.locator(f"{TABLE} th button").nth(6)
    for _ in range(2):
        button.click()
        assert column(page, 6)[-3:] == ["OOM"] * 3
        assert column(page, 7)[-3:] == ["–"] * 3


def test_sorting_is_stable(page: Page) -> None:
    page.locator(f"{TABLE} th button").nth(5).click()
    page.locator(f"{TABLE} th button").nth(0).click()
    sizes, contexts = column(page, 0), column(page, 5)
    assert sizes == sorted(sizes)
    assert contexts == ["128", "256", "512", "1,024", "2,048"] * 5


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_sorting_with_the_keyboard(page: Page, key: str) -> None:
    button = page.locator(f"{TABLE} th button").nth(STEP)
    button.focus()
    page.keyboard.press(key)
    rising = values(page, STEP)
    assert rising == sorted(rising)
    page.keyboard.press(key)
    assert values(page, STEP) == rising[::-1]


def test_details_open_move_with_their_row_and_close(page: Page) -> None:
    opener = page.locator(f"{TABLE} .opener").first
    opener.click()
    assert opener.get_attribute("aria-expanded") == "true"
    text = page.locator(f"{TABLE} .opened pre")
    assert text.inner_text().startswith("status   ok\nsamples  12.38")
    page.locator(f"{TABLE} th button").nth(STEP).click()
    page.locator(f"{TABLE} th button").nth(STEP).click()
    before = page.locator(f"{TABLE} .opened").evaluate("e => e.previousElementSibling.dataset.row")
    assert before == "0"
    opener = page.locator(f"{TABLE} .opener[aria-expanded=true]")
    opener.focus()
    page.keyboard.press("Enter")
    assert text.count() == 0


def test_the_filter_keeps_matching_rows(page: Page) -> None:
    page.get_by_label("Filter").first.fill("OOM xl")
    shown = page.locator(f"{TABLE} tr[data-row]:visible")
    assert shown.count() == 1
    assert "1 of 25 rows" in page.locator(".filter [role=status]").first.inner_text()
    page.get_by_label("Filter").first.fill("")
    assert shown.count() == 25


def test_a_hint_is_shown_on_focus_and_hidden_on_escape(page: Page) -> None:
    page.locator(f"{TABLE} th button").nth(STEP).focus()
    tip = page.locator("#tip")
    assert tip.inner_text() == "Forward, backward and optimizer."
    box = tip.bounding_box()
    assert box
    assert 0 <= box["x"] <= 1200 - box["width"]
    page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_schemes(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(253, 253, 251)", "dark": "rgb(22, 24, 28)"}[scheme]
    least = page.evaluate(LEAST_CONTRAST)
    assert least["count"] > 300
    assert least["ratio"] >= 4.5, least


@pytest.mark.parametrize("page", ["sample", "hostile"], indirect=True)
@pytest.mark.parametrize("width", [320, 360, 768, 1440])
def test_the_page_never_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    page.locator("summary").first.click()
    page.locator(".opener").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.evaluate("window.scrollTo(50, 0)")
    assert page.evaluate("window.scrollX") == 0


@pytest.mark.parametrize("page", ["advice"], indirect=True)
def test_the_legend_stays_below_the_contents(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    for y in (0, 300, 1500):
        page.evaluate(f"window.scrollTo(0, {y})")
        contents, legend = (page.locator(x).bounding_box() for x in ("nav ol", ".key"))
        assert contents
        assert legend
        assert contents["y"] + contents["height"] <= legend["y"], y


def test_a_wide_table_scrolls_in_its_own_box(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    box = page.locator(f".table-box:has({TABLE})")
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")


@pytest.mark.parametrize("page", ["hostile"], indirect=True)
def test_hostile_text_is_shown_as_text(page: Page) -> None:
    assert page.title() == HOSTILE
    assert page.locator("h1").inner_text() == HOSTILE
    page.locator(".opener").first.click()
    assert page.locator(".opened pre").inner_text() == HOSTILE
    page.locator("th button").first.hover()
    assert page.locator("#tip").inner_text() == HOSTILE
    assert page.locator("img").count() == 0


def test_an_injected_script_is_blocked(
    browser: Browser, files: dict[str, Path], tmp_path: Path
) -> None:
    text = files["sample"].read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("</main>", "<script>document.title = 'x'</script></main>"))
    opened = browser.new_page()
    opened.goto(broken.as_uri())
    assert opened.title() == "Training step on NVIDIA H200"
    opened.close()


@pytest.mark.parametrize("page", ["advice"], indirect=True)
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1600, 900), (390, 844)])
def test_the_first_screen_has_the_answer(page: Page, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    for part in ("h1", ".trust", ".stats", ".answer", ".bar", ".changes", ".next"):
        box = page.locator(part).first.bounding_box()
        assert box is not None, part
        assert box["y"] + box["height"] <= height, part
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= width, part


@pytest.mark.parametrize("page", ["advice"], indirect=True)
@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_the_first_screen_do_not_overlap(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    boxes = page.locator(".legend li, .stats > div, .changes > li, .next").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect())"
        ".map(r => [r.left, r.top, r.right, r.bottom])"
    )
    assert len(boxes) > 8
    for index, (left, top, right, bottom) in enumerate(boxes):
        for other_left, other_top, other_right, other_bottom in boxes[index + 1 :]:
            apart = right <= other_left or other_right <= left
            assert apart or bottom <= other_top + 1 or other_bottom <= top + 1


@pytest.mark.parametrize("page", ["advice"], indirect=True)
def test_tables_fit_and_colors_have_one_legend_at_1280(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    tables = page.locator(".table-box")
    assert tables.count() > 8
    wide = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.ariaLabel)"
    assert tables.evaluate_all(wide) == []
    cells = page.locator("td.code")
    assert cells.count() > 3
    assert set(cells.evaluate_all("all => all.map(e => getComputedStyle(e).display)")) == {
        "table-cell"
    }
    legend = page.locator(".key span").all_inner_texts()
    assert legend == ["measured", "ideal", "lost", "communication", "idle"]
    drawn = page.locator("figure.wide svg text").evaluate_all("all => all.map(e => e.textContent)")
    assert "measured" in drawn, "the lane of the waterfall"
    assert not {"ideal", "lost", "idle"} & set(drawn)
    # The label of a part stays inside of it.
    for part in page.locator(".bar g:has(text)").all():
        box, label = part.locator("rect").bounding_box(), part.locator("text").bounding_box()
        assert box
        assert label
        assert box["x"] <= label["x"]
        assert label["x"] + label["width"] <= box["x"] + box["width"]


@pytest.mark.parametrize("page", ["advice"], indirect=True)
def test_a_change_is_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.locator(".changes .copy").nth(1)
    button.click()
    page.wait_for_function("document.querySelectorAll('.changes .copy')[1].textContent == 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "model = torch.compile(model)"


@pytest.mark.parametrize("page", ["advice"], indirect=True)
def test_the_flame_graph_zooms_and_switches_to_memory(page: Page) -> None:
    flame = page.locator("[data-flame]").first
    status = page.locator(".flame-figure [role=status]").first
    names = flame.locator(".frame").all_inner_texts()
    assert names[0] == "step"
    assert {"forward", "backward"} <= set(names)
    # A frame that is too narrow for its label has it for a screen reader only.
    assert flame.get_by_role("button", name="optimizer", exact=True).count() == 1
    assert flame.locator(".frame:empty:not([aria-label])").count() == 0
    flame.get_by_role("button", name="forward", exact=True).first.click()
    assert status.inner_text().startswith("forward:")
    widths = flame.locator(".frame").evaluate_all("all => all.slice(0, 2).map(e => e.style.width)")
    assert widths == ["100%", "100%"]
    page.get_by_role("button", name="Reset zoom").first.click()
    assert flame.locator(".frame").all_inner_texts() == names
    page.get_by_role("button", name="memory saved for backward").first.click()
    assert "GiB" in status.inner_text()
    assert flame.locator(".frame").first.inner_text() == "saved for backward"


@pytest.mark.parametrize("page", ["advice"], indirect=True)
def test_the_search_opens_what_it_finds(page: Page) -> None:
    assert page.locator(".evidence[open]").count() == 0
    page.fill("#search", "driver")
    assert page.locator("section.card:not([hidden])").count() < page.locator("section.card").count()
    assert page.locator("#machine .evidence").get_attribute("open") is not None
    page.fill("#search", "no such words on this page")
    assert page.locator("section.card:not([hidden])").count() == 0
    page.fill("#search", "")
    assert page.locator("section.card[hidden]").count() == 0


@pytest.mark.parametrize("page", ["advice"], indirect=True)
def test_a_link_into_a_fold_opens_it(page: Page) -> None:
    page.evaluate("location.hash = 'ceilings'")
    page.wait_for_function("document.getElementById('ceilings').closest('details').open")
