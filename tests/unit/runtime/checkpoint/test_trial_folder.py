"""A `Checkpointer` in a run of a command writes only to the command's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.trial import NOTES
from tests.files import contents
from tests.messages import raises_message
from tests.unit.runtime.checkpoint.kept import Runs
from tests.unit.runtime.checkpoint.object_store import ObjectStore


@pytest.fixture
def saved(runs: Runs, tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    run = runs(tmp_path / "saved", every=2)
    run.train(4)
    run.checkpoint.close()
    run.close()
    return tmp_path / "saved"


def own(folder: Path) -> Path:
    """Return the one folder of checkpoints in a command's folder."""
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command's folder, set in the environment."""
    monkeypatch.setenv("EVENSTRIDE_CHECKPOINTS", str(tmp_path / "trial"))
    return tmp_path / "trial"


def test_the_scripts_checkpoints_are_neither_restored_nor_changed(
    saved: Path, trial: Path, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(saved)

    run = runs(saved, every=2, keep=1)
    restored = run.restore()
    run.train(6)
    run.checkpoint.save()
    run.checkpoint.close()

    assert restored is None
    assert contents(saved) == before
    assert [path.name[:14] for path in own(trial).glob("step-*")] == ["step-000000006"]
    line = f"Checkpoints of this run go to {own(trial)}; those in {saved} are not read or changed."
    assert caplog.messages.count(line) == 1
    reported = json.loads((trial / NOTES).read_text())
    assert reported == {"folder": str(own(trial)), "replaced": str(saved), "read": False}


def test_a_run_starts_from_the_scripts_checkpoint_on_request(
    saved: Path, trial: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_RESTORE", "1")
    before = contents(saved)

    first = runs(saved, every=2, keep=1)
    restored = first.restore()
    first.train(2)
    first.checkpoint.close()
    first.close()
    second = runs(saved)

    assert restored is not None and restored.step == 4
    again = second.restore()
    assert again is not None and again.step == 6
    assert contents(saved) == before


def test_damage_in_the_scripts_folder_is_skipped(
    saved: Path, trial: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_RESTORE", "1")
    newest = max(saved.glob("step-*"))
    (newest / "tensors-00000.bin").write_bytes(b"damaged")
    before = contents(saved)

    run = runs(saved, every=2, keep=1)
    restored = run.restore()
    run.train(4)
    run.checkpoint.close()

    assert restored is not None and restored.step == 2
    assert contents(saved) == before


def test_folders_of_one_script_stay_separate(trial: Path, tmp_path: Path, runs: Runs) -> None:
    for folder in ("a/last", "b/last"):
        run = runs(tmp_path / folder)
        run.train(1)
        run.checkpoint.save()
        run.close()

    assert sum(path.is_dir() for path in trial.iterdir()) == 2
    assert not (tmp_path / "a").exists()


def test_a_store_behind_a_url_is_not_accessed(trial: Path, runs: Runs) -> None:
    pytest.importorskip("fsspec")
    from tests.unit.runtime.checkpoint import evs3

    evs3.register()
    with ObjectStore() as store:
        run = runs(f"evs3://{store.address}/bucket/run", every=1)
        assert run.restore() is None
        run.train(2)
        run.checkpoint.close()

        assert not sum(store.counts.values())
    assert own(trial).name.startswith("run-")


def test_a_store_behind_a_url_is_only_read_on_request(
    trial: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    from tests.unit.runtime.checkpoint import evs3

    evs3.register()
    with ObjectStore() as store:
        url = f"evs3://{store.address}/bucket/run"
        monkeypatch.delenv("EVENSTRIDE_CHECKPOINTS")
        run = runs(url, every=2)
        run.train(4)
        run.checkpoint.close()
        run.close()
        before, written = dict(store.objects), store.counts["PUT"] + store.counts["DELETE"]
        monkeypatch.setenv("EVENSTRIDE_CHECKPOINTS", str(trial))
        monkeypatch.setenv("EVENSTRIDE_RESTORE", "1")

        run = runs(url, every=1, keep=1)
        restored = run.restore()
        run.train(2)
        run.checkpoint.close()

        assert restored is not None and restored.step == 4
        assert dict(store.objects) == before
        assert store.counts["PUT"] + store.counts["DELETE"] == written


def test_a_calibration_by_hand_leaves_checkpoints_alone(
    saved: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_CALIBRATE", "0.5:0,1:0")
    before = contents(saved)

    run = runs(saved, every=1, keep=1)

    assert run.restore() is None
    run.train(3)
    run.checkpoint.close()
    assert run.checkpoint.report()["saved"] == 3
    assert contents(saved) == before


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("EVENSTRIDE_CHECKPOINTS", "s3://bucket/run", ("URL",)),
        ("EVENSTRIDE_RESTORE", "yes", ()),
    ],
)
def test_an_invalid_setting_is_refused(
    name: str,
    value: str,
    why: tuple[str, ...],
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)

    with raises_message(ConfigError, name, value, *why):
        runs(tmp_path)
