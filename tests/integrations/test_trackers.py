"""W&B and MLflow in runs of two ranks, read back from what they stored."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed")
pytest.importorskip("mlflow", reason="mlflow is not installed")

from evenstride.runtime.sinks.mlflow_sink import MlflowSink
from evenstride.runtime.sinks.snapshot import Sample, neutral
from evenstride.testing import RankPool
from tests.ending import run_to_end
from tests.free_ports import free_ports
from tests.integrations.tracked_script import refused
from tests.integrations.wandb_files import history, records
from tests.unit.runtime.sinks.made import HOSTILE, snapshot, with_news

# MLflow calls what the newest SQLAlchemy is about to remove.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0
STEPS = 120  # of a run of the script


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """An environment in which the trackers write below a folder only."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "HOME": str(tmp_path),
        "WANDB_DIR": str(tmp_path),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def trained(how: str, folder: Path, sinks: str, variables: dict[str, str]) -> str:
    """Return the output of the script with two ranks and some sinks, which must end well."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    script = str(Path(__file__).with_name("tracked_script.py"))
    command = [sys.executable, *torchrun, "--nproc-per-node=2", script, how, str(folder / "state")]
    code, output = run_to_end(
        command, DEADLINE_S, {**variables, "EVENSTRIDE_SINKS": sinks}, cwd=folder
    )
    assert code == 0, output
    return output


def mlflow_runs(variables: dict[str, str]) -> tuple[Any, list[Any]]:
    """Return MLflow's client and all runs in the store."""
    from mlflow import MlflowClient

    client = MlflowClient(variables["MLFLOW_TRACKING_URI"])
    ids = [one.experiment_id for one in client.search_experiments()]
    return client, list(client.search_runs(ids))


def test_a_resumed_training_goes_on_in_the_same_runs(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    both = "wandb:ours,mlflow:ours"
    first = trained("plain", tmp_path, both, {**variables, "WANDB_RUN_ID": "same"})
    _, (run,) = mlflow_runs(variables)
    again = {**variables, "WANDB_RUN_ID": "same", "MLFLOW_RUN_ID": run.info.run_id}
    second = trained("plain", tmp_path, both, again)

    assert (f"step {STEPS}\n" in first, f"step {2 * STEPS}\n" in second) == (True, True)
    # W&B: two files offline, one run.
    rows = history(tmp_path)
    begun = [one.run for one in records(tmp_path) if one.WhichOneof("record_type") == "run"]
    assert {(one.project, one.run_id) for one in begun} == {("ours", "same")}
    steps = [row["evenstride/step"] for row in rows]
    assert steps == sorted(steps)
    assert steps[0] < STEPS < steps[-1] <= 2 * STEPS
    means = [(r["evenstride/step"], r["evenstride_metric/loss"]) for r in rows if len(r) == 2]
    assert means == [(60 * n, 0.5) for n in range(1, 5)]
    # MLflow: one run with both halves.
    client, (run,) = mlflow_runs(variables)
    assert run.info.status == "FINISHED"
    stored = client.get_metric_history(run.info.run_id, "evenstride/step_seconds")
    assert [one.step for one in stored] == [
        s for s, r in zip(steps, rows, strict=True) if len(r) > 2
    ]
    means = client.get_metric_history(run.info.run_id, "evenstride_metric/loss")
    assert [(one.step, one.value) for one in means] == [(60 * n, 0.5) for n in range(1, 5)]
    shares = {t: v for t, v in run.data.metrics.items() if "worker_share_samples/" in t}
    assert sum(shares.values()) == 12.0
    assert shares.keys() <= {tag for row in rows for tag in row}
    # Quiet: what the libraries would print names them.
    assert not [x for x in (first + second).splitlines() if "wandb" in x or "mlflow" in x.lower()]


@pytest.mark.parametrize("how", ["wandb", "wandb-late"])
def test_a_wandb_run_of_the_script_keeps_its_steps_and_its_end(
    tmp_path: Path, variables: dict[str, str], how: str
) -> None:
    output = trained(how, tmp_path, "wandb:ours", variables)

    assert "WARN" not in output, output
    rows = history(tmp_path)
    theirs = [row for row in rows if "theirs" in row]
    assert [row["theirs"] for row in theirs] == list(range(10, STEPS + 1, 10))
    assert [row["after"] for row in rows if "after" in row] == [1]
    kinds = [one.WhichOneof("record_type") for one in records(tmp_path)]
    assert (kinds.count("run"), kinds.count("exit")) == (1, 1)
    ours = [row["evenstride/step"] for row in rows if "evenstride/step" in row]
    assert ours == sorted(ours)
    assert len(ours) > 1
    numbered = [_number(one) for one in records(tmp_path) if one.HasField("history")]
    assert all(one < other for one, other in pairwise(numbered))
    assert [n for n, row in zip(numbered, rows, strict=True) if "theirs" in row] == list(
        range(10, STEPS + 1, 10)
    ), "the script's `step=` is the row's"


def _number(record: Any) -> int:
    """Return W&B's own number of a row."""
    return int(record.history.step.num)


SEVERAL_EXCHANGES = """
import wandb
from evenstride.runtime.sinks.wandb_sink import WandbSink
from tests.unit.runtime.sinks.made import snapshot
wandb.init(project="theirs")
sink = WandbSink("")
for step in range(5):
    sink.write(snapshot(step))
wandb.log({"theirs": 1.0}, step=1)
sink.close()
"""


def test_many_exchanges_do_not_use_up_the_steps_of_the_script(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    code, output = run_to_end([sys.executable, "-c", SEVERAL_EXCHANGES], DEADLINE_S, variables)

    assert code == 0, output
    assert [row["theirs"] for row in history(tmp_path) if "theirs" in row] == [1]


def test_an_mlflow_run_of_the_script_keeps_its_end(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    trained("mlflow", tmp_path, "mlflow:ours", variables)

    client, (run,) = mlflow_runs(variables)
    assert run.info.status == "KILLED"
    assert client.get_experiment(run.info.experiment_id).name == "theirs"
    assert run.data.metrics["theirs"] == STEPS
    assert run.data.metrics["evenstride_metric/loss"] == 0.5


def test_a_tracker_that_dies_is_dropped_and_training_goes_on(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    output = trained("wandb-dies", tmp_path, "wandb,csv:metrics.csv", variables)

    (line,) = (one for one in output.splitlines() if "is removed; training continues" in one)
    assert "the sink wandb failed (" in line
    assert output.count(f"trained to step {STEPS}") == 2
    assert f",{STEPS},2,metric,loss," in (tmp_path / "metrics.csv").read_text()


REFUSED = {
    "wandb without a key": ("wandb:x", {"WANDB_MODE": "online"}, "wandb login"),
    "wandb without a server": (
        "wandb:x",
        {"WANDB_MODE": "online", "WANDB_API_KEY": 40 * "a", "WANDB_INIT_TIMEOUT": "3"},
        "WANDB_BASE_URL",
    ),
    "mlflow without a server": (
        "mlflow:x",
        {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"},
        "MLFLOW_TRACKING_URI",
    ),
    "mlflow without the run": ("mlflow", {"MLFLOW_RUN_ID": 32 * "a"}, "MLFLOW_RUN_ID"),
    "mlflow without a scheme": ("mlflow:nowhere://x", {}, "nowhere"),
    "mlflow without a folder": ("mlflow:sqlite:////proc/nowhere/m.db", {}, "sqlite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tracker_that_cannot_start_is_refused_on_every_rank(
    ranks: RankPool, variables: dict[str, str], name: str
) -> None:
    sinks, more, remedy = REFUSED[name]
    unreachable = f"http://127.0.0.1:{free_ports(1)[0]}"
    servers = {"WANDB_BASE_URL": unreachable}
    if name == "mlflow without a server":
        servers["MLFLOW_TRACKING_URI"] = unreachable

    asked = sinks, {**variables, **servers, **more}
    if sinks.startswith("wandb"):  # it reads the environment once in a process
        with RankPool() as fresh:
            one, other = fresh.run(refused, 2, *asked)
    else:
        one, other = ranks.run(refused, 2, *asked)

    assert one == other
    assert remedy in one
    assert len(one.splitlines()) == 1


def test_hostile_names_and_many_workers_are_stored(tmp_path: Path) -> None:
    sink = MlflowSink(uri := f"sqlite:///{tmp_path / 'm.db'}")
    labels = (neutral(HOSTILE), "a//b", "../up", "/", "x" * 300, *map(str, range(1200)))
    busy = tuple(Sample("worker_busy_seconds", name, 1.0) for name in labels)
    sink.write(with_news(40))
    sink.write(replace(snapshot(50), samples=busy))
    sink.close()

    _, (run,) = mlflow_runs({"MLFLOW_TRACKING_URI": uri})
    stored = [t for t in run.data.metrics if t.startswith("evenstride_worker_busy_seconds/")]
    assert len(stored) == len(labels) + 2, "and those of the first snapshot"
    assert run.data.tags["evenstride_alert_slow/b/1"].startswith("step 40: worker b/1 runs at")
