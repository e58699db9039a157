"""Files and lines that start a cluster."""

import shlex

import pytest
import yaml

from evenstride.core.gradient_noise import Interval
from evenstride.planner.epochs import Given
from evenstride.planner.outlook import Choice, Outlook, outlook
from evenstride.planner.starting import skypilot_files, torchrun_lines, variables
from tests.unit.planner.kinds import kind, task

ALONE = Choice((kind("g5.xlarge", place="aws/us-east-1", losses_per_h=0.1),), (4,), 256)
MIXED = Choice(
    (kind("a", workers=2, place="gcp/us-central1"), kind("b", place="gcp/us-central1")), (3, 2), 256
)


def test_one_kind_is_one_task() -> None:
    files = skypilot_files(ALONE, ["train.py", "--name", "a b"])

    found = yaml.safe_load(files["evenstride.yaml"])
    assert list(files) == ["evenstride.yaml"]
    assert found["num_nodes"] == 4
    assert found["resources"] == {
        "infra": "aws/us-east-1",
        "instance_type": "g5.xlarge",
        "use_spot": True,
    }
    assert "--nnodes=4 --nproc-per-node=1 --node-rank=$SKYPILOT_NODE_RANK" in found["run"]
    assert found["run"].endswith("train.py --name 'a b'\n")
    assert "setup: |\n  pip install" in files["evenstride.yaml"]
    assert "accelerators" not in found["resources"]


def test_a_mix_is_a_task_for_each_kind_with_ranks_of_its_own() -> None:
    first, second = (yaml.safe_load(text) for text in skypilot_files(MIXED, ["t.py"]).values())

    assert "--node-rank=$SKYPILOT_NODE_RANK --master-addr=$(echo" in first["run"]
    assert "--node-rank=$((SKYPILOT_NODE_RANK + 3)) --master-addr=$EVENSTRIDE_HEAD" in second["run"]
    assert "--nnodes=5 --nproc-per-node=2" in first["run"]
    assert "--nnodes=5 --nproc-per-node=1" in second["run"]
    assert second["envs"] == {"EVENSTRIDE_HEAD": ""}


def test_lines_name_the_ranks_of_each_kind() -> None:
    first, second = torchrun_lines(MIXED, ["t.py"])

    assert first.startswith("torchrun --nnodes=5 --node-rank=0..2 --nproc-per-node=2")
    assert second.startswith("torchrun --nnodes=5 --node-rank=3..4 --nproc-per-node=1")


def looked_at(epochs: float) -> Outlook:
    found = outlook(ALONE, task(Given(epochs, ALONE.batch)))
    assert found is not None
    assert found.epochs == Interval(epochs, epochs, epochs)
    return found


@pytest.mark.parametrize(("epochs", "whole"), [(44.2, "45"), (45.0000001, "45"), (45.0, "45")])
def test_a_script_is_told_whole_epochs_and_the_batch(epochs: float, whole: str) -> None:
    told = variables(looked_at(epochs))

    assert told == {"EVENSTRIDE_EPOCHS": whole, "EVENSTRIDE_GLOBAL_BATCH": "256"}


def test_another_mode_is_told_in_lines_and_files() -> None:
    told = variables(looked_at(45.0), "bsp-ps(servers=2)")

    (line,) = torchrun_lines(ALONE, ["t.py"], told)
    words = shlex.split(line)
    assert words[:4] == [
        *("EVENSTRIDE_EPOCHS=45", "EVENSTRIDE_GLOBAL_BATCH=256"),
        *("EVENSTRIDE_SYNC=bsp-ps(servers=2)", "torchrun"),
    ]
    each = [yaml.safe_load(text) for text in skypilot_files(MIXED, ["t.py"], told).values()]
    assert each[0]["envs"] == told
    assert each[1]["envs"] == {**told, "EVENSTRIDE_HEAD": ""}


def test_a_task_has_the_torch_of_the_profile_and_evenstride_from_a_folder() -> None:
    (text,) = skypilot_files(ALONE, ["t.py"], torch="2.13.0+cpu").values()

    lines = yaml.safe_load(text)["setup"].splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert commands == ["pip install torch==2.13.0", "pip install ./evenstride-src"]
    assert any("evenstride-src" in line for line in lines if line.startswith("#"))


def test_accelerators_are_asked_for() -> None:
    choice = Choice((kind("n1-standard-8", workers=2, accelerators="T4:2"),), (1,), 256)
    (text,) = skypilot_files(choice, ["t.py"]).values()

    assert yaml.safe_load(text)["resources"]["accelerators"] == "T4:2"
