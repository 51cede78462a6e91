"""Accelerate every family of models with several versions of torch and transformers, and write the
table of docs/accelerate.md.

    python scripts/version_matrix.py                       run all pairs (`make test-matrix`)
    python scripts/version_matrix.py --torch 2.13          run the pairs with this torch

Each version of torch (with its torchvision, which timm needs) and of transformers is installed
once, into a folder of .venv/matrix; a pair is both folders in front of the packages of this
environment. Set TORCH_INDEX to an index with CPU builds of torch. A line of the record is one
family with one pair; a pair without lines was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import traceback
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from acceleration_page import PAGE, TORCHES, TRANSFORMERS, VERSIONS, with_versions

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT / ".venv" / "matrix"
RECORD = ROOT / "results" / VERSIONS
WITH = {"torch": ("torchvision", "timm")}
"""Packages that are built for one version of another."""


def run_families() -> None:
    """Print a line of JSON for each family, in an environment with the packages of a pair."""
    from acceleration_matrix import FAMILIES, prepare, row

    prepare()
    for name, family in FAMILIES.items():
        if find_spec(family.library) is None:
            continue
        try:
            line = row(name)
        except Exception as error:
            traceback.print_exc()
            line = {"family": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        line |= {one: version(one) for one in ("torch", "transformers")}
        print(json.dumps(line, ensure_ascii=False), flush=True)


def folder_of(package: str, release: str) -> Path | None:
    """Return the folder with a package and its dependencies; None if this environment has it."""
    more = WITH.get(package, ())
    if all(map(find_spec, (package, *more))) and version(package).startswith(f"{release}."):
        return None
    folder = FOLDERS / f"{package}-{release}"
    if not folder.exists():
        index = os.environ.get("TORCH_INDEX")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        pip += ["--extra-index-url", index] if index else []
        subprocess.run([*pip, f"{package}=={release}.*", *more]).check_returncode()
        if more and not _is_importable(more[0], folder):
            # transformers would not be importable either.
            print(f"{more[0]} was built for another {package}: without {', '.join(more)}")
            for name in more:
                shutil.rmtree(folder / name)
    return folder


def _is_importable(package: str, folder: Path) -> bool:
    command = [sys.executable, "-c", f"import {package}"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return not subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode


def lines_of(torch: str, transformers: str) -> list[dict[str, Any]]:
    folders = [folder_of("transformers", transformers), folder_of("torch", torch), ROOT / "src"]
    paths = [*map(str, filter(None, folders)), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, "--families"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line | {"pair": [torch, transformers]} for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="*", default=TORCHES, help="versions of torch to run")
    parser.add_argument("--families", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.families:
        run_families()
        return 0
    kept = [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    lines = [line for line in kept if line["pair"][0] not in options.torch]
    for torch in options.torch:
        for transformers in TRANSFORMERS:
            print(f"torch {torch}, transformers {transformers}", flush=True)
            lines += lines_of(torch, transformers)
    RECORD.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    page = ROOT / PAGE
    page.write_text(with_versions(page.read_text(), ROOT / "results"))
    failed = [line for line in lines if "error" in line]
    for line in failed:
        print(f"{line['family']}, {line['pair']}: {line['error']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
