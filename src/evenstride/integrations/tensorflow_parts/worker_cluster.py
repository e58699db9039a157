"""The workers of a run, which TensorFlow and torch must know alike."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import torch.distributed as dist

from evenstride.errors import ConfigError
from evenstride.runtime.environment import read_environment
from evenstride.runtime.host.network_interfaces import address_towards

_PORT = "29500"  # torchrun's own default


def connect() -> None:
    """Form the process group, and set ``TF_CONFIG`` if it is missing; collective.

    Call it at the start of the script, before ``MultiWorkerMirroredStrategy()``, which reads
    ``TF_CONFIG`` and must be created before other work of TensorFlow. It does nothing in a single
    process. The workers are those of torchrun, or of another launcher that sets ``RANK`` and
    ``WORLD_SIZE``. If only ``TF_CONFIG`` is set, they are its chief and its workers, in this
    order. They then meet at the first worker's host, at port ``MASTER_PORT`` or 29500.

    TensorFlow uses as many threads in an operation as ``OMP_NUM_THREADS`` says, if that is set.

    Raises:
        ConfigError: ``TF_CONFIG`` is not a cluster with this worker, or does not fit the launcher.
    """
    _limit_threads()
    world_size = read_environment(os.environ).world_size
    if "TF_CONFIG" in os.environ:
        rank, hosts = _cluster(os.environ["TF_CONFIG"])
        if "RANK" in os.environ and (int(os.environ["RANK"]), world_size) != (rank, len(hosts)):
            raise ConfigError(
                f"TF_CONFIG says worker {rank} of {len(hosts)}, but RANK and WORLD_SIZE say "
                f"{os.environ['RANK']} of {world_size}; set TF_CONFIG or these two, not both"
            )
        if len(hosts) > 1 and not dist.is_initialized():
            where = f"tcp://{hosts[0]}:{os.environ.get('MASTER_PORT') or _PORT}"
            dist.init_process_group("gloo", where, rank=rank, world_size=len(hosts))
    elif dist.is_initialized() or world_size > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        if dist.get_world_size() > 1:
            os.environ["TF_CONFIG"] = _config(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def _limit_threads() -> None:
    # torchrun sets it to 1 for several processes on a machine, and TensorFlow does not read it.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and not tf.config.threading.get_intra_op_parallelism_threads():
        with contextlib.suppress(RuntimeError):  # TensorFlow has started already
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))


def _cluster(text: str) -> tuple[int, list[str]]:
    """Return this worker's rank and the hosts of all workers."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        workers = _workers(cluster)
        rank = workers.index((task["type"], int(task["index"])))
        hosts = [str(cluster[kind][index]).rpartition(":")[0] for kind, index in workers]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"TF_CONFIG is {text!r}; it must be JSON with a cluster of workers and this worker's "
            'task, such as {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": '
            '{"type": "worker", "index": 0}}. Start evaluators and parameter servers without '
            "evenstride"
        ) from None
    return rank, hosts


def _workers(cluster: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(kind, at) for kind in ("chief", "worker") for at in range(len(cluster.get(kind, ())))]


def _config(first: str) -> str:
    """Return a ``TF_CONFIG`` with a free port of each worker; collective."""
    with socket.socket() as listener:  # TensorFlow opens the port itself, a moment later
        listener.bind(("", 0))
        mine = f"{address_towards(first, 1)}:{listener.getsockname()[1]}"
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, mine)
    task = {"type": "worker", "index": dist.get_rank()}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})
