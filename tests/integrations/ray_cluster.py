"""A driver of Ray Train on several raylets: lost and new nodes, preemption, and unequal nodes.

    python -m tests.integrations.ray_cluster FOLDER (lasting | unequal)

It writes what came of it into the folder, which is also Ray's storage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstride.integrations.ray import prepare
from tests.integrations.ray_task import (
    BATCH,
    EPOCHS,
    data_loader,
    note,
    optimizer_of,
    trained,
)
from tests.integrations.raylets import raylets
from tests.multiproc.training import net, weights

SAVE_EVERY, CUT_AFTER, LOSE_AFTER, GAIN_AFTER = 3, 3, 4, 7
SPEEDS = (1.0, 0.4)
_LONG = 10**6  # more than a run ever gets to


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train as a script does, note each step, and do what the run is about."""
    folder, run = Path(config["folder"]), config["run"]
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    stride, loader, model = prepare(
        data_loader(), net(), global_batch=BATCH, trace=folder / "trace", **config["options"]
    )
    optimizer = optimizer_of(model)
    stride.restore(model=model, optimizer=optimizer)
    here = {"run": run, "rank": rank, "workers": workers, "began": stride.step}
    announced = False
    for one in trained(stride, loader, model, optimizer, config["epochs"]):
        if run != "notice":
            note(folder / f"steps-{rank}.jsonl", here | one)
        if stride.save_due(config["save_every"]):
            stride.report({"step": stride.step}, model=model, optimizer=optimizer)
            announced = True
        if (run == "cut" and stride.step == CUT_AFTER) or (run == "notice" and announced):
            break
        if run == "churn":
            _lose_or_gain(folder, here, stride.step)
        if run == "notice" and stride.step == LOSE_AFTER and rank == 1:
            _announce_preemption()
    return {"weights": weights(model), "step": stride.step, "workers": workers}


def _lose_or_gain(folder: Path, here: dict[str, Any], step: int) -> None:
    if here["workers"] == 2 and here["began"] == CUT_AFTER and step == LOSE_AFTER and here["rank"]:
        os.kill(os.getppid(), signal.SIGKILL)  # the raylet, with which Ray ends this worker
        threading.Event().wait()
    if here["workers"] == 1 and step == GAIN_AFTER:
        with (folder / "gain").open("w"):  # the driver waits for this, and adds a node
            threading.Event().wait()  # until Ray restarts the workers with the new node


def _announce_preemption() -> None:
    """Announce that this worker's node will be preempted, as an autoscaler does."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined,unused-ignore]
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 600) * 1e3)
    client.drain_node(ray.get_runtime_context().get_node_id(), reason, "a test", deadline_ms)


def fit(
    train_fn: Callable[[dict[str, Any]], Any],
    folder: Path,
    run: str,
    workers: int | tuple[int, int],
    **config: Any,
) -> dict[str, Any]:
    """Return what a `TorchTrainer` came to; runs with one name continue each other."""
    usual = {"save_every": SAVE_EVERY, "epochs": EPOCHS, "options": {}, "name": run}
    config = {"folder": str(folder), "run": run, **usual, **config}
    result: Any = TorchTrainer(
        train_fn,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, elastic_resize_monitor_interval_s=0.5
        ),
        run_config=ray.train.RunConfig(
            name=config["name"],
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=2),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    saved = (
        sorted(file.name for file in Path(result.checkpoint.path).iterdir())
        if result.checkpoint
        else []
    )
    return {"metrics": result.metrics, "returned": result.return_value, "saved": saved}


def lasting(folder: Path) -> dict[str, Any]:
    """Cut a run, continue it with a node lost and another gained; announce a preemption."""
    with raylets([1.0, 1.0], most=3) as cluster:
        options = {"policy": "static:3,7"}
        cut = fit(train, folder, "cut", 2, name="churn", options=options)
        os.mkfifo(folder / "gain")
        with ThreadPoolExecutor(1) as pool:
            churn = pool.submit(fit, train, folder, "churn", (1, 2))
            with (folder / "gain").open():
                cluster.add()  # Ray starts nodes in the main thread only
            rest = churn.result()
        notice = fit(train, folder, "notice", 2, save_every=_LONG, epochs=_LONG)
    return {"cut": cut, "rest": rest, "notice": notice}


def slow_steps(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model whose steps last many periods of the CPU limits."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(49152, 256)), batch_size=1024)
    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)]
    trace = Path(config["folder"], "unequal.jsonl")
    stride, loader, model = prepare(loader, nn.Sequential(*layers), trace=trace)
    optimizer = optimizer_of(model)
    for (x,) in loader:
        stride.scale(F.mse_loss(model(x), x)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {"shares": stride.shares, "address": ray.util.get_node_ip_address()}


def unequal(folder: Path) -> dict[str, Any]:
    """Train on nodes of unequal speed."""
    with raylets(SPEEDS) as cluster:
        return fit(slow_steps, folder, "unequal", 2) | {"speeds": cluster.speeds}


if __name__ == "__main__":
    result = {"lasting": lasting, "unequal": unequal}[sys.argv[2]](Path(sys.argv[1]))
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))
