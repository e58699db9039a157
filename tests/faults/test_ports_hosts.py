"""Who reaches a run's ports from another host, and on which addresses several hosts listen."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from benchmarks.network_namespaces import Host, cannot_have_hosts, hosts

from tests.faults.ranks import PYTHON_PATH

SCRIPT = Path(__file__).parents[1] / "multiproc" / "listening_script.py"
DEADLINE_S = 90.0
WORLD_SIZE = 2
# The hosts of this project's tests choose an interface; those of its users do not.
PYTHON = ("env", "-u", "GLOO_SOCKET_IFNAME", sys.executable)
LAUNCH = ("-c", "from evenstride.cli.main import main; main()", "launch")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "PYTHONPATH": PYTHON_PATH,
}
# Tries to connect to each port of a host, and writes down those that answer.
CONNECT = """
import json, socket, sys
reached = []
for port in json.loads(sys.argv[2]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=10).close()
    except ConnectionRefusedError:
        continue
    reached.append(port)
open(sys.argv[3], "w").write(json.dumps(reached))
"""

pytestmark = [
    pytest.mark.skipif(bool(cannot_have_hosts()), reason=cannot_have_hosts() or "-"),
    pytest.mark.timeout(3 * DEADLINE_S),
]


def listening(folder: Path) -> list[tuple[str, int]]:
    """Wait until all ranks have noted where they listen, and return it."""
    end_s = time.monotonic() + DEADLINE_S
    while len(noted := list(folder.glob("listening-*.json"))) < WORLD_SIZE:
        logs = "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        assert time.monotonic() < end_s, logs
        time.sleep(0.05)
    return [(ip, port) for path in noted for ip, port in json.loads(path.read_text())]


def reached_from(attacker: Host, victim: Host, ports: set[int], folder: Path) -> set[int]:
    """Return the ports of one host that answer another one."""
    out = folder / "reached.json"
    words = (sys.executable, "-c", CONNECT, victim.address, json.dumps(sorted(ports)), str(out))
    assert attacker.start(words, ENVIRONMENT, folder / "attacker.log").wait(DEADLINE_S) == 0
    return set(json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("launcher", "sync", "is_reached"),
    [(TORCHRUN, "bsp", True), (LAUNCH, "bsp", False), (LAUNCH, "asp", False)],
    ids=["torchrun", "launch", "launch-asp"],
)
def test_another_host_reaches_no_port_of_a_run_that_launch_started_on_one(
    tmp_path: Path, launcher: tuple[str, ...], sync: str, is_reached: bool
) -> None:
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    options = ("--nproc-per-node", "2") if launcher is TORCHRUN else ("--per-node", "2")
    script = (str(SCRIPT), str(tmp_path), sync, str(tmp_path / "gate"))
    with hosts(1) as (attacker, (victim,)):
        words = (*PYTHON, *launcher, *options, *script)
        run = victim.start(words, ENVIRONMENT, tmp_path / "run.log")
        ports = {port for _, port in listening(tmp_path)}

        reached = reached_from(attacker, victim, ports, tmp_path)

        os.write(gate, b"go")
        assert run.wait(DEADLINE_S) == 0
    os.close(gate)
    assert len(ports) >= 3
    assert bool(reached) is is_reached


@pytest.mark.parametrize("given", [True, False])
def test_several_hosts_listen_on_the_addresses_that_reach_each_other_only(
    tmp_path: Path, given: bool
) -> None:
    with hosts(WORLD_SIZE) as (_, many):
        runs = []
        for host in many:
            words = [*PYTHON, *LAUNCH, "--nodes", "2", "--per-node", "1"]
            words += ["--store", many[0].address, *(["--address", host.address] if given else [])]
            words += [str(SCRIPT), str(tmp_path), "bsp-ps"]
            runs.append(host.start(words, ENVIRONMENT, tmp_path / f"{host.name}.log"))
        found = {address for address, _ in listening(tmp_path)}
        codes = [run.wait(DEADLINE_S) for run in runs]

    assert codes == [0, 0]
    assert found == {host.address for host in many}
