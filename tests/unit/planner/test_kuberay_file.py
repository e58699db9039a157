"""The RayJob of a plan, against the fields that KubeRay and Kubernetes define."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from evenstride.planner.kuberay_file import kuberay_file
from evenstride.planner.kubernetes_pods import IMAGE
from evenstride.planner.search.training_forecast import ClusterChoice
from tests.unit.planner.kinds import kind

MIXED = ClusterChoice(
    (
        kind("g4dn.12xlarge", workers=4, place="aws/us-east-1", accelerators="T4:4"),
        kind("g5.xlarge", place="aws/us-east-1", losses_per_h=0.1, accelerators="A10G:1"),
    ),
    (2, 3),
    512,
)
CPU = ClusterChoice((kind("c6i.large", place="azure/eastus", losses_per_h=0.1),), (4,), 256)
# A type: its fields, `str`, `int`, `bool`, `[type]`, or `{str: type}` for a map. Of ray.io/v1, and
# the part of Kubernetes' pods that is used.
CONTAINER = {"name": str, "image": str, "resources": {"limits": {str: int}}}
TERM = {"labelSelector": {"matchLabels": {str: str}}, "topologyKey": str}
POD = {
    "nodeSelector": {str: str},
    "tolerations": [{"key": str, "value": str, "effect": str}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}},
    "containers": [CONTAINER],
}
HEAD = {"rayStartParams": {str: str}, "template": {"spec": POD}}
GROUP = {**HEAD, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
CLUSTER = {"rayVersion": str, "headGroupSpec": HEAD, "workerGroupSpecs": [GROUP]}
SPEC = {
    "entrypoint": str,
    "runtimeEnvYAML": str,
    "shutdownAfterJobFinishes": bool,
    "rayClusterSpec": CLUSTER,
}
JOB = {"apiVersion": str, "kind": str, "metadata": {"name": str}, "spec": SPEC}
REQUIRED = {
    "rayClusterSpec": {"headGroupSpec"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "containers": {"name", "image"},
}


def check(value: Any, expected: Any, where: str = "job") -> None:
    """Fail unless a value has the fields and types of its kind."""
    if isinstance(expected, type):
        assert type(value) is expected, where
    elif isinstance(expected, list):
        for one in value:
            check(one, expected[0], where)
    elif str in expected:
        for name, one in value.items():
            check(name, str, where)
            check(one, expected[str], f"{where}.{name}")
    else:
        assert value.keys() >= REQUIRED.get(where.rpartition(".")[2], set()), where
        for name, one in value.items():
            assert name in expected, f"{where}.{name}"
            check(one, expected[name], f"{where}.{name}")


@pytest.mark.parametrize("choice", [MIXED, CPU])
def test_it_has_the_fields_of_a_ray_job(choice: ClusterChoice) -> None:
    text = kuberay_file(choice, ["train.py"], {"EVENSTRIDE_EPOCHS": "5"})

    job = yaml.safe_load(text)
    check(job, JOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert kuberay_file(choice, ["train.py"], {"EVENSTRIDE_EPOCHS": "5"}) == text


def test_each_type_of_machine_is_a_group() -> None:
    cluster = yaml.safe_load(kuberay_file(MIXED, ["t.py"]))["spec"]["rayClusterSpec"]

    first, second = cluster["workerGroupSpecs"]
    names = [group["groupName"] for group in (first, second)]
    assert names == ["g4dn-12xlarge", "g5-xlarge-spot"]
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in names)
    replicas = [(g["minReplicas"], g["replicas"], g["maxReplicas"]) for g in (first, second)]
    assert replicas == [(2, 2, 2), (0, 3, 3)]
    assert [g["rayStartParams"]["num-cpus"] for g in (first, second)] == ["4", "1"]
    limits = [
        g["template"]["spec"]["containers"][0]["resources"]["limits"] for g in (first, second)
    ]
    assert limits == [{"nvidia.com/gpu": 4}, {"nvidia.com/gpu": 1}]
    assert second["template"]["spec"]["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "g5.xlarge",
        "topology.kubernetes.io/region": "us-east-1",
        "eks.amazonaws.com/capacityType": "SPOT",
    }
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_script_gets_the_plan() -> None:
    text = kuberay_file(MIXED, ["t.py", "--name", "a b"], {"EVENSTRIDE_GLOBAL_BATCH": "512"})

    spec = yaml.safe_load(text)["spec"]
    assert spec["entrypoint"] == "python t.py --name 'a b'"
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {
        "env_vars": {"EVENSTRIDE_GLOBAL_BATCH": "512"}
    }
    head = text.partition("apiVersion")[0]
    assert "num_workers=(1, 11), use_gpu=True" in head
    assert text.count(f"image: {IMAGE}\n") == 3


def test_spot_nodes_of_azure_are_tolerated_without_gpus() -> None:
    (group,) = yaml.safe_load(kuberay_file(CPU, ["t.py"]))["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]

    pod = group["template"]["spec"]
    key = "kubernetes.azure.com/scalesetpriority"
    assert pod["tolerations"] == [{"key": key, "value": "spot", "effect": "NoSchedule"}]
    assert pod["nodeSelector"][key] == "spot"
    assert "resources" not in pod["containers"][0]
