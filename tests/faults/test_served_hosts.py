"""Parameter servers on several hosts, with a link each: what is trained is what one host trains."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.network_namespaces import INTERFACE, Host, cannot_have_hosts, hosts

from tests.faults.ranks import PYTHON_PATH
from tests.faults.served_script import EPOCHS, SAMPLES
from tests.faults.test_served import alone

SCRIPT = Path(__file__).with_name("served_script.py")
DEADLINE_S = 90.0
PORT = 29531

pytestmark = [
    pytest.mark.skipif(bool(cannot_have_hosts()), reason=cannot_have_hosts() or "-"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


def _train(
    many: tuple[Host, ...], folder: Path, sync: str, fate: str = "none", step: int = 0
) -> list[int]:
    """Run the script with a rank on each host, and return their exit codes."""
    processes = []
    for rank, host in enumerate(many):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(many)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": many[0].address,
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONPATH": PYTHON_PATH,
        }
        words = (sys.executable, str(SCRIPT), str(folder), sync, fate, str(step))
        processes.append(host.start(words, environment, folder / f"{host.name}.log"))
    end_s = time.monotonic() + DEADLINE_S
    return [process.wait(max(end_s - time.monotonic(), 0.1)) for process in processes]


def _logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.log")}


def _ends(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank that came to its end wrote there."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]


def _trained(folder: Path) -> Counter[int]:
    """Return how often each sample was in an update that was made."""
    files = folder.glob("trained-*.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return Counter(chain.from_iterable(line["ids"] for line in lines))


@pytest.mark.parametrize("sync", ["bsp-ps(servers=2)", "ssp(staleness=1,servers=2)"])
def test_servers_are_spread_over_the_hosts_and_all_train_one_model(
    tmp_path: Path, sync: str
) -> None:
    with hosts(3, rate_mbit=500) as (_, many):
        codes = _train(many, tmp_path, sync)

    ends = _ends(tmp_path)
    assert codes == [0, 0, 0], _logs(tmp_path)
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert _trained(tmp_path) == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    warning = f"workers and parameter servers listen on {many[0].address} ({INTERFACE})"
    reported = [name for name, text in _logs(tmp_path).items() if warning in text]
    assert reported == [f"{many[0].name}.log"], "rank 0 warns that others can reach the ports"
    if sync.startswith("bsp-ps"):
        weights, _ = alone()
        found = torch.tensor(ends[0]["weights"][0], dtype=torch.float64)
        assert torch.allclose(found, weights, rtol=1e-9, atol=0)


def test_the_others_hear_at_once_of_a_worker_on_another_host_that_ends(tmp_path: Path) -> None:
    with hosts(3, rate_mbit=500) as (_, many):
        codes = _train(many, tmp_path, "asp", "raises", 9)

    assert codes == [0, 1, 0], _logs(tmp_path)
    assert _trained(tmp_path) == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert all("no heartbeat" not in text for text in _logs(tmp_path).values())
