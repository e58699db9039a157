"""What a script may do to checkpoint files of its own while a command tries it out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from evenstride.errors import ConfigError
from evenstride.runtime.script_saves import guard_saves
from evenstride.runtime.trial import NOTES, notes_in
from tests.files import contents
from tests.messages import raises_message

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

STATE = {"weight": torch.zeros(3)}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder with files of a training that ended an hour ago."""
    folder = tmp_path / "results"
    save_sharded(STATE, checkpoint_id=folder / "sharded", no_dist=True)
    for name in ("model.pt", "model.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"of the training")
    for path in folder.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600))
    return folder


@pytest.fixture
def trial(tmp_path: Path, older: Path) -> Iterator[Path]:
    """The folder of a command that begins now, whose script this process is."""
    folder = tmp_path / "trial" / "uniform-1"
    folder.mkdir(parents=True)
    (folder / "begun").touch()
    guard_saves(folder)
    yield folder
    guard_saves(None)


def safetensors(folder: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(STATE, folder / "model.safetensors")


def renamed(folder: Path) -> None:
    (folder / "new.pt").write_bytes(b"new")
    (folder / "new.pt").replace(folder / "model.pt")


CHANGES: dict[str, Callable[[Path], object]] = {
    "torch.save": lambda folder: torch.save(STATE, folder / "model.pt"),
    "torch.save of a text": lambda folder: torch.save(STATE, f=str(folder / "model.pt")),
    "dcp.save": lambda folder: save_sharded(STATE, checkpoint_id=folder / "sharded", no_dist=True),
    "open": lambda folder: (folder / "model.pt").open("wb"),
    "safetensors": safetensors,
    "replace": renamed,
    "move": lambda folder: (folder / "model.pt").rename(folder / "before.pt"),
    "delete": lambda folder: (folder / "model.pt").unlink(),
    "rmtree": lambda folder: shutil.rmtree(folder),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_there_before_is_not_changed(change: str, older: Path, trial: Path) -> None:
    before = {name: found for name, found in contents(older).items() if (older / name).is_file()}

    with raises_message(BaseException):
        CHANGES[change](older)

    after = contents(older)
    assert {name: after[name] for name in before} == before


def test_a_new_file_of_the_script_is_noted_once_and_may_be_changed(
    tmp_path: Path, trial: Path
) -> None:
    for _ in range(2):
        torch.save(STATE, tmp_path / "last.pt")
    assert torch.load(tmp_path / "last.pt")["weight"].tolist() == [0, 0, 0]
    (tmp_path / "last.pt").unlink()

    assert list(notes_in(trial / NOTES)) == [{"saved": str(tmp_path / "last.pt")}]


def test_older_files_may_be_read_and_others_written(older: Path, trial: Path) -> None:
    assert (older / "model.pt").read_bytes() == b"of the training"
    (older / "notes.txt").write_text("new")
    torch.save(STATE, trial / "model.pt")

    assert not list(notes_in(trial / NOTES))


def test_a_run_does_not_load_what_another_one_has_saved(tmp_path: Path, trial: Path) -> None:
    torch.save(STATE, tmp_path / "last.pt")
    other = trial.with_name("adaptive-1")
    other.mkdir()
    shutil.copy2(trial / "begun", other)
    guard_saves(other)

    with raises_message(ConfigError, "last.pt"):
        torch.load(tmp_path / "last.pt")


def test_ranks_of_one_run_load_what_one_of_them_has_saved(tmp_path: Path, trial: Path) -> None:
    torch.save(STATE, tmp_path / "last.pt")
    guard_saves(None)
    guard_saves(trial)  # as in a process that has written nothing

    assert "weight" in torch.load(tmp_path / "last.pt")


def test_without_a_trial_nothing_is_refused(older: Path) -> None:
    guard_saves(None)

    torch.save(STATE, older / "model.pt")
    shutil.rmtree(older)
