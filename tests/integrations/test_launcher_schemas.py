"""Files for Kubernetes and SkyPilot against the types of these programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenstride.planner.jobset_file import jobset_file, trainjob_file
from evenstride.planner.launch_files import skypilot_files
from evenstride.planner.search.training_forecast import ClusterChoice
from tests.integrations.launch_choices import CPUS, GPUS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "launchers.md"
COMMAND = ("a b.py", "--text", "it's $(HOME)")
ENV = {"EVENSTRIDE_EPOCHS": "5"}
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def documents(choice: ClusterChoice) -> list[dict[str, Any]]:
    texts = [make(choice, COMMAND, ENV) for make in (jobset_file, trainjob_file)]
    return [one for text in texts for one in yaml.safe_load_all(text)]


def written_by_hand(language: str) -> Iterator[str]:
    """Return the files of the page."""
    yield from re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def check(document: dict[str, Any]) -> None:
    """Fail unless a document has the fields of its kind.

    The models ignore a field that they do not know, so it is missing in what they return.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = getattr(models, MODELS[document["kind"]])
    assert model.from_dict(document).to_dict() == document


@pytest.mark.parametrize("choice", [GPUS, CPUS])
def test_documents_for_kubernetes_have_the_fields_of_their_kinds(choice: ClusterChoice) -> None:
    found = documents(choice)

    assert [one["kind"] for one in found] == ["JobSet", "TrainingRuntime", "TrainJob"]
    for one in found:
        check(one)


def test_documents_of_the_page_have_the_fields_of_their_kinds() -> None:
    found = [one for text in written_by_hand("yaml") for one in yaml.safe_load_all(text)]

    assert [one["kind"] for one in found] == ["JobSet", "TrainJob"]
    for one in found:
        check(one)


def replicated(document: dict[str, Any]) -> dict[str, Any]:
    """Return the replicated job of the first type of machine."""
    spec = document["spec"]
    job = (spec["template"]["spec"] if "template" in spec else spec)["replicatedJobs"][1]
    assert isinstance(job, dict)
    return job


def pod(document: dict[str, Any]) -> dict[str, Any]:
    spec = replicated(document)["template"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


WRONG: list[Callable[[dict[str, Any]], Any]] = [
    lambda one: one.update(spec_={}),
    lambda one: replicated(one).update(replica=1),
    lambda one: replicated(one)["template"]["spec"].update(parallelism="2"),
    lambda one: replicated(one)["template"]["spec"].update(podFailurePolicies={"rules": []}),
    lambda one: pod(one).update(terminationGracePeriod=60),
    lambda one: pod(one)["containers"][0].pop("name"),
    lambda one: pod(one)["containers"][0]["env"][0].update(val="1"),
]


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("index", [0, 1])
def test_a_wrong_field_is_found(index: int, change: Callable[[dict[str, Any]], Any]) -> None:
    document = deepcopy(documents(GPUS)[index])
    change(document)

    with pytest.raises((AssertionError, ValueError)):
        check(document)


SKY_CATALOGUE = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,\
AvailabilityZone,GpuInfo,Arch
g4dn.12xlarge,T4,4.0,48.0,192.0,4.0,1.2,us-east-1,us-east-1a,,x86_64
g5.xlarge,A10G,1.0,4.0,16.0,1.0,0.4,us-east-1,us-east-1a,,x86_64
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """SkyPilot with a small catalogue of its own, so that it does not fetch one."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        for version in ("v7", "v8", "v9"):
            folder = home / ".sky" / "catalogs" / version / "aws"
            folder.mkdir(parents=True)
            (folder / "vms.csv").write_text(SKY_CATALOGUE)
        yield pytest.importorskip("sky")


SPOT = ClusterChoice(GPUS.kinds[1:], (3,), 512)


@pytest.mark.parametrize(("choice", "nodes"), [(GPUS, [2, 3]), (SPOT, [3])])
def test_tasks_are_those_of_skypilot(
    sky: Any, choice: ClusterChoice, nodes: list[int], tmp_path: Path
) -> None:
    (tmp_path / "task.yaml").write_text("")
    tasks = [
        sky.Task.from_yaml_config({**yaml.safe_load(text), "workdir": str(tmp_path)})
        for text in skypilot_files(choice, COMMAND, ENV).values()
    ]

    assert [task.num_nodes for task in tasks] == nodes
    last = next(iter(tasks[-1].resources))
    assert (last.instance_type, last.use_spot) == ("g5.xlarge", True)
    restarts = (last.job_recovery or {}).get("max_restarts_on_errors")
    assert restarts == (10 if choice is SPOT else None)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_node": 2}, "num_node"),
        ({"num_nodes": "two"}, "num_nodes"),
        ({"resources": {"use_spots": True}}, "use_spots"),
        ({"resources": {"job_recovery": {"max_restarts_on_errors": "ten"}}}, "max_restarts"),
    ],
)
def test_skypilot_finds_a_wrong_field(sky: Any, wrong: dict[str, Any], named: str) -> None:
    (text,) = skypilot_files(SPOT, COMMAND).values()

    with pytest.raises(Exception, match=named):
        sky.Task.from_yaml_config({**yaml.safe_load(text), **wrong})
