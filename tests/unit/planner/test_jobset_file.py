"""A plan's files for JobSet and Trainer. tests/integrations check them against the schemas."""

from typing import Any

import yaml

from evenstride.errors import ConfigError
from evenstride.planner.jobset_file import jobset_file, trainjob_file
from evenstride.planner.kubernetes_pods import IMAGE
from evenstride.planner.search.training_forecast import ClusterChoice
from tests.messages import raises_message
from tests.unit.planner.kinds import kind

MIXED = ClusterChoice(
    (
        kind("g2-standard-48", workers=4, place="gcp/us-central1/a", accelerators="L4:4"),
        kind("n1-standard-8", place="gcp/us-central1/a", losses_per_h=0.1, accelerators="T4:1"),
    ),
    (2, 3),
    512,
)
ENV = {"EVENSTRIDE_GLOBAL_BATCH": "512", "NAME": "$(HOME)"}


def jobs(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return list(spec["replicatedJobs"])


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["template"]["spec"]["template"]["spec"])


def test_each_type_is_a_job_with_a_pod_for_each_machine() -> None:
    text = jobset_file(MIXED, ["t.py", "$(X)", "a$$b", "$$(X)"], ENV, name="digits")
    spec = yaml.safe_load(text)["spec"]
    store, first, second = jobs(spec)

    assert text.count(f"image: {IMAGE}\n") == 3
    assert [one["name"] for one in (first, second)] == ["g2-standard-48", "n1-standard-8-spot"]
    assert [one["template"]["spec"]["parallelism"] for one in (first, second)] == [2, 3]
    assert spec["successPolicy"]["targetReplicatedJobs"] == [first["name"], second["name"]]
    (container,) = pod(second)["containers"]
    assert container["command"] == [
        *("evenstride", "launch", "--nodes", "1:5", "--per-node", "1"),
        *("--store", "digits-store-0-0.digits:29400", "--spot", "t.py"),
        # Kubernetes makes $ of $$ before it looks for $(NAME).
        *("$$(X)", "a$$$$b", "$$$$(X)"),
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert {"name": "NAME", "value": "$$(HOME)"} in container["env"]
    assert pod(second)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert first["dependsOn"] == [{"name": store["name"], "status": "Ready"}]


def test_workers_know_how_long_they_have() -> None:
    """On a Spot VM of GKE 15 s; otherwise until torchrun ends them."""
    spec = yaml.safe_load(jobset_file(MIXED, ["t.py"]))["spec"]
    fixed = ClusterChoice(MIXED.kinds[:1], (2,), 512)
    alone = yaml.safe_load(jobset_file(fixed, ["t.py"]))["spec"]

    def notice(job: dict[str, Any]) -> str:
        return str(pod(job)["containers"][0]["env"][0]["value"])

    assert list(map(notice, jobs(spec)[1:])) == ["auto,SIGTERM@20", "auto,SIGTERM@15"]
    assert notice(jobs(alone)[1]) == "auto,SIGTERM@30"
    assert pod(jobs(alone)[1])["terminationGracePeriodSeconds"] > 30
    assert "--spot" not in pod(jobs(alone)[1])["containers"][0]["command"]


def test_a_preempted_pod_is_replaced_and_does_not_count() -> None:
    for job in jobs(yaml.safe_load(jobset_file(MIXED, ["t.py"]))["spec"]):
        (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert rule["action"] == "Ignore"
        assert rule["onPodConditions"][0]["type"] == "DisruptionTarget"
        assert pod(job)["restartPolicy"] == "Never"  # which such a policy needs


def test_a_train_job_has_a_runtime_with_the_same_jobs() -> None:
    runtime, job = yaml.safe_load_all(trainjob_file(MIXED, ["t.py"], name="digits"))
    ours = jobs(runtime["spec"]["template"]["spec"])

    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    labels = ours[1]["template"].pop("metadata")["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # Trainer gives the labelled job this many pods.
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2}
    assert pod(ours[1])["containers"][0]["name"] == "node"
    assert ours == jobs(yaml.safe_load(jobset_file(MIXED, ["t.py"], name="digits"))["spec"])


def test_a_name_that_is_no_label_is_refused() -> None:
    with raises_message(ConfigError, "'My Job'"):
        jobset_file(MIXED, ["t.py"], name="My Job")
