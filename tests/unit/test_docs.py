"""Documents match the code and the records: generated pages, links, examples."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from command_line import python
from precision_records import autocast_record
from step_records import (
    compile_record,
    energy_lines,
    loss_record,
    rung_record,
    step_race_record,
    waterfall_record,
)
from stepscope.cli import COMMANDS
from stepscope.records.jsonl import write_records
from stepscope.studies.registry import viewables
from study_records import (
    benchmark_record,
    checkpointing_record,
    flash_record,
    memory_record,
    profile_record,
    race_record,
)
from technique_records import card_record, technique_record

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "results" / "README.md",
]


GUIDES = (
    "README.md",
    "docs/own-step.md",
    "docs/accelerate.md",
    "docs/library.md",
    "docs/commands.md",
)


def code_blocks(language: str, pages: Sequence[str] = GUIDES) -> list[str]:
    text = "\n".join((ROOT / page).read_text() for page in pages)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_readme_is_short() -> None:
    words = (ROOT / "README.md").read_text().split()
    assert len(words) <= 900


def test_what_a_person_reads_is_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {page.name: page.read_text() for page in pages}
    # Not the bars of tables.
    words = {name: len(re.findall(r"\S*\w\S*", text)) for name, text in texts.items()}
    assert len(words) > 10
    assert max(words.values()) <= 3_000, words
    assert sum(words.values()) <= 25_000


def test_generated_pages_match_the_records() -> None:
    check = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"], cwd=ROOT, capture_output=True
    )
    assert check.returncode == 0, check.stdout.decode() + check.stderr.decode()


def test_a_long_page_has_a_summary_and_tables_by_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from long_pages import LONG_PAGE, LONG_TABLE, walkable

    head = "| case | kind | ms |\n| ---: | :--- | ---: |"
    rows = [f"| {n} | {'slow' if n % 2 else 'fa_st'} | {n}.5 |" for n in range(LONG_PAGE)]
    text = "\n\n".join(
        [
            "# Page",
            "Generated.",
            "## Times, and more",
            "- The first is 1.5 ms. Then more.\n- Another.",
            "\n".join([head, *rows]),
            "## Times, and more",
            "\n".join([head, *rows[: LONG_TABLE - 2]]),
        ]
    )
    page = walkable(text + "\n")
    lines = page.splitlines()
    assert lines[4:6] == [
        "- [Times, and more](#times-and-more): The first is 1.5 ms.",
        "- [Times, and more](#times-and-more-1)",
    ]
    folds = [line for line in lines if line.startswith("<details>")]
    half = LONG_PAGE // 2
    assert folds == [
        f"<details><summary>kind: fa_st, {half} rows</summary>",
        f"<details><summary>kind: slow, {half} rows</summary>",
    ]
    start = lines.index(folds[1])
    assert lines[start + 2 : start + 5] == ["| case | ms |", "| ---: | ---: |", "| 1 | 1.5 |"]
    assert page.endswith("\n".join([head, *rows[: LONG_TABLE - 2]]) + "\n")
    assert sum(line.startswith("| ") for line in lines) == LONG_PAGE + 2 * 2 + LONG_TABLE


def test_comparisons_come_first_on_the_attention_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from flash_page import flash_pages

    grid = [flash_record(seq=seq, both=seq / 1024) for seq in (4096, 8192)]
    plain = flash_pages(grid, ())
    assert set(plain) >= {"flash.md", "figures/flash-rate-bfloat16-d64.svg"}
    assert "Stepscope's attention compared with others" not in plain["flash.md"]
    races = [
        race_record({"triton": 4.6, "sdpa_flash": 7.2}),
        race_record({"triton": 1.0}, "1x2x64x64"),
    ]
    text = flash_pages(grid, races)["flash.md"]
    speed, findings = (
        text.index("Stepscope's attention compared with others"),
        text.index("## Findings"),
    )
    assert speed < text.index("All comparisons") < findings
    with_auto = flash_pages(grid, races, ["## What auto chooses"])["flash.md"]
    assert with_auto.index("## What auto chooses") < with_auto.index("compared with others")
    assert "| sdpa\\_flash | 1,16,16384,64 | 1.56" in text
    assert "1,16,16384,64 takes 4.60 ms forward and backward" in text
    failed = [*grid, flash_record("flex", status="oom", reason="too large")]
    assert "oom, too large." in flash_pages(failed, ())["flash.md"]


def test_the_profile_page_is_generated_from_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from study_pages import study_pages

    assert study_pages(tmp_path) == {}
    sizes = ("small", "medium", "large", "xl", "2.7b")
    records = [
        *(profile_record("forward-backward", size=size, context=128) for size in sizes),
        *(
            profile_record(mode, dtype=dtype)
            for mode in ("forward", "train-step")
            for dtype in ("float32", "bfloat16")
        ),
        profile_record(size="xl", status="oom", reason="too large"),
    ]
    write_records(records, tmp_path / "profile_h200.jsonl")
    pages = study_pages(tmp_path)
    text = pages["profile.md"]
    assert "## More" not in text
    assert {"figures/profile-classes.svg", "figures/profile-timeline.svg"} <= set(pages)
    for target in re.findall(r"\]\((figures/[^)]+)", text):
        assert pages[target].startswith("<svg")
    for part in (
        "Forward and backward of every size at context 128",
        "float32, eager against bfloat16, eager",
        "Kernels by time: small at context 512 in float32, train-step",
        "## Not traced",
    ):
        assert part in text


def test_pages_of_the_fast_step_are_generated_from_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from study_pages import study_pages

    assert study_pages(tmp_path) == {}
    falling = [9.0 - step * 0.1 for step in range(50)]
    records = [
        rung_record(step=100.0),
        rung_record("bf16", "first", step=40.0),
        waterfall_record(),
        waterfall_record("graph", status="oom", reason="too large"),
    ]
    write_records(records, tmp_path / "step_h200.jsonl")
    write_records([step_race_record()], tmp_path / "step-race_h200.jsonl")
    write_records([loss_record("start", 0, falling)], tmp_path / "step-loss_h200.jsonl")
    write_records([compile_record(), compile_record("attention")], tmp_path / "compile_h200.jsonl")
    write_records([technique_record(), card_record()], tmp_path / "levers_h200.jsonl")
    pages = study_pages(tmp_path)
    step, compiled, techniques = (pages[n] for n in ("step.md", "compile.md", "techniques-h200.md"))
    titles = re.findall(r"^## (.*)$", step, re.MULTILINE)
    assert titles == [
        "Against torch.compile",
        "Gain of each change",
        "From the ideal to the measured step",
        "Loss curves",
        "Every variant that was tried",
        "Not measured",
    ]
    assert "| 2.7b-512 | block default sdpa\\_flash | 100.0 |" in step
    against, _, _ = step.partition("## Gain of each change")
    assert "- 2.7b-512: a step takes" in against.partition("## Against torch.compile")[2]
    assert "comparisons of consecutive steps" not in step
    assert "oom | too large" in step
    assert "## Time to compile" in compiled
    assert "## The device" in techniques
    for page in (step, compiled, techniques):
        assert "## More" not in page
        for target in re.findall(r"\]\((figures/[^)]+)", page):
            assert pages[target].startswith("<svg")


def test_several_comparisons_of_steps_have_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from study_pages import study_pages

    races = [step_race_record(), step_race_record("xl-512")]
    write_records(races, tmp_path / "step-race_h200.jsonl")
    section = study_pages(tmp_path)["step.md"].partition("## Against torch.compile\n\n")[2]
    assert re.match(r"- Stepscope is 1\.\d\d to 1\.\d\d times as fast .* 2 comparisons", section)


def test_pieces_follow_on_the_page_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from study_pages import study_pages

    write_records([step_race_record()], tmp_path / "step-race_h200.jsonl")
    assert "## Each piece alone" not in study_pages(tmp_path)["step.md"]
    common = {
        "piece": "swiglu",
        "shape": "small",
        "device": "H200",
        "torch": "2.11",
        "commit": "ab",
    }
    variants: dict[str, dict[str, object]] = {
        "eager": {"lost": "out of memory"},
        "compiled": {"ms": [3.0, 3.3, 2.7], "host_ms": 0.5, "peak_bytes": 2048},
        "ours": {"ms": [2.0, 2.2, 1.8], "host_ms": 0.25, "peak_bytes": 1024},
    }
    lines = [json.dumps(common | {"way": name} | fields) for name, fields in variants.items()]
    (tmp_path / "pieces_h200.jsonl").write_text("\n".join(lines) + "\n")
    text = study_pages(tmp_path)["step.md"]
    assert "- swiglu: torch.compile's takes 1.5 (small) times as long as Stepscope's." in text
    assert "| swiglu | small | eager | out of memory |" in text
    row = next(line for line in text.splitlines() if line.startswith("| swiglu | small | comp"))
    assert row.startswith("| swiglu | small | compiled | 3.000 | 0.5000 | 1.5")
    assert row.endswith("| 2.00 KiB |")


def test_energy_by_part_follows_on_the_page_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from study_pages import study_pages

    write_records([step_race_record()], tmp_path / "step-race_h200.jsonl")
    assert "## Where the joules go" not in study_pages(tmp_path)["step.md"]
    path = tmp_path / "energy-by-part_h200.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in energy_lines()))
    text = study_pages(tmp_path)["step.md"]
    assert (
        "- xl-512: of the 40.0 J of a step: GEMMs 50.0 %, attention 6.2 %, AdamW 37.5 %, other"
        " passes 6.2 %. The parts add up to 40.0 J. With only GEMMs, attention and AdamW the"
        " step would take 37.5 J, at least 75.0 ms at 500 W; the step took 60.0 ms. The baseline's"
        " variant of the GEMMs takes 1.25 times the energy."
    ) in text
    assert (
        "| xl-512 | GEMMs | 40.00 | 20.00 ± 0.25 | 500.0 | 1,700 | 50.0 % | 700 TFLOP/s |" in text
    )
    assert "The step: eager auto (xl-512)." in text
    assert "scaled up" not in text

    lines = [line | {"layers": 8} for line in energy_lines()]
    lines[3] = lines[3] | {"lost": "out of memory"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = study_pages(tmp_path)["step.md"]
    assert "| xl-512 | other passes | out of memory |" in text
    assert "sum of the parts" not in text
    assert "xl-512 is scaled up from 8 of 48 blocks." in text


def test_pages_of_memory_and_precision_are_generated_from_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from memory_page import memory_pages

    assert memory_pages(tmp_path) == {}
    write_records([memory_record()], tmp_path / "memory_h200.jsonl")
    pages = memory_pages(tmp_path)
    assert set(pages) >= {"memory.md", "figures/memory-course-train-step.svg"}
    for target in re.findall(r"\]\((figures/[^)]+)", pages["memory.md"]):
        assert target in pages
    for part in ("Peak memory of each phase", "From tensors to what nvidia-smi shows"):
        assert part in pages["memory.md"]
    assert "Activation checkpointing" not in pages["memory.md"]
    assert "precision.md" not in pages

    write_records([checkpointing_record("1")], tmp_path / "checkpointing_h200.jsonl")
    rows = [benchmark_record(dtype=dtype, step=ms) for dtype, ms in (("float32", 9), ("tf32", 3))]
    write_records(rows, tmp_path / "formats_h200.jsonl")
    write_records([autocast_record(), autocast_record("small")], tmp_path / "autocast_h200.jsonl")
    planted = {
        "case": "small",
        "limit": 1 << 30,
        "needed": 2 << 30,
        "phase": "loss",
        "fits": True,
        "remedy": "batch 2",
        "remedy_peak": 1 << 29,
        "asked": 0,
        "device": "H200",
        "torch": "2.11",
    }
    (tmp_path / "planted-ooms_h200.jsonl").write_text(json.dumps(planted) + "\n")
    cost = {
        "case": "small",
        "ms": {"plain": [10.0] * 5, "history": [10.5] * 5},
        "device": "H200",
        "torch": "2.11",
    }
    (tmp_path / "recording-cost_h200.jsonl").write_text(json.dumps(cost) + "\n")
    pages = memory_pages(tmp_path)
    memory, precision = pages["memory.md"], pages["precision.md"]
    assert memory.index("## Activation checkpointing") < memory.index("## Is the first change")
    assert "with the first suggested change 1 fitted" in memory
    assert "| small | 5 | 10.00 | 1.050 [1.050, 1.050] |" in memory
    assert "tf32 instead of float32 makes the step 3.00× as fast" in precision
    assert "the small network of the course" in precision
    assert "Operators by dtype: the small model" not in precision


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if "://" not in name:
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name} links to {name}"
            if anchor:
                assert anchor in anchors(target), f"{page.name} links to {link}"


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    taken: Counter[str] = Counter()
    made = set()
    for title in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        made.add(f"{slug}-{taken[slug]}" if taken[slug] else slug)
        taken[slug] += 1
    return made


def test_guides_name_real_commands_and_studies() -> None:
    course = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/results/cs336/*.md"))
    assert len(course) >= 30
    for block in code_blocks("sh", (*GUIDES, "docs/cs336.md", *course)):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["stepscope"]:
                assert words[1] in COMMANDS, line
                if words[1] == "run" and not words[2].startswith("-"):
                    assert words[2] in viewables(), line
            elif words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line


def test_the_library_examples_run(tmp_path: Path) -> None:
    # The last one is a file of its own, for `launch`.
    script = "\n".join(code_blocks("python")[:-1])
    # As on a reader's machine, where kernels do not run in Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python("-c", script, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "matmul host ms" in done.stdout
    assert (tmp_path / "page.html").exists()


def test_every_benchmark_and_script_is_described() -> None:
    for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        assert path.read_text().startswith('"""'), path.name
