"""Files and lines that start a cluster."""

import yaml

from evenstride.planner.outlook import Choice
from evenstride.planner.starting import skypilot_files, torchrun_lines
from tests.unit.planner.kinds import kind

ALONE = Choice((kind("g5.xlarge", place="aws/us-east-1", losses_per_h=0.1),), (4,), 256)
MIXED = Choice(
    (kind("a", workers=2, place="gcp/us-central1"), kind("b", place="gcp/us-central1")), (3, 2), 256
)


def test_one_kind_is_one_task() -> None:
    files = skypilot_files(ALONE, ["train.py", "--name", "a b"])

    task = yaml.safe_load(files["evenstride.yaml"])
    assert list(files) == ["evenstride.yaml"]
    assert task["num_nodes"] == 4
    assert task["resources"] == {
        "infra": "aws/us-east-1",
        "instance_type": "g5.xlarge",
        "use_spot": True,
    }
    assert "--nnodes=4 --nproc-per-node=1 --node-rank=$SKYPILOT_NODE_RANK" in task["run"]
    assert task["run"].endswith("train.py --name 'a b'\n")
    assert "setup: |\n  pip install" in files["evenstride.yaml"]


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
