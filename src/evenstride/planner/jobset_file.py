"""How to start a plan on Kubernetes: a JobSet, alone or as the runtime of Kubeflow's Trainer.

A small pod serves the rendezvous store. Each type of machine is a replicated job with a pod for
each machine, and a pod that is lost is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenstride.planner.kubernetes_pods import IMAGE, limits, placement
from evenstride.planner.launch_files import as_yaml
from evenstride.planner.node_groups import (
    STORE,
    STORE_PORT,
    NodeGroup,
    check_job_name,
    launch_words,
    node_groups,
)
from evenstride.planner.search.training_forecast import ClusterChoice, Kind

_JOBSET = "jobset.sigs.k8s.io"
_TRAINER = "trainer.kubeflow.org"
_NODE = "node"  # the container's name that Trainer expects
# Longer than torchrun takes to end its workers, which is 20 s with --spot and 30 s without.
_GRACE_S, _SAVE_S, _SPOT_SAVE_S = 60, 30, 20
_GKE_SPOT_S = 15  # what a pod on a Spot VM of GKE has
_RESTARTS = 3  # of all pods, when one failed by itself


def jobset_file(
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    name: str = "evenstride",
) -> str:
    """Return a JobSet as YAML, with `IMAGE` where the container image belongs.

    Raises:
        ConfigError: the job's name is not a DNS label.
    Source:
        The types of ``jobset.x-k8s.io/v1alpha2``, ``batch/v1`` and ``v1`` of Kubernetes; for what
        the controller does, kubernetes-sigs/jobset, ``pkg/controllers`` and ``pkg/webhooks``.
    """
    job = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": _jobset(choice, command, env or {}, name, trainer=False),
    }
    return f"{_note(choice)}{as_yaml(job)}"


def trainjob_file(
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    name: str = "evenstride",
) -> str:
    """Return a TrainJob of Kubeflow's Trainer 2 and its TrainingRuntime as YAML.

    Trainer's own policy for PyTorch has one number of workers for all nodes. The runtime therefore
    has no such policy, and starts each node by ``evenstride launch``.

    Raises:
        ConfigError: the job's name is not a DNS label.
    Source:
        The types of ``trainer.kubeflow.org/v1alpha1``; for what the controller does,
        kubeflow/trainer, ``pkg/runtime`` and ``pkg/webhooks``.
    """
    api = f"{_TRAINER}/v1alpha1"
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {
            "mlPolicy": {"numNodes": choice.counts[0]},
            "template": {"spec": _jobset(choice, command, env or {}, name, trainer=True)},
        },
    }
    reference = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": name}
    job = {
        "apiVersion": api,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": reference},
    }
    return f"{_note(choice)}{as_yaml(runtime, job)}"


def _note(choice: ClusterChoice) -> str:
    return (
        f"# {choice.name}. The image has the script and evenstride.\n"
        "# For checkpoints, mount a volume that all pods share.\n"
    )


def _jobset(
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str],
    name: str,
    *,
    trainer: bool,
) -> dict[str, Any]:
    check_job_name(name)
    groups = node_groups(choice)
    jobs = [_machines(choice, group, command, env, name) for group in groups]
    if trainer:
        ancestor = {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}
        jobs[0]["template"]["metadata"] = {"labels": ancestor}
    return {
        "network": {"enableDNSHostnames": True},
        # Every pod ends after the last worker of the run, so one that succeeds speaks for all. The
        # store never ends, and pods of lost machines may still wait for another one.
        "successPolicy": {"operator": "Any", "targetReplicatedJobs": [g.name for g in groups]},
        "failurePolicy": {"maxRestarts": _RESTARTS},
        "replicatedJobs": [_store_job(), *jobs],
    }


def _store_job() -> dict[str, Any]:
    own_ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        "name": STORE,
        "image": IMAGE,
        "command": ["evenstride", "launch", "--store-only", "--store", f"$(POD_IP):{STORE_PORT}"],
        "env": [own_ip],
        "readinessProbe": {"tcpSocket": {"port": STORE_PORT}},
    }
    job = _job(1, {"containers": [container]})
    return {"name": STORE, "replicas": 1, "template": {"spec": job}}


def _machines(
    choice: ClusterChoice,
    group: NodeGroup,
    command: Sequence[str],
    env: Mapping[str, str],
    name: str,
) -> dict[str, Any]:
    store = f"{name}-{STORE}-0-0.{name}:{STORE_PORT}"
    words = launch_words(choice, group, store, command)
    variables = {"EVENSTRIDE_NOTICES": f"auto,SIGTERM@{_notice_s(choice, group.kind)}", **env}
    container = {
        "name": _NODE,
        "image": IMAGE,
        # Without a shell, so that the launcher itself gets SIGTERM.
        "command": [_literal(word) for word in words],
        "env": [{"name": key, "value": _literal(value)} for key, value in variables.items()],
        **limits(group.kind, str),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    own = {f"{_JOBSET}/jobset-name": name, f"{_JOBSET}/replicatedjob-name": group.name}
    pod = {
        "terminationGracePeriodSeconds": _GRACE_S,
        **placement(group.kind, own),
        "containers": [container],
        # Loader processes share batches there; the usual 64 MiB are too few.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        **_job(group.count, pod),
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }
    return {
        "name": group.name,
        "replicas": 1,
        "dependsOn": [{"name": STORE, "status": "Ready"}],
        "template": {"spec": job},
    }


def _job(pods: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose preempted pods are replaced without counting as failures."""
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [disrupted]}]},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }


def _notice_s(choice: ClusterChoice, kind: Kind) -> int:
    """Return how long workers have after SIGTERM, until torchrun or the cloud ends them."""
    if kind.spot and kind.place.startswith("gcp"):
        return _GKE_SPOT_S
    return _SPOT_SAVE_S if choice.spot else _SAVE_S


def _literal(text: str) -> str:
    """Keep Kubernetes from replacing ``$(NAME)``, and ``$$`` by ``$``."""
    return text.replace("$", "$$")
