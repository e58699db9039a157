"""``evenstride lab --sync`` on a real script: each mode trains, and is compared by time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.utils.data import TensorDataset
import evenstride

torch.set_num_threads(1)
dist.init_process_group("gloo")
rows = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
net = torch.nn.Linear(8, 2)
stride = evenstride.Stride(global_batch=32)
loader = stride.loader(TensorDataset(rows, rows[:, :2].argmax(1)))
model = stride.watch(torch.nn.parallel.DistributedDataParallel(net))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(100):
    for x, y in loader:
        stride.scale(F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
stride.close()
dist.destroy_process_group()
"""
COMMAND = "from evenstride.cli.main import main; main()"


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_modes_run_under_limits_and_are_reported_by_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = [
        "--speeds",
        "0.4,0.4",
        "--sync",
        "bsp,asp",
        "--policies",
        "uniform",
        "--steps",
        "300",
    ]
    more = ["--repeats", "1", "--no-calibrate", "--json", "--out", "runs", "--", "train.py"]

    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "lab", *options, *more],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    exact, free = reported["runs"]
    assert (exact["sync"], free["sync"]) == ("bsp", "asp")
    assert exact["staleness"] is None
    assert free["staleness"][1] >= 1
    for run in reported["runs"]:
        assert run["shares"] == [16, 16]
        # Of the same steps, so these agree however unevenly the workers get on.
        rates = [16 / worker["period_s"] for worker in run["workers"]]
        assert run["samples_per_s"] == pytest.approx(sum(rates))
    assert "note: asp: The gradient is not exact" in done.stderr
    assert (tmp_path / "runs" / "asp-uniform-1" / "trace.jsonl").is_file()
