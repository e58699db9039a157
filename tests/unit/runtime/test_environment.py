"""The environment's wishes, read in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

import evenstride
from evenstride.errors import ConfigError, UnknownPolicy
from evenstride.runtime.environment import Environment, read_environment
from tests.messages import check_message, raises_message


def test_without_variables_nothing_is_asked() -> None:
    assert read_environment({}) == Environment()
    assert Environment().world_size == 1


def test_every_variable_is_read() -> None:
    found = read_environment(
        {
            "EVENSTRIDE_POLICY": "static:1,2",
            "EVENSTRIDE_MAX_STEPS": "40",
            "EVENSTRIDE_TRACE": "runs/one",
            "_EVENSTRIDE_PROGRESS": "runs/steps",
            "EVENSTRIDE_CALIBRATE": "0.5:1",
            "WORLD_SIZE": "8",
            "EVENSTRIDE_NOTICES": "off",
            "EVENSTRIDE_SILENT_S": "4.5",
            "TORCHELASTIC_RUN_ID": "job",
            "EVENSTRIDE_SYNC": "bsp-ps",
            "EVENSTRIDE_NOISE": "25",
            "EVENSTRIDE_GLOBAL_BATCH": "96",
            "_EVENSTRIDE_HAND_OVER": "runs/phase-1",
        }
    )

    paths = Path("runs/one"), Path("runs/steps")
    assert found == Environment(
        *("static:1,2", 40, *paths, "0.5:1", 8, "off", 4.5, "bsp-ps", 25),
        *(96, Path("runs/phase-1")),
    )


@pytest.mark.parametrize("text", ["0", "-8", "many"])
def test_a_batch_that_cannot_be_is_refused(text: str) -> None:
    with raises_message(ConfigError, "EVENSTRIDE_GLOBAL_BATCH"):
        read_environment({"EVENSTRIDE_GLOBAL_BATCH": text})


def test_silence_is_no_loss_without_a_launcher_that_restarts_ranks() -> None:
    assert read_environment({"EVENSTRIDE_SILENT_S": "4.5"}).silent_s is None
    assert read_environment({"TORCHELASTIC_RUN_ID": "job"}).silent_s == 30.0


@pytest.mark.parametrize("text", ["0", "-3", "inf", "nan", "soon"])
def test_a_silence_that_cannot_be_is_refused(text: str) -> None:
    with raises_message(ConfigError, "EVENSTRIDE_SILENT_S"):
        read_environment({"TORCHELASTIC_RUN_ID": "job", "EVENSTRIDE_SILENT_S": text})


def test_an_empty_variable_counts_as_absent() -> None:
    names = ("POLICY", "MAX_STEPS", "TRACE", "CALIBRATE", "NOISE", "GLOBAL_BATCH")

    private = {"_EVENSTRIDE_PROGRESS": "", "_EVENSTRIDE_HAND_OVER": "", "WORLD_SIZE": ""}
    found = read_environment({f"EVENSTRIDE_{name}": "" for name in names} | private)

    assert found == Environment()


def test_no_step_at_all_is_a_possible_wish() -> None:
    assert read_environment({"EVENSTRIDE_MAX_STEPS": "0"}).max_steps == 0


@pytest.mark.parametrize(
    ("name", "least"), [("EVENSTRIDE_MAX_STEPS", 0), ("WORLD_SIZE", 1), ("EVENSTRIDE_NOISE", 0)]
)
@pytest.mark.parametrize(
    "text",
    [
        *("-1", "many", "1.5", " ", "1e3", "0x10", "²"),
    ],
)
def test_an_invalid_number_is_refused_with_its_range(name: str, least: int, text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_environment({name: text})

    check_message(str(refusal.value), name, f"{text!r}", least)


def test_a_world_of_no_process_is_refused() -> None:
    with raises_message(ConfigError, "WORLD_SIZE is '0'"):
        read_environment({"WORLD_SIZE": "0"})


def test_several_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with raises_message(ConfigError, "WORLD_SIZE is 2"):
        evenstride.Stride(global_batch=4)


def test_an_argument_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENSTRIDE_POLICY", "magic")
    monkeypatch.setenv("EVENSTRIDE_TRACE", str(tmp_path / "theirs"))

    stride = evenstride.Stride(global_batch=4, policy="uniform", trace=tmp_path / "ours")

    policy = stride.summary().policy
    stride.close()
    assert policy == "uniform"
    assert (tmp_path / "ours" / "trace.jsonl").exists()
    assert not (tmp_path / "theirs").exists()


def test_the_environment_fills_in_what_the_script_leaves_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENSTRIDE_POLICY", "static:4")
    monkeypatch.setenv("EVENSTRIDE_TRACE", str(tmp_path / "run.jsonl"))

    stride = evenstride.Stride(global_batch=4)

    policy = stride.summary().policy
    stride.close()
    assert policy == "static:4"
    assert (tmp_path / "run.jsonl").exists()


def test_a_policy_of_the_environment_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTRIDE_POLICY", "magic")

    with raises_message(UnknownPolicy):
        evenstride.Stride(global_batch=4)


@pytest.mark.parametrize(("text", "read"), [("1", 1), (" 8 ", 8), ("", None), ("many", None)])
def test_hardware_queues_are_read_as_cuda_reads_them(text: str, read: int | None) -> None:
    assert read_environment({"CUDA_DEVICE_MAX_CONNECTIONS": text}).connections == read
