"""Ray Train: unequal batches, exact gradients, and runs that lose and gain nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from evenstride.errors import ConfigError
from evenstride.trace.run_log import RunLog
from tests.integrations import ray_task
from tests.integrations.ray_task import BATCH, EPOCHS, SAMPLES, STEPS, STEPS_IN_EPOCH
from tests.messages import check_message, raises_message
from tests.multiproc.training import net, relative_error

ROOT = Path(__file__).parents[2]
# Of all processes; raylets start slowly on a busy machine.
LOCAL_S, CLUSTER_S = 100.0, 480.0
TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
LOSE_AFTER, GAIN_AFTER, CUT_AFTER = 4, 7, 3  # as in ray_cluster, which imports Ray


def run(*module: str, deadline_s: float, **variables: str) -> str:
    """Run a module in a process group of its own, which ends by the deadline; return its output."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env={**os.environ, **quiet, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # Ray ends its own processes then
        output, _ = process.communicate(timeout=20.0)
        pytest.fail(f"{module} did not end in {deadline_s:.0f} s:\n{output[-4000:]}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return ray_task.alone()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two ranks came to in Ray's local mode."""
    folder = tmp_path_factory.mktemp("local")
    program = "tests.integrations.ray_local"
    run(*TORCHRUN, "--nproc-per-node=2", "-m", program, str(folder), deadline_s=LOCAL_S)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_unequal_batches_train_as_one_process_does(
    local: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    """In float64: the gradient of every step, the weights and the loss."""
    exact = [rank["exact"] for rank in local]
    for rank, share in zip(exact, (3, 7), strict=True):
        assert len(rank["steps"][0]["ids"]) == share
        assert rank["shares"] == [3, 7]
        for step, gradient in zip(rank["steps"], alone["gradients"], strict=True):
            assert relative_error(step["gradient"], gradient) < 1e-12
        assert relative_error(rank["weights"], alone["weights"]) < 1e-12
    last = [rank["steps"][-1] for rank in exact]
    loss = sum(step["loss"] * len(step["ids"]) for step in last)
    assert loss / sum(len(step["ids"]) for step in last) == pytest.approx(alone["loss"], 1e-12)


def test_the_loader_has_what_a_script_asks_of_it(local: list[dict[str, Any]]) -> None:
    """The default global batch is that of the script, and each sample is trained once per epoch."""
    exact = [rank["exact"] for rank in local]
    assert [one["batch"] for one in exact] == [BATCH, BATCH]
    assert [one["length"] for one in exact] == [STEPS_IN_EPOCH] * 2
    assert [one["samples"] for one in exact] == [SAMPLES] * 2
    assert all(one["wrapped"] and not one["restored"] for one in exact)
    trained = Counter(i for one in exact for step in one["steps"] for i in step["ids"])
    assert trained == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def test_a_model_sharded_by_fsdp2_trains_as_one_process_does(
    local: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for rank in local:
        assert relative_error(rank["sharded"], alone["weights"]) < 1e-12


def test_a_stream_is_split_too(local: list[dict[str, Any]]) -> None:
    """Each sample once, and more of them on the rank with the larger share."""
    first, second = (rank["streamed"] for rank in local)
    assert sorted(first + second) == list(range(SAMPLES))
    assert len(first) < len(second)


def test_the_same_batches_without_evenstride_give_a_wrong_gradient(
    local: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for rank in local:
        assert relative_error(rank["uneven"], alone["gradients"][0]) > 0.1


@pytest.mark.parametrize(
    ("case", "facts"),
    [
        ("rows of Ray Data", ("DataLoader", "Ray Data")),
        ("a batch sampler", ("batch_sampler", "shuffle=")),
        ("no batches", ("batch_size",)),
        ("a sampler", ("WeightedRandomSampler",)),
        ("a part", ("RandomSampler", "does not draw each sample once")),
        ("replacement", ("with replacement",)),
        ("FSDP1", ("'fsdp'", "fully_shard")),
        ("DataParallel", ("DataParallel", "one process per device")),
        ("every step but none", ("every",)),
        ("epochs from the start", ("set_epoch(0)", "epoch 1")),
        ("Ray's loader", ("fetched",)),
    ],
)
def test_what_cannot_be_exact_is_refused_alike_on_every_worker(
    local: list[dict[str, Any]], case: str, facts: tuple[str, ...]
) -> None:
    first, second = (rank["refusals"][case] for rank in local)
    assert first == second
    assert first.partition(":")[0] in ("ConfigError", "UsageError", "ScaleError")
    check_message(first, *facts)


def test_outside_of_a_training_function_it_says_so() -> None:
    from evenstride.integrations.ray import prepare

    with raises_message(ConfigError, "TorchTrainer"):
        prepare(ray_task.data_loader(), net())


def test_the_first_version_of_ray_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train

    from evenstride.integrations.ray import RayStride

    monkeypatch.delattr(ray.train, "get_preemption_info")  # as RAY_TRAIN_V2_ENABLED=0 does
    with raises_message(ConfigError, "RAY_TRAIN_V2_ENABLED"):
        RayStride(8)


def test_tpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train.torch
    import torch

    from evenstride.integrations.ray import RayStride

    monkeypatch.setattr(ray.train, "get_context", worker_alone)
    # What ScalingConfig(use_tpu=True) leads to. This torch has no device of type "tpu".
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("xla"))
    with raises_message(ConfigError, "use_tpu"):
        RayStride(8)


def worker_alone() -> SimpleNamespace:
    return SimpleNamespace(get_world_size=lambda: 1)


def test_the_example_runs_in_local_mode() -> None:
    example = ("examples/ray_train.py", "--epochs", "3")
    output = run(*TORCHRUN, "--nproc-per-node=2", *example, deadline_s=LOCAL_S)
    assert "'epoch': 3" in output


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return what came of the runs on a cluster, and their folder."""
    folder = tmp_path_factory.mktemp("lasting")
    run("tests.integrations.ray_cluster", str(folder), "lasting", deadline_s=CLUSTER_S)
    return json.loads((folder / "result.json").read_text()), folder


def committed(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of a run that count: a restart undoes those after its checkpoint."""
    notes = [one for rank in (0, 1) for one in ray_task.noted(folder / f"steps-{rank}.jsonl")]
    # Run, workers and first step name a generation, which undoes what the last one did after that.
    generations = [("cut", 2, 0), ("churn", 2, 3), ("churn", 1, 3), ("churn", 2, 6)]
    kept: list[dict[str, Any]] = []
    for generation in generations:
        kept = [one for one in kept if one["step"] <= generation[2]]
        kept += [one for one in notes if (one["run"], one["workers"], one["began"]) == generation]
    assert {(n["run"], n["workers"], n["began"]) for n in notes} == set(generations)
    return kept


@pytest.mark.timeout(CLUSTER_S + 60)
def test_a_run_goes_on_without_a_killed_raylet_and_with_a_new_one(
    lasting: tuple[dict[str, Any], Path], alone: dict[str, Any]
) -> None:
    """It is cut, resumed, loses a node in mid-epoch, gains one, and ends as one process does."""
    result, folder = lasting
    assert result["cut"]["returned"]["step"] == CUT_AFTER
    assert result["rest"]["returned"]["workers"] == 2
    assert result["rest"]["returned"]["step"] == STEPS
    assert relative_error(result["rest"]["returned"]["weights"], alone["weights"]) < 1e-12
    steps = committed(folder)
    assert {one["step"] for one in steps} == set(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        last = (epoch + 1) * STEPS_IN_EPOCH
        within = [one for one in steps if last - STEPS_IN_EPOCH < one["step"] <= last]
        trained = Counter(i for one in within for i in one["ids"])
        assert trained == Counter(range(SAMPLES))


@pytest.mark.timeout(CLUSTER_S + 60)
def test_checkpoints_lie_in_the_storage_of_ray(lasting: tuple[dict[str, Any], Path]) -> None:
    result, folder = lasting
    assert result["rest"]["saved"] == ["evenstride.json", "model.pt", "training.pt"]
    kept = list((folder / "storage" / "churn").glob("checkpoint_2*"))
    assert len(kept) == 2  # by CheckpointConfig(num_to_keep=2)
    import torch

    newest = torch.load(max(kept) / "model.pt", weights_only=True)
    assert list(newest) == list(net().state_dict())


@pytest.mark.timeout(CLUSTER_S + 60)
def test_an_announced_preemption_is_saved_before_the_next_save_is_due(
    lasting: tuple[dict[str, Any], Path],
) -> None:
    result, _ = lasting
    notice = result["notice"]
    assert notice["metrics"]["step"] == notice["returned"]["step"] > LOSE_AFTER
    assert notice["saved"]


@pytest.mark.timeout(CLUSTER_S + 60)
def test_a_trace_ends_although_ray_kills_the_workers(
    lasting: tuple[dict[str, Any], Path],
) -> None:
    _, folder = lasting
    (trace,) = (folder / "trace").glob("*.jsonl")  # of the last run
    assert json.loads(trace.read_text().splitlines()[-1])["kind"] == "ended"


@pytest.mark.alone
@pytest.mark.cgroups
@pytest.mark.timeout(CLUSTER_S + 60)
def test_nodes_of_unequal_speed_get_unequal_shares(tmp_path: Path) -> None:
    run("tests.integrations.ray_cluster", str(tmp_path), "unequal", deadline_s=CLUSTER_S)
    result = json.loads((tmp_path / "result.json").read_text())
    first = result["speeds"][result["returned"]["address"]]  # of rank 0's node
    # Over the whole run, because other processes, and Ray's own on a node, slow single steps down.
    samples = [0, 0]
    for seen in RunLog(tmp_path / "unequal.jsonl").observations:
        samples[seen.worker] += seen.share * len(seen.busy_s)
    fast, slow = samples if first == max(result["speeds"].values()) else samples[::-1]
    assert fast > slow
