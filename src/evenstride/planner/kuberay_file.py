"""How to start a plan on Kubernetes with Ray: a RayJob of KubeRay, with a group for each type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from evenstride.planner.launch_files import Blocks
from evenstride.planner.search.training_forecast import ClusterChoice, Kind

IMAGE = "IMAGE"
"""Stands for the container image, which the user builds."""

_RAY = "2.60.0"  # that the integration was tested with
_LONGEST_NAME = 40  # KubeRay makes names of pods from it, which have at most 63 characters
# How nodes on spot machines are labelled, by cloud; and the taint that Azure sets on them.
_SPOT_LABELS = {
    "aws": {"eks.amazonaws.com/capacityType": "SPOT"},
    "gcp": {"cloud.google.com/gke-spot": "true"},
    "azure": {"kubernetes.azure.com/scalesetpriority": "spot"},
}


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
        KubeRay's types of ``ray.io/v1`` (``RayJobSpec``, ``RayClusterSpec``, ``WorkerGroupSpec``),
        and the node labels in the documentation of Kubernetes, EKS, GKE and AKS.
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
                "workerGroupSpecs": [
                    _group(kind, count)
                    for kind, count in zip(choice.kinds, choice.counts, strict=True)
                ],
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
    return f"{note}{yaml.dump(job, Dumper=Blocks, sort_keys=False, width=200)}"


def _group(kind: Kind, count: int) -> dict[str, Any]:
    own = re.sub(r"[^a-z0-9]+", "-", kind.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    container: dict[str, Any] = {"name": "ray-worker", "image": IMAGE}
    if kind.accelerators:
        container["resources"] = {"limits": {"nvidia.com/gpu": kind.workers}}
    return {
        "groupName": own,
        "replicas": count,
        "minReplicas": 0 if kind.spot else count,
        "maxReplicas": count,
        "rayStartParams": {"num-cpus": str(kind.workers)},
        "template": {
            "spec": {
                "nodeSelector": _labels(kind),
                **_tolerations(kind),
                "affinity": _one_pod_per_machine(own),
                "containers": [container],
            }
        },
    }


def _labels(kind: Kind) -> dict[str, str]:
    cloud, _, region = kind.place.partition("/")
    labels = {"node.kubernetes.io/instance-type": kind.type}
    if region:
        labels["topology.kubernetes.io/region"] = region.partition("/")[0]
    return labels | (_SPOT_LABELS.get(cloud, {}) if kind.spot else {})


def _tolerations(kind: Kind) -> dict[str, Any]:
    if not (kind.spot and kind.place.startswith("azure")):
        return {}
    (key, value), *_ = _SPOT_LABELS["azure"].items()
    return {"tolerations": [{"key": key, "value": value, "effect": "NoSchedule"}]}


def _one_pod_per_machine(group: str) -> dict[str, Any]:
    """Return an anti-affinity by the label that KubeRay gives the pods of a group."""
    term = {
        "labelSelector": {"matchLabels": {"ray.io/group": group}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
