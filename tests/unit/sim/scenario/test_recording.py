"""A recording that cannot be used is distinguished from a missing one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from evenstride.errors import ScenarioError
from evenstride.sim.scenario.recordings import load_recording
from tests.messages import check_message, raises_message

DAY = "20110303"


def archive(name: str, values: npt.ArrayLike) -> bytes:
    """Return a recording as it would be on disk."""
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=True, **{name: np.array(values)})
    return file.getvalue()


def single(values: npt.ArrayLike) -> bytes:
    """Return an array in a file of its own."""
    file = io.BytesIO()
    np.save(file, np.array(values))
    return file.getvalue()


SOUND = archive(f"cpu_{DAY}", np.arange(100).reshape(10, 10))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the recording is looked for."""
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()
    (tmp_path / "traces").mkdir()
    yield tmp_path / "traces" / "planetlab-cpu.npz"
    load_recording.cache_clear()


def test_a_sound_one_is_read(path: Path) -> None:
    path.write_bytes(SOUND)

    assert load_recording(DAY).tolist() == np.arange(100.0).reshape(10, 10).tolist()


DAMAGED = {
    "cut": SOUND[:-50],
    "cut early": SOUND[:20],
    "garbled": SOUND[:60] + bytes(9) + SOUND[69:],
    "of an unknown compression": SOUND.replace(b"\x08\x00", b"\x63\x00"),
    "empty": b"",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 634423\n",
    "a page": b"<html>not found</html>",
    "a single array": single(np.zeros((2, 2))),
    "texts": archive(f"cpu_{DAY}", [["a", "b"]]),
    "not two-dimensional": archive(f"cpu_{DAY}", [1, 2, 3]),
    "of nobody": archive(f"cpu_{DAY}", np.zeros((0, 288))),
    "not a number": archive(f"cpu_{DAY}", [[1.0, np.nan]]),
    "below 0": archive(f"cpu_{DAY}", [[-1, 5]]),
    "above 100": archive(f"cpu_{DAY}", [[101, 5]]),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_recording_is_refused(path: Path, what: str) -> None:
    path.write_bytes(DAMAGED[what])

    with pytest.raises(ScenarioError) as caught:
        load_recording(DAY)

    check_message(str(caught.value), path)


def test_an_unreadable_recording_is_refused_with_the_reason(path: Path) -> None:
    path.mkdir()

    with raises_message(ScenarioError):
        load_recording(DAY)


def test_a_missing_day_is_refused(path: Path) -> None:
    path.write_bytes(SOUND)

    with pytest.raises(ScenarioError) as caught:
        load_recording("20110322")

    check_message(str(caught.value), path, "20110322")


@pytest.mark.parametrize("folder", ["nowhere", "traces/planetlab-cpu.npz"])
def test_a_missing_recording_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    path.write_bytes(SOUND)
    monkeypatch.setenv("EVENSTRIDE_DATA", str(path.parents[1] / folder))

    with raises_message(ScenarioError, "EVENSTRIDE_DATA"):
        load_recording(DAY)
