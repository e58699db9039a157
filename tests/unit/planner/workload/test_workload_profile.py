"""Profiles: written, read, refused, put together."""

from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.workload.epochs_to_target import (
    ByNoise,
    KnownEpochs,
    MeasuredEpochs,
    epochs_of,
)
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Links,
    Model,
    Noise,
    Point,
    ReachedTraining,
    WorkloadProfile,
    merged,
    read_profile,
    require_versions,
    write_profile,
)
from tests.messages import raises_message

DEVICE = DeviceProfile(
    type="t4", points=(Point(samples=8, step_s=0.1), Point(samples=32, step_s=0.3))
)
PROFILE = WorkloadProfile(
    evenstride="0.1.0",
    torch="2.5.1+cpu",
    made_on="2026-05-01",
    model=Model(parameters=1000, gradient_bytes=4000, digest="abc"),
    samples=50_000,
    global_batch=256,
    devices=(DEVICE,),
)


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    whole = PROFILE.model_copy(
        update={
            "links": Links(latency_s=1e-4, bytes_per_s=1e9),
            "noise": Noise(scale=700.0, low=300.0),
            "trainings": (ReachedTraining(batch=256, epochs=3.5, gamma=0.7),),
        }
    )

    write_profile(whole, path)

    assert read_profile(path) == whole


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", ("JSON",)),
        ("[]", ()),
        ('{"format": 2}', ()),
        ('{"format": 1}', ()),
    ],
)
def test_an_invalid_profile_is_refused(tmp_path: Path, text: str, why: tuple[str, ...]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)

    with raises_message(ConfigError, *why):
        read_profile(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_no_number_of_a_profile_is_infinite_or_nan(tmp_path: Path, number: str) -> None:
    path = tmp_path / "profile.json"
    text = PROFILE.model_dump_json()
    path.write_text(text.replace('"gradient_bytes":', f'"gradient_bytes":{number},"x":', 1))

    with raises_message(ConfigError, "gradient_bytes"):
        read_profile(path)
    with pytest.raises(ValueError, match="finite number"):
        ReachedTraining(batch=256, epochs=float(number))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises_message(ConfigError):
        read_profile(tmp_path / "nowhere.json")


def test_profiles_of_one_workload_are_put_together() -> None:
    more = DeviceProfile(type="t4", points=(Point(samples=64, step_s=0.6),), most_samples=128)
    other = DeviceProfile(type="a10g", points=DEVICE.points)
    second = PROFILE.model_copy(
        update={"devices": (more, other), "noise": Noise(scale=5.0), "made_on": "2026-05-02"}
    )

    both = merged([PROFILE, second])

    assert [d.type for d in both.devices] == ["t4", "a10g"]
    assert len(both.devices[0].points) == 3
    assert both.devices[0].most_samples == 128
    assert both.noise == Noise(scale=5.0)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model": Model(parameters=1000, gradient_bytes=4000, digest="xyz")}, "models"),
        ({"samples": 60_000}, "samples per epoch"),
        ({"torch": "2.6.0"}, "versions of torch"),
    ],
)
def test_profiles_of_different_workloads_are_not(changed: dict[str, object], what: str) -> None:
    other = PROFILE.model_copy(update=changed)

    with raises_message(ConfigError, what):
        merged([PROFILE, other])
    assert merged([PROFILE, other], force=True).samples == PROFILE.samples


def test_trainings_of_different_targets_are_not_put_together() -> None:
    """Also where the first profile has none."""
    one, other = (
        PROFILE.model_copy(update={"target": target, "devices": ()})
        for target in ("loss 0.3", "training loss 0.3")
    )

    assert merged([PROFILE, one, one]).target == "loss 0.3"
    with raises_message(ConfigError, "0.3"):
        merged([PROFILE, one, other])
    assert merged([PROFILE, one, other], force=True).devices == PROFILE.devices


def test_without_any_times_a_plan_is_refused() -> None:
    with raises_message(ConfigError, "--as"):
        merged([PROFILE.model_copy(update={"devices": ()})])


def test_a_profile_of_another_version_is_refused_unless_forced() -> None:
    require_versions(PROFILE, "0.1.9", "2.5.0")
    require_versions(PROFILE, "0.1.0", "")
    with raises_message(ConfigError, "2.5.1", "2.14.0"):
        require_versions(PROFILE, "0.1.0", "2.14.0")
    with raises_message(ConfigError, "0.1.0", "0.2.0"):
        require_versions(PROFILE, "0.2.0", "")
    require_versions(PROFILE, "0.2.0", "3.0", force=True)


def test_epochs_come_from_the_known_trainings() -> None:
    noisy = PROFILE.model_copy(update={"noise": Noise(scale=256.0)})
    trained = PROFILE.model_copy(
        update={
            "trainings": (
                ReachedTraining(batch=256, epochs=4),
                ReachedTraining(batch=512, epochs=5),
            )
        }
    )

    given, by_noise, measured = (
        epochs_of(PROFILE, 10.0),
        epochs_of(noisy, 10.0),
        epochs_of(trained, None),
    )

    assert isinstance(given, KnownEpochs)
    assert given.at(512) is None
    assert isinstance(by_noise, ByNoise)
    at = by_noise.at(768)
    assert at is not None
    assert (at.low, at.value, at.high) == (10.0, 20.0, 30.0)
    assert isinstance(measured, MeasuredEpochs)
    at = measured.at(384)
    assert at is not None
    assert (at.low, at.value, at.high) == pytest.approx((3.6, 4.5, 5.625))
    assert "vary by 25 %" in measured.why
    assert measured.at(768) is None


def test_nothing_known_of_epochs_says_what_to_give() -> None:
    with raises_message(ConfigError, "--epochs"):
        epochs_of(PROFILE, None)
    with raises_message(ConfigError, "--epochs", "-1"):
        epochs_of(PROFILE, -1.0)


def test_a_file_of_brackets_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)

    with raises_message(ConfigError, "JSON"):
        read_profile(tmp_path / "deep.json")
