"""Hosts are lost one after the other and come back: nothing of the training is.

Each host is a network and a process namespace of its own, with an elastic torchrun agent that
``evenstride launch`` has started.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.network_namespaces import Host, cannot_have_hosts, hosts

from tests.faults.elastic_script import SAMPLES, alone
from tests.faults.ranks import PYTHON_PATH

SCRIPT = Path(__file__).with_name("hosts_script.py")
DEADLINE_S = 100.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "PYTHONPATH": PYTHON_PATH,
}
LAUNCH = (sys.executable, "-c", "from evenstride.cli.main import main; main()", "launch")

pytestmark = [
    pytest.mark.skipif(bool(cannot_have_hosts()), reason=cannot_have_hosts() or "-"),
    pytest.mark.timeout(600),
]


class Cluster:
    """A store's host, and three others that train."""

    def __init__(self, folder: Path, store: Host, many: tuple[Host, ...]) -> None:
        self.folder, self.store, self.hosts = folder, store, many
        self.before = set[str]()

    def serve(self) -> None:
        """Serve the store on the host that stays."""
        words = (*LAUNCH, "--store-only", "--store", self.store.address)
        self.store.start(words, ENVIRONMENT, self.folder / "store.log")

    def start(self, host: Host, *options: str, at: Host | None = None) -> subprocess.Popen[bytes]:
        """Start an agent on a host, or start it again."""
        store = (at or self.store).address
        words = (*LAUNCH, "--nodes", "1:3", "--per-node", "1", "--store", store, *options)
        words = (*words, "--address", host.address, str(SCRIPT), str(self.folder))
        return host.start(words, ENVIRONMENT, self.folder / f"{host.name}.log")

    def lines(self) -> list[dict[str, Any]]:
        """Return what all ranks have noted, whole lines only."""
        texts = [
            text
            for path in sorted(self.folder.glob("audit-*.jsonl"))
            for text in path.read_text().splitlines(keepends=True)
        ]
        return [json.loads(text) for text in texts if text.endswith("\n")]

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait for something.

        Raises:
            AssertionError: it did not come; the message ends with what the hosts printed last.
        """
        end_s = time.monotonic() + DEADLINE_S
        while not true():
            if time.monotonic() > end_s:
                logs = "".join(
                    f"\n{path.name}: ...{path.read_text()[-3000:]}"
                    for path in self.folder.glob("*.log")
                )
                raise AssertionError(f"{what} within {DEADLINE_S:.0f} s{logs}")
            time.sleep(0.05)

    def train_on(self, world: int) -> dict[str, Any]:
        """Wait until a new generation of some size has trained; return a line of its leader."""
        found: list[dict[str, Any]] = []

        def trained() -> bool:
            steps = Counter(
                line["generation"]
                for line in self.lines()
                if line["generation"] not in self.before and line["world"] == world
            )
            enough = [name for name, count in steps.items() if count >= 25 * world]
            found[:] = [
                line for line in self.lines() if line["generation"] in enough and not line["rank"]
            ]
            return bool(found)

        self.until(trained, f"{world} hosts did not train")
        self.before = {line["generation"] for line in self.lines()}
        return found[0]

    def host_of(self, name: str) -> Host:
        """Return the host of a name."""
        return next(host for host in self.hosts if host.name == name)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(3, rate_mbit=500) as (store, many):
        yield Cluster(tmp_path, store, many)


def check(cluster: Cluster) -> None:
    """Each sample exactly once in the committed trajectory, and the weights of one process."""
    end = json.loads((cluster.folder / "end.json").read_text())
    expected = alone(end["epochs"])
    error = max(abs(a - b) for a, b in zip(end["weights"], expected, strict=True))
    assert error <= 1e-9, error
    steps: dict[int, tuple[str, list[int]]] = {}
    by_generation: dict[str, dict[int, list[int]]] = {}
    epochs: dict[int, int] = {}
    for line in sorted(cluster.lines(), key=itemgetter("began_s")):
        of_step = by_generation.setdefault(line["generation"], {})
        of_step.setdefault(line["step"], []).extend(line["ids"])
        epochs[line["step"]] = line["epoch"]
    for generation, trained in by_generation.items():  # as they began
        first = min(trained)
        steps = {step: kept for step, kept in steps.items() if step < first}
        steps |= {step: (generation, ids) for step, ids in trained.items()}
    of_epoch: dict[int, list[int]] = {}
    for step, (_, ids) in steps.items():
        of_epoch.setdefault(epochs[step], []).extend(ids)
    for epoch in range(end["epochs"]):
        assert sorted(of_epoch[epoch]) == list(range(SAMPLES)), epoch


def test_hosts_are_lost_in_turn_and_come_back(cluster: Cluster) -> None:
    cluster.serve()
    agents = {host.name: cluster.start(host, "--spot") for host in cluster.hosts}
    leader = cluster.train_on(3)["host"]
    another = next(host.name for host in cluster.hosts if host.name != leader)
    for lost in (leader, another):
        cluster.host_of(lost).kill()
        cluster.train_on(2)
        agents[lost] = cluster.start(cluster.host_of(lost), "--spot")
        cluster.train_on(3)
    (cluster.folder / "last").touch()
    for agent in agents.values():
        assert agent.wait(DEADLINE_S) == 0

    check(cluster)


def test_a_lost_store_ends_all_in_time_and_all_go_on_when_started_again(cluster: Cluster) -> None:
    first = cluster.hosts[0]
    options = ("--restarts", "5")
    agents = [cluster.start(host, *options, at=first) for host in cluster.hosts]
    cluster.train_on(3)
    note = (cluster.folder / "host2.log").read_text()
    assert f"The torchrun on {first.address} hosts the store" in note
    first.kill()
    for agent in agents[1:]:
        assert agent.wait(DEADLINE_S) != 0
    agents = [cluster.start(host, *options, at=first) for host in cluster.hosts]
    cluster.train_on(3)
    (cluster.folder / "last").touch()
    for agent in agents:
        assert agent.wait(DEADLINE_S) == 0

    check(cluster)
