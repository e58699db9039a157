"""Files and lines that start a cluster."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from evenstride.cli.main import app
from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.launch_files import skypilot_files, start_lines, variables
from evenstride.planner.search.training_forecast import ClusterChoice, TrainingForecast, outlook
from evenstride.planner.workload.epochs_to_target import KnownEpochs
from tests.messages import check_message
from tests.unit.planner.kinds import kind, task

ALONE = ClusterChoice((kind("g5.xlarge", place="aws/us-east-1", losses_per_h=0.1),), (4,), 256)
MIXED = ClusterChoice(
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
        "job_recovery": {"max_restarts_on_errors": 10},
    }
    assert "--nnodes=4 --nproc-per-node=1 --node-rank=$SKYPILOT_NODE_RANK" in found["run"]
    assert found["run"].endswith("train.py --name 'a b'\n")
    assert "setup: |\n  pip install" in files["evenstride.yaml"]
    assert "accelerators" not in found["resources"]


def test_a_mix_is_a_task_for_each_kind_with_ranks_of_its_own() -> None:
    first, second = (yaml.safe_load(text) for text in skypilot_files(MIXED, ["t.py"]).values())

    assert "--node-rank=$SKYPILOT_NODE_RANK --master-addr=$(echo" in first["run"]
    assert (
        "--node-rank=$((SKYPILOT_NODE_RANK + 3)) --master-addr=$_EVENSTRIDE_HEAD" in second["run"]
    )
    assert "--nnodes=5 --nproc-per-node=2" in first["run"]
    assert "--nnodes=5 --nproc-per-node=1" in second["run"]
    assert second["envs"] == {"_EVENSTRIDE_HEAD": ""}


def shell(line: str, **variables: str) -> tuple[int, list[str], str]:
    """Run a line as it is; return its exit code, the words of what it starts, and its complaint."""
    program, _, rest = line.partition("torchrun " if "torchrun " in line else "evenstride ")
    del program
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {rest}"],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return said.returncode, said.stdout.splitlines(), said.stderr


def runnable(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#")]


def test_lines_take_their_rank_and_the_head_from_the_shell() -> None:
    reported = start_lines(MIXED, ["t.py", "--name", "a b"])
    first, second = runnable(reported)

    code, words, _ = shell(second, NODE_RANK="4", HEAD="10.0.0.5")
    assert code == 0
    assert words == [
        *("--nnodes=5", "--node-rank=4", "--nproc-per-node=1", "--master-addr=10.0.0.5"),
        *("--master-port=29500", "t.py", "--name", "a b"),
    ]
    assert "--nproc-per-node=2" in shell(first, NODE_RANK="0", HEAD="x")[1]
    code, _, complaint = shell(first, HEAD="x")
    assert code != 0
    check_message(complaint, "NODE_RANK")
    check_message(shell(first, NODE_RANK="0")[2], "HEAD", "NODE_RANK")
    check_message(reported[2], "NODE_RANK", "HEAD")


def test_one_machine_needs_no_address() -> None:
    (line,) = start_lines(ClusterChoice((kind("a", workers=4),), (1,), 256), ["t.py"], {"A": "1 2"})

    assert line == "A='1 2' torchrun --standalone --nproc-per-node=4 t.py"


def test_a_line_for_one_machine_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import os\nprint(os.environ['A'], os.environ['WORLD_SIZE'])\n")
    (line,) = start_lines(ClusterChoice((kind("a"),), (1,), 256), ["t.py"], {"A": "1 2"})
    python = str(Path(sys.executable).parent)

    said = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert said.stdout == "1 2 1\n", said.stderr


def test_machines_that_may_be_taken_away_are_launched() -> None:
    """And the options are those of `evenstride launch`."""
    reported = start_lines(ALONE, ["t.py"], {"EVENSTRIDE_EPOCHS": "5"})
    store, start = runnable(reported)

    assert store.startswith("evenstride launch --store-only --store ")
    assert start.startswith("EVENSTRIDE_EPOCHS=5 evenstride launch ")
    code, words, _ = shell(start, STORE="10.0.0.5")
    assert code == 0
    found = CliRunner().invoke(app, [*words[:-1], "--dry-run", "t.py"])
    assert found.exit_code == 0, found.output
    assert "--nnodes=1:4" in found.output
    check_message(shell(start)[2], "STORE")
    assert "g5.xlarge spot" in reported[2]


def looked_at(epochs: float) -> TrainingForecast:
    found = outlook(ALONE, task(KnownEpochs(epochs, ALONE.batch)))
    assert found is not None
    assert found.epochs == Interval(epochs, epochs, epochs)
    return found


@pytest.mark.parametrize(("epochs", "whole"), [(44.2, "45"), (45.0000001, "45"), (45.0, "45")])
def test_a_script_gets_whole_epochs_and_the_batch(epochs: float, whole: str) -> None:
    reported = variables(looked_at(epochs))

    assert reported == {"EVENSTRIDE_EPOCHS": whole, "EVENSTRIDE_GLOBAL_BATCH": "256"}


def test_another_mode_is_set_in_lines_and_files() -> None:
    reported = variables(looked_at(45.0), "bsp-ps(servers=2)")

    for choice in (ALONE, MIXED):
        words = shlex.split(runnable(start_lines(choice, ["t.py"], reported))[-1])
        assert words[:3] == [
            *("EVENSTRIDE_EPOCHS=45", "EVENSTRIDE_GLOBAL_BATCH=256"),
            "EVENSTRIDE_SYNC=bsp-ps(servers=2)",
        ]
    each = [yaml.safe_load(text) for text in skypilot_files(MIXED, ["t.py"], reported).values()]
    assert each[0]["envs"] == reported
    assert each[1]["envs"] == {**reported, "_EVENSTRIDE_HEAD": ""}


def test_a_task_has_the_torch_of_the_profile_and_evenstride_from_a_folder() -> None:
    (text,) = skypilot_files(ALONE, ["t.py"], torch="2.13.0+cpu").values()

    lines = yaml.safe_load(text)["setup"].splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert commands == ["pip install torch==2.13.0", "pip install ./evenstride-src"]
    assert any("evenstride-src" in line for line in lines if line.startswith("#"))


def test_accelerators_are_asked_for() -> None:
    choice = ClusterChoice((kind("n1-standard-8", workers=2, accelerators="T4:2"),), (1,), 256)
    (text,) = skypilot_files(choice, ["t.py"]).values()

    assert yaml.safe_load(text)["resources"]["accelerators"] == "T4:2"
