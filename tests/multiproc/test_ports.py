"""On one machine every process of a run listens on loopback only."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenstride.lab.processes.local_launch import Launch, run
from evenstride.testing import run_ranks
from tests.ending import TORCHRUN_S, end
from tests.multiproc.listening_script import listening
from tests.unit.lab.fake_runs import SpyLimits

SCRIPT = Path(__file__).with_name("listening_script.py")
WORLD_SIZE, DEADLINE_S = 2, 90.0
# What a rank opens by itself would listen on the host name's address.
UNSET = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interface is chosen by the environment of the tests."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def addresses(folder: Path) -> set[str]:
    """Return where the ranks, and what is around them, listened."""
    noted = [json.loads(path.read_text()) for path in folder.glob("listening-*.json")]
    assert len(noted) == WORLD_SIZE
    assert all(noted), "each rank sees at least the launcher's store"
    return {address for one in noted for address, _ in one}


def assert_on_loopback(found: set[str]) -> None:
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address in found), found


@pytest.mark.parametrize("sync", ["bsp", "bsp-ps", "asp"])
def test_launch_on_one_machine(tmp_path: Path, sync: str) -> None:
    command = "from evenstride.cli.main import main; main()"
    options = ("launch", "--per-node", str(WORLD_SIZE), str(SCRIPT), str(tmp_path), sync)
    process = subprocess.Popen([sys.executable, "-c", command, *options], start_new_session=True)
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        end(process, TORCHRUN_S)

    assert_on_loopback(addresses(tmp_path))


@pytest.mark.parametrize("alone", [False, True])
def test_workers_of_the_lab(tmp_path: Path, alone: bool) -> None:
    workers = tuple[dict[str, str], ...]({} for _ in range(WORLD_SIZE)) if alone else ()
    command = (str(SCRIPT), str(tmp_path), "bsp")
    launch = Launch(command, (1.0,) * WORLD_SIZE, alone=workers, deadline_s=DEADLINE_S)

    run(launch, SpyLimits(), tmp_path)

    assert_on_loopback(addresses(tmp_path))


def of_rank(rank: int) -> list[str]:
    """Return where a rank and those around it listen."""
    del rank
    return [address for address, _ in listening()]


def test_ranks_of_a_test() -> None:
    for found in run_ranks(of_rank, WORLD_SIZE):
        assert_on_loopback(set(found))
