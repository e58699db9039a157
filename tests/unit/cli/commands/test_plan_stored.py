"""``evenstride plan`` with a store: what is kept, what is reused, and how to do without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from evenstride import __version__
from evenstride.cli.plan_request import installed_torch
from evenstride.planner.workload.workload_profile import WorkloadProfile, write_profile
from tests.messages import check_message
from tests.unit.cli.conftest import Shell
from tests.unit.planner.workload.jobs import by_noise, device, job

PRICES = """type,usd_per_h,memory_gib,spot
small,1.0,4,0.5
large,3.5,8,
other,0.5,,
"""


def measured(parameters: int = 1000, **others: Any) -> WorkloadProfile:
    versions: dict[str, Any] = {"evenstride": __version__, "torch": installed_torch() or "2.13.0"}
    steps = {"devices": (device("small", 0.01, 0.001),)}
    return job(parameters, **{**versions, **steps, **others})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_profile(measured(), tmp_path / "own.json")
    (tmp_path / "prices.csv").write_text(PRICES)
    return tmp_path / "store"


def planned(shell: Shell, store: Path, *arguments: str) -> dict[str, Any]:
    found = shell("plan", *arguments, "--catalog", "prices.csv", "--store", str(store), "--json")
    assert not found.code, found.err
    answer: dict[str, Any] = found.json()
    return answer


def test_a_planned_job_is_planned_again_by_its_command_alone(shell: Shell, store: Path) -> None:
    first = planned(shell, store, "own.json", "--epochs", "20")
    (file,) = store.iterdir()
    again = planned(shell, store, "--script", "train.py --lr 0.1", "--epochs", "20")

    assert first["stored"] == [str(file)]
    assert (first["reused"], again["stored"]) == ([], [])
    assert again["candidates"] == first["candidates"]
    (part,) = again["reused"]
    assert (part["what"], part["model"], part["files"]) == ("the whole job", "same", [str(file)])


def test_the_first_note_names_the_reused_model_and_its_errors(shell: Shell, store: Path) -> None:
    for parameters, noise in ((1200, 512.0), (1400, 600.0), (70_000, 64.0)):
        other = measured(parameters, trainings=by_noise(10.0, noise), target="loss 0.3")
        write_profile(other, store / f"{parameters}.json")
    arguments = ("plan", "own.json", "--epochs", "20", "--catalog", "prices.csv", "--store")

    text = shell(*arguments, str(store)).out
    without = shell(*arguments, "off").out

    first = text.partition("Notes:\n")[2].partition("\n- ")[0]
    check_message(" ".join(first.split()), "similarity 94%", "--store off", varies=[r"\d+ days"])
    assert "batch\n" not in without
    assert "stored model" not in without
    assert without.count("universal") == 0
    batches = planned(shell, store, "own.json", "--epochs", "20", "--max-nodes", "1")
    assert {row["global_batch"] for row in batches["candidates"]} - {256}


def test_without_a_profile_the_script_must_be_in_the_store(shell: Shell, store: Path) -> None:
    planned(shell, store, "own.json", "--epochs", "20")

    for options in ((), ("--script", "train.py", "--store", "off"), ("--script", "eval.py x")):
        arguments = ["plan", "--epochs", "20", "--store", str(store), *options]
        check_message(shell(*arguments).refusal(), varies=[str(store)])


def test_a_damaged_file_is_named_and_does_not_stop_the_plan(shell: Shell, store: Path) -> None:
    store.mkdir()
    (store / "bad.json").write_text("{")

    found = planned(shell, store, "own.json", "--epochs", "20")

    assert any("bad.json skipped" in note for note in found["caveats"])


def test_a_store_that_cannot_be_written_does_not_stop_the_plan(shell: Shell, store: Path) -> None:
    store.write_text("a file")

    found = planned(shell, store, "own.json", "--epochs", "20")

    assert any("cannot store" in note for note in found["caveats"])
    assert found["stored"] == []


def test_forced_plans_and_given_trainings_are_not_stored(shell: Shell, store: Path) -> None:
    planned(shell, store, "own.json", "--epochs", "20", "--force")
    assert not store.exists()

    planned(shell, store, "own.json", "--trained", "128:9", "--trained", "256:11")

    (file,) = store.iterdir()
    assert '"trainings": []' in file.read_text()


def test_what_was_reused_is_not_stored_as_measured(shell: Shell, store: Path) -> None:
    store.mkdir()
    other = measured(1200, devices=(device("small", 0.1, 0.01), device("large", 0.1, 0.001)))
    write_profile(other, store / "other.json")

    found = planned(shell, store, "own.json", "--epochs", "20")

    assert {"small", "large"} <= set(found["types_measured"])
    (file,) = map(Path, found["stored"])
    assert "large" not in file.read_text()


def test_types_that_are_not_on_offer_and_times_of_an_idle_accelerator_are_not_reused(
    shell: Shell, store: Path
) -> None:
    prices = "type,usd_per_h,accelerator\nsmall,1.0,\ng4dn.xlarge,0.5,T4\n"
    Path("prices.csv").write_text(prices)
    slow = device("g4dn.xlarge", 0.1, 0.01).model_copy(update={"computed_on": "cpu"})
    store.mkdir()
    others = (device("small", 0.1, 0.01), device("elsewhere", 0.1, 0.001), slow)
    write_profile(measured(1200, devices=others), store / "other.json")

    found = planned(shell, store, "own.json", "--epochs", "20")

    assert found["reused"] == []
    assert found["types_measured"] == ["small"]


def test_a_stored_job_is_planned_only_for_the_target_that_it_reached(
    shell: Shell, store: Path
) -> None:
    store.mkdir()
    reached = measured(trainings=by_noise(10.0, 512.0), target="loss 0.3")
    write_profile(reached, store / "own.json")
    command = ("--script", "train.py --lr 0.1", "--target-loss")

    found = planned(shell, store, *command, "0.3")
    other = shell("plan", *command, "0.2", "--catalog", "prices.csv", "--store", str(store))

    assert (found["target"], len(found["trainings"])) == ("loss 0.3", 3)
    check_message(other.refusal(), "loss 0.2")


def test_machines_are_priced_by_their_memory(shell: Shell, store: Path) -> None:
    shutil.rmtree(store, ignore_errors=True)
    arguments = ("own.json", "--epochs", "20", "--types", "small", "--max-nodes", "1")

    listed = planned(shell, store, *arguments)
    by_memory = planned(shell, store, *arguments, "--usd-per-gib-h", "0.5")

    ratios = [
        new["cost_usd"] / old["cost_usd"]
        for new, old in zip(by_memory["candidates"], listed["candidates"], strict=True)
    ]
    assert ratios == [pytest.approx(4 * 0.5 / 1.0)] * len(ratios)
    assert "0.5 USD per GiB of memory and hour" in str(by_memory["catalogue"])
