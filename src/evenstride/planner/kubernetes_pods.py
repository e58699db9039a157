"""What all files for Kubernetes have in common: how a pod finds its type of machine."""

from __future__ import annotations

from typing import Any

from evenstride.planner.search.training_forecast import Kind

IMAGE = "IMAGE"
"""Stands for the container image, which the user builds."""

# How nodes on spot machines are labelled, by cloud; and the taint that Azure sets on them.
_SPOT_LABELS = {
    "aws": {"eks.amazonaws.com/capacityType": "SPOT"},
    "gcp": {"cloud.google.com/gke-spot": "true"},
    "azure": {"kubernetes.azure.com/scalesetpriority": "spot"},
}


def placement(kind: Kind, own_labels: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a pod that put it alone on a machine of a type.

    ``own_labels`` are those that its controller gives to the pods of a group.
    Source:
        The node labels in the documentation of Kubernetes, EKS, GKE and AKS.
    """
    term = {"labelSelector": {"matchLabels": own_labels}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {
        "nodeSelector": _labels(kind),
        **_tolerations(kind),
        "affinity": {"podAntiAffinity": apart},
    }


def limits(kind: Kind, quantity: type[int] | type[str] = int) -> dict[str, Any]:
    """Return the field of a container that asks for a machine's GPUs."""
    if not kind.accelerators:
        return {}
    return {"resources": {"limits": {"nvidia.com/gpu": quantity(kind.workers)}}}


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
