"""``evenstride plan --online`` on a real script: exact through its switches, clean at its end."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from evenstride.cli.main import app
from evenstride.core.convergence.batch_laws import MeasuredTraining
from evenstride.errors import ConfigError, LaunchError
from evenstride.lab.online.online_search import search
from evenstride.lab.online.search_journal import OnlineRequest, opened
from evenstride.planner.online_forecast import Configuration, Probe
from evenstride.planner.online_store import SearchStore, search_profile, worker_types
from evenstride.planner.search.selection import Objective
from evenstride.planner.workload.from_trace import Facts
from evenstride.planner.workload.model_store import StoredModel, command_text
from evenstride.planner.workload.workload_profile import Noise, Point
from tests.files import contents
from tests.multiproc import searched
from tests.unit.planner.searching import Truth

SCRIPT = Path(searched.__file__)
pytestmark = pytest.mark.timeout(400)  # several starts of two processes, in parallel with others
WHOLE = 1e9  # epochs: far more than the script trains, so that it pays to look around


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    _, alive = psutil.wait_procs(left, 10.0)
    assert not alive


def asked(folder: Path, mode: str, **changes: Any) -> OnlineRequest:
    settings: dict[str, Any] = {
        "command": (str(SCRIPT), str(folder), mode),
        "workers": (1, 2),
        "batches": (8, 32),
        "epochs": WHOLE,
        "objective": Objective.COST,
        "usd_per_h": 2.0,
        "speeds": (),
        "folder": folder,
        "probe_steps": 12,
    }
    return OnlineRequest(**{**settings, **changes})


def noted(folder: Path) -> dict[int, tuple[int, int, int, list[int]]]:
    """Return epoch, batch, workers and samples of each step, by all ranks together."""
    steps: dict[int, tuple[int, int, int, list[int]]] = {}
    ranks = defaultdict[int, int](int)
    for file in folder.glob("notes-*.jsonl"):
        for line in file.read_text().splitlines():
            step, epoch, batch, workers, ids = json.loads(line)
            known = steps.setdefault(step, (epoch, batch, workers, []))
            assert known[:3] == (epoch, batch, workers)
            known[3].extend(ids)
            ranks[step] += 1
    assert all(ranks[step] == reported[2] for step, reported in steps.items())
    return dict(sorted(steps.items()))


def epochs_given(folder: Path, phase: int) -> int:
    """Return how many epochs the processes of a phase were given."""
    first, *_ = (folder / f"phase-{phase}" / "rank-0.log").read_text().split("epochs ")[1].split()
    return int(first)


def plain(steps: dict[int, tuple[int, int, int, list[int]]]) -> list[Any]:
    """Return the weights of one process that trains the same batches."""
    model, data = searched.net(), searched.rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=searched.RATE, momentum=0.9)
    for *_, ids in steps.values():
        _, x, y = data[sorted(ids)]
        searched.loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [value.tolist() for value in model.state_dict().values()]


def test_a_training_is_exact_through_all_its_configurations(tmp_path: Path) -> None:
    lines = list[str]()

    found = search(asked(tmp_path, "whole"), lines.append)

    journal, steps = found.journal, noted(tmp_path)
    way = [reported[1:3] for reported in steps.values()]
    changes = [after for before, after in pairwise(way) if before != after]
    assert way[0] == (8, 1)
    assert changes[0] == (32, 2)
    # Where it ends is a matter of this machine's times; mostly with one worker, as it is cheaper.
    # A switch to the same configuration tells its processes of other epochs.
    assert len(changes) == sum(one.source != one.target for one in journal.switches) >= 1
    assert epochs_given(tmp_path, journal.phases) >= (journal.epochs or 0) >= WHOLE
    assert journal.chosen is not None
    assert (journal.chosen.batch, journal.chosen.workers) == way[-1]
    assert list(steps) == list(range(1, len(steps) + 1))
    epochs = defaultdict[int, list[int]](list)
    for epoch, _, _, ids in steps.values():
        epochs[epoch] += ids
    assert all(sorted(ids) == list(range(searched.SAMPLES)) for ids in epochs.values())
    ended = json.loads((tmp_path / "end.json").read_text())
    for mine, theirs in zip(ended, plain(steps), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=1e-9)
    assert sum(journal.trained.values()) == pytest.approx(
        sum(len(reported[3]) for reported in steps.values()), rel=0.05
    )
    noises = [probe.noise for probe in journal.probes if probe.noise is not None]
    assert all(noise.settled for noise in noises), "it waits for each, in such a long training"
    assert found.after is not None and found.overhead is not None
    assert 0 < found.overhead.search_s <= found.overhead.total_s
    assert any("next:" in line for line in lines) and any("stays:" in line for line in lines)


@pytest.mark.parametrize(("measured_on", "batch"), [("here", 32), ("there", 8)])
def test_a_search_begins_in_a_stored_configuration_of_the_same_job_only(
    tmp_path: Path, measured_on: str, batch: int
) -> None:
    class Begun(Exception):
        pass

    def until_begun(line: str) -> None:
        if "samples: begins" in line:
            raise Begun(line)

    def stored(machine: str, script: str, digest: str) -> StoredModel:
        facts = Facts("0.1.0", "2.13.0", 8, 1, 1000, 4e3, digest, 4096, "", 1.7e9)
        truth = Truth((1e-6, 1e-6), fixed_samples=1000.0)
        probes = [truth.probe(Configuration(1, 8)), truth.probe(Configuration(2, 32))]
        profile = search_profile(facts, probes, worker_types(machine, 2, ()), script, 8)
        return StoredModel(tmp_path / "stored.json", profile)

    trained = (MeasuredTraining(8, 1e9), MeasuredTraining(32, 6e8))
    asks = asked(tmp_path, "whole", trained=trained)
    similar = stored("here", f"{SCRIPT.name} other", "of another")
    models = (stored(measured_on, command_text(asks.command), "of this"), similar)

    with pytest.raises(Begun, match=f"1 worker with {batch} samples: begins"):
        search(asks, until_begun, SearchStore(worker_types("here", 2, ()), models))


def test_a_search_that_was_ended_goes_on_without_its_probes(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def until(words: str, line: str) -> None:
        if words in line:
            raise Enough

    first = asked(tmp_path, "whole", batches=(16,))
    with pytest.raises(Enough):
        search(first, lambda line: until("phase 2, 2 workers with 16 samples: continues", line))
    reported = json.loads((tmp_path / "online.json").read_text())
    assert [(probe["workers"], probe["batch"]) for probe in reported["probes"]] == [(1, 16)]

    lines = list[str]()
    found = search(first, lines.append)

    assert "phase 3, 2 workers with 16 samples: begins" in lines[1]
    assert not any("1 worker with 16" in line and " per step" in line for line in lines[:3])
    assert found.journal.chosen is not None
    with pytest.raises(ConfigError, match="belongs to a search with other workers"):
        search(asked(tmp_path, "whole", batches=(16,), workers=(1, 2, 3)))
    again = search(first)  # what is chosen stays
    assert again.journal.chosen == found.journal.chosen
    assert len(again.journal.switches) == len(found.journal.switches)


def begun(asked: OnlineRequest) -> None:
    """Leave a search that was ended at 2 workers with 32 samples, given 777 epochs."""
    journal = opened(asked.folder, asked.to_plain())
    point, noise = Point(samples=4, step_s=1e-3, steps=40), Noise(scale=1000, low=999, high=1001)
    # So slow that there is no way back, and of a noise that is known better than by 12 steps.
    journal.note(Probe(Configuration(2, 8), 40, 100.0, ((point,), (point,)), None, noise))
    journal.enter(Configuration(2, 32), 777)


def test_processes_train_the_epochs_that_were_found_since_they_began(tmp_path: Path) -> None:
    small, lines = asked(tmp_path, "whole", workers=(2,), epochs=1e6), list[str]()
    begun(small)
    needed = 1_023_810  # 1e6 (1000 + 32) / (1000 + 8), the last one ended

    found = search(small, lines.append)

    # First with what the search before had found, not with the 1e6 of its smallest batch.
    assert epochs_given(tmp_path, 1) == 777
    assert epochs_given(tmp_path, 2) == needed
    assert any(f"needs {needed} epochs instead of 777" in line for line in lines)
    assert [(one.source, one.target) for one in found.journal.switches] == [
        (Configuration(2, 32),) * 2
    ]
    assert found.journal.chosen == Configuration(2, 32)
    assert list(noted(tmp_path)) == list(range(1, len(noted(tmp_path)) + 1))
    # What the session before has cost is not known.
    assert found.continued and found.overhead is None and found.after is not None
    search(small)
    assert epochs_given(tmp_path, 3) == needed


def test_training_before_a_search_is_not_part_of_its_cost(tmp_path: Path) -> None:
    only = asked(tmp_path, "whole", workers=(1,), batches=(16,))
    search(only)
    for phase in tmp_path.glob("phase-*"):
        shutil.rmtree(phase)
    (tmp_path / "online.json").unlink()  # the checkpoints are still there

    found = search(only)

    assert not found.continued and found.overhead is not None
    assert (found.overhead.search_s, found.overhead.useful_s) == (0.0, 0.0)
    assert next(iter(noted(tmp_path))) == 1 and found.journal.samples > searched.SAMPLES * 20


def forget(folder: Path) -> None:
    """Delete what searches have left in a folder, but for the script's own checkpoints."""
    for left in (*folder.glob("phase-*"), folder / "checkpoints"):
        shutil.rmtree(left)
    for file in (*folder.glob("notes-*.jsonl"), folder / "online.json"):
        file.unlink()


def test_the_scripts_checkpoints_are_read_only_if_asked_and_never_changed(tmp_path: Path) -> None:
    only, lines = asked(tmp_path, "whole", workers=(1,), batches=(16,)), list[str]()
    search(only)
    (made,) = (tmp_path / "checkpoints").glob("saved-*")
    saved = shutil.copytree(made, tmp_path / "saved")  # as if a training had left them
    last, before = max(noted(tmp_path)), contents(saved)
    forget(tmp_path)

    search(only, lines.append)

    assert next(iter(noted(tmp_path))) == 1
    assert contents(saved) == before
    assert (
        lines.count(
            f"Checkpoints of this run go to {made}; those in {saved} are not read or changed."
        )
        == 1
    )
    forget(tmp_path)
    search(replace(only, restore=True))
    assert next(iter(noted(tmp_path))) == last + 1
    assert contents(saved) == before


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("unsaved", ConfigError, "trains without an evenstride.Checkpointer"),
        ("anew", ConfigError, r"does not call restore\(\) of its Checkpointer"),
        ("fixed", ConfigError, "sets its own global batch, 8"),
        ("failing", LaunchError, "this script fails with several workers"),
    ],
)
def test_a_script_that_cannot_take_part_is_refused_with_its_reason(
    tmp_path: Path, mode: str, error: type[Exception], words: str
) -> None:
    batches = (16,) if mode == "fixed" else (8, 32)

    with pytest.raises(error, match=words):
        search(asked(tmp_path, mode, batches=batches))


def test_a_batch_that_the_script_does_not_allow_is_refused_in_one_sentence(tmp_path: Path) -> None:
    beyond = 100 * searched.BOUNDS[1]

    with pytest.raises(ConfigError, match="not within the bounds of this Stride") as refused:
        search(asked(tmp_path, "whole", workers=(1,), batches=(beyond,)))

    assert "Traceback" not in str(refused.value)
    assert "rank-0.log" in str(refused.value)


def test_the_command_prints_what_was_found(tmp_path: Path) -> None:
    command = ["plan", "--online", "--json", "--workers", "1,2", "--batches", "8,32"]
    # Far more epochs than the script trains, and fewer at the larger batch.
    command += ["--trained", "8:1e9", "--trained", "32:6e8"]
    command += ["--objective", "cost", "--folder", str(tmp_path)]
    command += ["--probe-steps", "12", "--", str(SCRIPT), str(tmp_path), "whole"]

    done = CliRunner().invoke(app, command)

    assert done.exit_code == 0, done.output
    reported = json.loads(done.stdout)
    assert reported["chosen"] in [
        {"workers": one["workers"], "global_batch": one["global_batch"]}
        for one in reported["configurations"]
    ]
    assert {one["workers"] for one in reported["configurations"]} == {1, 2}
    assert {(one["workers"], one["batch"]) for one in reported["probes"]} >= {(1, 8), (2, 32)}
    assert reported["switches"][0]["to"] == {"workers": 2, "global_batch": 32}
    assert reported["overhead"]["part"] < 1
    assert (reported["stored"], reported["reused"]) == ([], []), "tests have no store"
    assert "Scavenger's law" in reported["epochs_by"]
    assert reported["epochs_by"] in done.stderr
    epochs = {one["global_batch"]: one["epochs"] for one in reported["configurations"]}
    assert (epochs[8], epochs[32]) == (pytest.approx(1e9), pytest.approx(6e8))
    assert "EVENSTRIDE_GLOBAL_BATCH" not in os.environ


def test_a_later_search_begins_where_the_earlier_one_ended(tmp_path: Path) -> None:
    def searched_in(name: str, seen: Path) -> tuple[dict[str, Any], str]:
        # The script sees one path, so its command is the same.
        folder = tmp_path / name
        folder.mkdir()
        seen.unlink(missing_ok=True)
        seen.symlink_to(folder)
        command = ["plan", "--online", "--json", "--workers", "1,2", "--batches", "8,32"]
        # One worker costs less than two, and a step of 32 samples hardly longer than one of 8.
        command += ["--trained", "8:1e9", "--trained", "32:6e8", "--objective", "cost"]
        command += ["--folder", str(folder), "--store", str(tmp_path / "store")]
        command += ["--probe-steps", "12", "--", str(SCRIPT), str(seen), "whole"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout), done.stderr

    first, output = searched_in("first", tmp_path / "small")
    (file,) = (tmp_path / "store" / "online").iterdir()
    assert first["stored"] == [str(file)]
    assert first["reused"] == [] and "stored model" not in output
    assert [(one["workers"], one["batch"]) for one in first["probes"]][:2] == [(1, 8), (2, 32)]

    later, output = searched_in("later", tmp_path / "small")

    # Which one that is depends on the measured times.
    best = re.search(r"(\d) workers? with (\d+) samples is the best by the stored model", output)
    assert best is not None and f"{best[0]} of the same command" in output
    assert "step times of" in output and "the stored model misses this step by" in output
    assert [one["model"] for one in later["reused"]] == ["same"]
    began = later["probes"][0]
    assert (began["workers"], began["batch"]) == (int(best[1]), int(best[2]))
    assert {one["doubt"] for one in later["probes"]} == {0.0}, "the others were not measured"

    # With other arguments, its model may be larger, and the best batch may not fit.
    other, _ = searched_in("other", tmp_path / "big")

    assert (other["probes"][0]["workers"], other["probes"][0]["batch"]) == (1, 8)


def test_the_example_takes_part(tmp_path: Path) -> None:
    example = SCRIPT.parents[2] / "examples" / "online.py"
    saved = ("--folder", str(tmp_path / "saved"), "--samples", "2048")
    small = asked(
        tmp_path, "", command=(str(example), *saved), workers=(2,), batches=(256,), epochs=4
    )

    found = search(small)

    reported = (tmp_path / "phase-1" / "rank-0.log").read_text()
    assert "epoch 4: loss" in reported  # as many as it is given to train
    assert "epoch 5: loss" not in reported
    assert "2 worker(s), batch 256" in reported
    assert found.journal.samples == 4 * 2048
