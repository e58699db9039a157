"""Real launchers: Slurm, Accelerate's, Ray's jobs, and the commands of the files for Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenstride.planner.jobset_file import jobset_file
from evenstride.planner.slurm_file import slurm_file
from evenstride.trace.read import read_records
from tests.ending import TORCHRUN_S, end, run_to_end
from tests.free_ports import free_ports
from tests.integrations.launch_choices import SMALL
from tests.integrations.slurm_cluster import SlurmCluster, slurm_cluster, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("launched_script.py"))
ACCELERATED = str(ROOT / "examples" / "accelerate_loop.py")
RAY = str(ROOT / "examples" / "ray_train.py")
DEADLINE_S, RAY_S = 120.0, 400.0
STEPS = 8  # of an epoch of the script
ON_LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, as Ray's and Slurm's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="es") as made:
        yield Path(made)


def notes(folder: Path, attempt: int = 0) -> list[dict[str, Any]]:
    """Return what each rank noted, in the order of the ranks."""
    found = [json.loads(file.read_text()) for file in folder.glob(f"{attempt}-*.json")]
    return sorted(found, key=lambda one: int(one["RANK"]))


def header(trace: Path) -> dict[str, Any]:
    return next(read_records(trace))


def started(
    command: Sequence[str], environment: dict[str, str], output: int
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, **ON_LOOPBACK, **environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def together(
    commands: Sequence[Sequence[str]], environment: dict[str, str], first: Sequence[str] = ()
) -> list[str]:
    """Run commands at the same time, each to its end; return their output.

    ``first`` runs at the same time, and is stopped after them.
    """
    with contextlib.ExitStack() as stack:
        if first:
            stack.callback(end, started(first, environment, subprocess.DEVNULL), TORCHRUN_S)
        processes = []
        for command in commands:
            processes.append(started(command, environment, subprocess.PIPE))
            stack.callback(end, processes[-1], TORCHRUN_S)
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output[-4000:]
    return outputs


@pytest.fixture
def cluster(folder: Path) -> Iterator[SlurmCluster]:
    with slurm_cluster(folder, {"n1": "big", "n2": "small", "n3": "small"}) as running:
        yield running


def test_slurm_starts_unequal_nodes_and_queues_the_job_again(
    cluster: SlurmCluster, folder: Path
) -> None:
    """At the signal before the time limit, all save, and the second attempt continues there."""
    run = folder / "a 'run'"
    run.mkdir()
    text = slurm_file(SMALL, [SCRIPT, str(run), "it's"], {"EVENSTRIDE_EPOCHS": "3"})
    (folder / "run.sbatch").write_text(text)

    state = cluster.run(folder / "run.sbatch", RAY_S, EVENSTRIDE_TEST_LEAVE="5")

    assert state == "COMPLETED", cluster.output()[-4000:]
    found = notes(run, attempt=1)
    assert not notes(run)
    assert [one["WORLD_SIZE"] for one in found] == ["4"] * 4
    nodes = {one["SLURMD_NODENAME"]: one["LOCAL_WORLD_SIZE"] for one in found}
    assert nodes == {"n1": "2", "n2": "1", "n3": "1"}
    assert len({one["began"] for one in found}) == 1
    assert found[0]["began"] > 5
    assert found[0]["steps"] % STEPS == 0
    assert found[0]["arguments"] == ["it's"]
    assert found[0]["EVENSTRIDE_EPOCHS"] == "3"


def test_slurm_refuses_a_wrong_file(cluster: SlurmCluster, folder: Path) -> None:
    text = slurm_file(SMALL, [SCRIPT])
    tried = {
        "right": text,
        "option": text.replace("--ntasks-per-node", "--tasks-on-node"),
        "feature": text.replace("--constraint=big", "--constraint=bigger"),
    }
    refused = set()
    for name, one in tried.items():
        (folder / name).write_text(one)
        if not cluster.accepts(folder / name):
            refused.add(name)

    assert refused == {"option", "feature"}


def accelerate(*options: str) -> list[str]:
    """Return the command of Accelerate's launcher; on processors, ``--cpu`` starts one process."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    usual = ("--mixed_precision", "no", "--dynamo_backend", "no")
    return [*launch, *usual, *options, ACCELERATED, "--cpu", "--epochs", "1"]


def test_accelerate_launch_starts_two_processes(folder: Path) -> None:
    command = accelerate("--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")
    code, output = run_to_end(command, DEADLINE_S, {"EVENSTRIDE_TRACE": str(folder)})

    assert code == 0, output[-4000:]
    assert "epoch 1: " in output
    assert header(folder)["world_size"] == 2


def test_accelerate_launch_starts_two_machines(folder: Path) -> None:
    (port,) = free_ports(1)
    both = ("--num_machines", "2", "--num_processes", "4", "--main_process_ip", "127.0.0.1")
    where = (*both, "--main_process_port", str(port))
    commands = [accelerate(*where, "--machine_rank", rank) for rank in ("0", "1")]

    outputs = together(commands, {"EVENSTRIDE_TRACE": str(folder)})

    assert "epoch 1: " in "".join(outputs)
    assert header(folder)["world_size"] == 4


def test_the_commands_of_a_jobset_train_together(folder: Path) -> None:
    """As its pods run them, with the names and addresses of this machine."""
    (port,) = free_ports(1)
    text = jobset_file(SMALL, [SCRIPT, str(folder), "$(HOME)"], {"EVENSTRIDE_EPOCHS": "3"})
    text = text.replace("evenstride-store-0-0.evenstride", "127.0.0.1").replace("29400", str(port))
    store, *groups = yaml.safe_load(text)["spec"]["replicatedJobs"]

    def command(group: dict[str, Any]) -> list[str]:
        (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
        program, *words = [
            word.replace("$(POD_IP)", "127.0.0.1").replace("$$", "$")
            for word in container["command"]
        ]
        return [sys.executable, "-m", program, *words]

    pods = [group for group in groups for _ in range(group["template"]["spec"]["completions"])]
    container = groups[0]["template"]["spec"]["template"]["spec"]["containers"][0]
    env = {one["name"]: one["value"] for one in container["env"]}
    together([command(pod) for pod in pods], env, first=command(store))

    found = notes(folder)
    assert [one["WORLD_SIZE"] for one in found] == ["4"] * 4
    assert sorted(one["LOCAL_WORLD_SIZE"] for one in found) == ["1", "1", "2", "2"]
    assert found[0]["arguments"] == ["$(HOME)"]
    assert found[0]["EVENSTRIDE_EPOCHS"] == "3"


def serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_a_ray_job_is_submitted(folder: Path) -> None:
    pytest.importorskip("ray.dashboard.modules.job.cli", reason="needs ray[default]")
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    # Of its own, as another cluster on this machine may have the agent's usual port.
    port, dashboard, agent, client = map(str, free_ports(4))
    options = (
        *("--head", "--block", "--disable-usage-stats", "--num-cpus=2", f"--port={port}"),
        *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"),
        *(f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--ray-client-server-port={client}", f"--temp-dir={folder / 'ray'}"),
    )
    head = started([*ray, "start", *options], {}, subprocess.DEVNULL)
    try:
        training = ("--workers", "2", "--epochs", "1", "--storage", str(folder / "results"))
        variables = {"EVENSTRIDE_TRACE": str(folder / "trace"), "EVENSTRIDE_GLOBAL_BATCH": "96"}
        address = f"--address=http://127.0.0.1:{dashboard}"
        environment = f"--runtime-env-json={json.dumps({'env_vars': variables})}"
        submit = [*ray, "job", "submit", address, environment, "--", sys.executable, RAY]
        outcomes: list[tuple[int, str]] = []

        def accepted() -> bool:  # the dashboard serves before the agent that starts jobs
            outcomes.append(run_to_end([*submit, *training], RAY_S, {}))
            return "No available agent" not in outcomes[-1][1]

        assert wait_until(lambda: serves(f"http://127.0.0.1:{dashboard}/api/version"), DEADLINE_S)
        assert wait_until(accepted, DEADLINE_S)
        code, output = outcomes[-1]
    finally:
        end(head, TORCHRUN_S)

    assert code == 0, output[-4000:]
    assert "succeeded" in output
    run = header(folder / "trace")
    assert (run["world_size"], run["global_batch"]) == (2, 96)
