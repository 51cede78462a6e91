"""Results, `launch` and a callback's recording in the kernel of a real notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

MODEL = """
import torch, stepscope
from stepscope.analysis.compare import compare_records
from stepscope.integrations.trainer_recording import TrainerRecording

def recorded(width):
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = stepscope.Scope(model, optimizer, warmup=1, timed=5, traced=1)
    while not scope.done:
        with scope.step():
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
    return scope

scope = recorded(8)
scope
"""
CELLS = (
    MODEL,
    "scope.verdict()",
    "scope.record()",
    "compare_records(scope.record(), recorded(16).record())",
    """
class Trainer(TrainerRecording):
    def train(self, steps):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._start(model, [optimizer], leads=True)
        for _ in range(steps):
            model(torch.randn(2, 4)).mean().backward()
            optimizer.step()
            self._step_ended(lambda metrics: None)
        return self.record.config["script"]

print(Trainer(warmup=1, steps=2, traced=1, memory=False).train(12))
""",
    """
import torch.distributed as dist
from stepscope.parallel import launch

OFFSET = 10

class Doubler:
    def __call__(self, value):
        return 2 * value

def work(world, start):
    total = torch.full((2,), float(world.rank + start))
    dist.all_reduce(total)
    return Doubler()(total[0].item()) + OFFSET

print(launch(work, (1,), ranks=2))
""",
)


@pytest.mark.usefixtures("cold_start")
def test_a_real_notebook(tmp_path: Path) -> None:
    """Jupyter ends a kernel's processes by their group and session."""
    notebook: Any = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert len(shown) == 4
    for text in shown:
        assert text.startswith("<iframe srcdoc=")
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    printed = [
        "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        for cell in notebook.cells[-2:]
    ]
    # The kernel's own script is not the name of the program.
    assert printed == ["Linear\n", "[16.0, 16.0]\n"]
