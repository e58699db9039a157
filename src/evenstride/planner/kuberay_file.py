"""How to start a plan on Kubernetes with Ray: a RayJob of KubeRay, with a group for each type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from evenstride.planner.kubernetes_pods import IMAGE, limits, placement
from evenstride.planner.launch_files import as_yaml
from evenstride.planner.node_groups import NodeGroup, node_groups
from evenstride.planner.search.training_forecast import ClusterChoice

_RAY = "2.60.0"  # that the integration was tested with


def kuberay_file(
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    name: str = "evenstride",
) -> str:
    """Return a RayJob as YAML, with `IMAGE` where the container image belongs.

    Each type of machine is a worker group with one pod per machine. A pod has as many Ray CPUs as
    it has workers, so that Ray places exactly these with its default resources.
    Source:
        KubeRay's types of ``ray.io/v1`` (``RayJobSpec``, ``RayClusterSpec``, ``WorkerGroupSpec``).
    """
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": shlex.join(["python", *command]),
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": dict(env or {})}, sort_keys=False),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": _RAY,
                "headGroupSpec": {
                    # No worker is placed on the head, which would have another speed and price.
                    "rayStartParams": {"num-cpus": "0"},
                    "template": {"spec": {"containers": [{"name": "ray-head", "image": IMAGE}]}},
                },
                "workerGroupSpecs": [_group(group) for group in node_groups(choice)],
            },
        },
    }
    workers = f"(1, {choice.workers})" if choice.spot else f"{choice.workers}"
    gpu = ", use_gpu=True" if any(kind.accelerators for kind in choice.kinds) else ""
    note = (
        f"# {choice.name}. In the script: ScalingConfig(num_workers={workers}{gpu}).\n"
        "# prepare() reads the batch from the environment below. The image has the script,\n"
        f"# evenstride and Ray {_RAY}.\n"
    )
    return f"{note}{as_yaml(job)}"


def _group(group: NodeGroup) -> dict[str, Any]:
    kind, count = group.kind, group.count
    return {
        "groupName": group.name,
        "replicas": count,
        "minReplicas": 0 if kind.spot else count,
        "maxReplicas": count,
        "rayStartParams": {"num-cpus": str(kind.workers)},
        "template": {
            "spec": {
                **placement(kind, {"ray.io/group": group.name}),
                "containers": [{"name": "ray-worker", "image": IMAGE, **limits(kind)}],
            }
        },
    }
