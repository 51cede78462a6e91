"""`stepscope inspect --nproc` starts torchrun: one page with all ranks, the slowest is named."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from command_line import python
from stepscope.records.jsonl import read_records
from stepscope.views.program.rows import programs, slowest

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(18):
    if dist.get_rank() == 1:
        time.sleep(0.1)
    model(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
raise SystemExit(3 if dist.is_initialized() else 0)
"""


def test_ranks_are_combined_on_one_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = python(
        *shlex.split(
            "-m stepscope inspect --nproc 2"
            f" --warmup 2 --steps 2 --profiled-steps 6 --out {tmp_path / 'out'} train.py"
        ),
        cwd=tmp_path,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stepscope: page:") == 1
    records = read_records(tmp_path / "out" / "train.jsonl")
    (ranks,) = programs(records)
    assert [one.rank for one in ranks] == [0, 1]
    last = slowest(ranks)
    assert last is not None
    assert last.rank == 1
    page = (tmp_path / "out" / "train.html").read_text()
    assert "Rank 1 is the slowest" in page
    assert not list(tmp_path.glob("stepscope-inspect-*"))
    assert not list((tmp_path / "cache" / "stepscope" / "inspect").iterdir())
