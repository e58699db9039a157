"""The store of measured jobs: its files, what is skipped, and which jobs are similar."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.workload.model_store import (
    keep,
    likeness,
    of_script,
    read_store,
    similar,
    store_folder,
)
from evenstride.planner.workload.workload_profile import Noise, WorkloadProfile, read_profile
from tests.messages import check_message, raises_message
from tests.unit.planner.workload.jobs import device, job, stored, trained


def kept(profile: WorkloadProfile, folder: Path) -> Path:
    file = keep(profile, folder)
    assert file is not None
    return file


def test_a_kept_profile_is_read_again_and_its_file_is_a_profile(tmp_path: Path) -> None:
    profile = job(devices=(device("small", 0.01, 0.001),))

    file = kept(profile, tmp_path / "new" / "store")

    store = read_store(file.parent, "0.1.3", "2.13.1")
    assert [(one.file, one.profile) for one in store.models] == [(file, profile)]
    assert read_profile(file) == profile
    assert file.name.startswith("train-")
    assert store.skipped == ()
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_later_measurement_of_the_job_replaces_the_same_and_adds_the_others(
    tmp_path: Path,
) -> None:
    first = job(
        devices=(device("small", 0.01, 0.001), device("large", 0.01, 0.0001)),
        noise=Noise(scale=300.0),
        trainings=trained({64: 10.0}),
    )
    second = job(devices=(device("small", 0.02, 0.002),), trainings=trained({64: 10.0, 256: 12.0}))

    file = kept(first, tmp_path)

    assert keep(first, tmp_path) is None, "nothing has changed"
    assert kept(second, tmp_path) == file
    found = read_profile(file)
    assert {one.type: one for one in found.devices} == {
        "small": second.devices[0],
        "large": first.devices[1],
    }
    assert found.trainings == second.trainings
    assert found.noise == first.noise


def test_a_later_measurement_keeps_the_points_of_other_sizes(tmp_path: Path) -> None:
    first = job(devices=(device("small", 0.01, 0.001, (32, 128)),))
    second = job(devices=(device("small", 0.02, 0.002, (128, 512)),))

    kept(first, tmp_path)
    found = read_profile(kept(second, tmp_path)).devices[0].points

    assert found == (first.devices[0].points[0], *second.devices[0].points)
    assert keep(second, tmp_path) is None, "nothing has changed"


@pytest.mark.parametrize(
    ("before", "now", "largest", "sizes", "kept_limit"),
    [
        (None, 256, 128, [32, 128], 256),
        (512, None, 128, [32, 128, 512], 512),
        (512, None, 1024, [32, 128, 512, 1024], None),
        (512, 2048, 1024, [32, 128, 512, 1024], 2048),
    ],
)
def test_no_stored_point_is_larger_than_the_memory_and_a_limit_stays(
    tmp_path: Path,
    before: int | None,
    now: int | None,
    largest: int,
    sizes: list[int],
    kept_limit: int | None,
) -> None:
    old = device("small", 0.01, 0.001).model_copy(update={"most_samples": before})
    new = device("small", 0.02, 0.002, (largest,)).model_copy(update={"most_samples": now})

    kept(job(devices=(old,)), tmp_path)
    (found,) = read_profile(kept(job(devices=(new,)), tmp_path)).devices

    assert sorted(point.samples for point in found.points) == sizes
    assert found.most_samples == kept_limit


def test_a_file_of_another_version_is_replaced_and_not_merged(tmp_path: Path) -> None:
    old = job(devices=(device("small", 0.01, 0.001),), torch="1.9.0", noise=Noise(scale=300.0))
    new = job(devices=(device("large", 0.01, 0.001),))

    kept(old, tmp_path)

    assert read_profile(kept(new, tmp_path)) == new


def test_points_of_another_device_are_not_of_the_same_curve(tmp_path: Path) -> None:
    processor = device("small", 0.01, 0.001).model_copy(update={"computed_on": "cpu"})
    graphics = device("small", 0.01, 0.0001, (64,)).model_copy(update={"computed_on": "cuda"})

    kept(job(devices=(processor,)), tmp_path)

    assert read_profile(kept(job(devices=(graphics,)), tmp_path)).devices == (graphics,)


@pytest.mark.parametrize("settled", [True, None])
def test_the_noise_that_is_known_best_stays_and_of_equals_the_newer(
    tmp_path: Path, settled: bool | None
) -> None:
    known = Noise(scale=300.0, low=200.0, high=400.0, settled=settled)
    unsettled = Noise(scale=500.0, low=490.0, high=510.0, settled=False)
    equal = Noise(scale=600.0, low=400.0, high=800.0, settled=settled)

    file = kept(job(noise=known), tmp_path)

    assert keep(job(noise=unsettled), tmp_path) is None
    assert kept(job(noise=equal), tmp_path) == file
    assert read_profile(file).noise == equal


def test_other_models_data_commands_and_targets_are_other_jobs(tmp_path: Path) -> None:
    others = (
        job(),
        job(2000),
        job(samples=40_000),
        job(script="train.py --lr 0.2"),
        job(target="loss 0.3"),
    )

    assert len({kept(one, tmp_path) for one in others}) == len(others)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept(job(), tmp_path)
    before = file.read_text()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with raises_message(ConfigError, "--store", varies=[str(tmp_path)]):
            keep(job(noise=Noise(scale=1.0)), tmp_path)

    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == before


def test_damaged_files_and_those_of_other_versions_are_named_and_skipped(tmp_path: Path) -> None:
    sound = kept(job(), tmp_path)
    old = kept(job(2000, torch="1.9.0"), tmp_path).rename(tmp_path / "old.json")
    (tmp_path / "cut.json").write_text(sound.read_text()[:100])
    (tmp_path / "future.json").write_text('{"format": 2}')

    store = read_store(tmp_path, "0.1.0", "2.13.0")

    assert [one.file for one in store.models] == [sound]
    check_message("\n".join(store.skipped), "cut.json", "future.json", "old.json", "1.9.0")
    forced = read_store(tmp_path, "0.1.0", "2.13.0", force=True)
    assert {one.file for one in forced.models} == {sound, old}


def test_a_damaged_file_is_replaced_by_the_next_measurement(tmp_path: Path) -> None:
    file = kept(job(), tmp_path)
    file.write_text("{")

    assert kept(job(), tmp_path) == file
    assert read_profile(file) == job()


def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert read_store(tmp_path / "none", "0.1.0", "2.13.0").models == ()


def test_the_store_is_in_the_cache_folder_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/here")

    assert store_folder(None, {}) == Path("/here/.cache/evenstride")
    assert store_folder(None, {"XDG_CACHE_HOME": "/fast"}) == Path("/fast/evenstride")
    assert store_folder(None, {"XDG_CACHE_HOME": "fast"}) == Path("/here/.cache/evenstride")
    assert store_folder(None, {"EVENSTRIDE_STORE": "~/mine"}) == Path("/here/mine")
    assert store_folder("here", {"EVENSTRIDE_STORE": "off"}) == Path("here")
    assert store_folder(None, {"EVENSTRIDE_STORE": "off"}) is None
    assert store_folder("off", {}) is None


def test_a_user_without_a_home_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)

    assert store_folder(None, {}) is None
    assert store_folder(None, {"XDG_CACHE_HOME": "/fast"}) == Path("/fast/evenstride")


def test_similarity_is_the_mean_of_script_parameters_and_samples() -> None:
    one = likeness(job(1000), job(2000, samples=25_000))

    assert not one.same
    assert one.part == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert one.why == "the same script train.py, 0.5 times the parameters, 2 times the samples"


def test_a_job_with_the_same_parameters_and_samples_is_the_same_under_any_name() -> None:
    assert likeness(job(), job(script="other.py")).same
    assert not likeness(job(), job(samples=40_000)).same
    nameless = job().model.model_copy(update={"digest": ""})
    assert not likeness(job(model=nameless), job(model=nameless)).same
    assert likeness(job(script=""), job(2000, script="")).part < 0.7, "no script is not the same"


def test_the_same_job_comes_before_similar_ones_and_the_newest_of_equals_first() -> None:
    models = stored(
        job(1200),
        job(script="other.py", made_on="2026-01-01"),
        job(script="other.py", made_on="2026-02-01"),
        job(900),
        job(10_000),
    )

    found = similar(job(), models)

    assert [one.file.name for one, _ in found] == ["2.json", "1.json", "3.json", "0.json"]


def test_a_command_finds_its_own_measurement_before_that_with_other_arguments() -> None:
    steps = (device("small", 0.01, 0.001),)
    models = stored(
        job(devices=steps, script="train.py --width 8"),
        job(devices=steps, script="train.py --lr 0.2", made_on="2026-01-01"),
        job(devices=steps),
        job(),
        job(devices=steps, script="eval.py"),
    )

    found = of_script(("code/train.py", "--lr", "0.1"), models)

    facts = [(one.file.name, like.same, like.part) for one, like in found]
    assert facts == [("2.json", True, 1.0), ("1.json", False, 0.5), ("0.json", False, 0.0)]
    assert found[1][1].why == "the command train.py --lr 0.2"
