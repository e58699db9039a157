"""With a full disk or an unwritable folder, training continues and the failure is reported."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride.runtime.checkpoint import CheckpointError
from evenstride.runtime.checkpoint.format.manifest import parse_name
from evenstride.runtime.checkpoint.save.preparing import parse_every
from tests.messages import check_message, raises_message
from tests.unit.runtime.checkpoint.kept import FullStorage, Runs, hours_later


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB; skipped where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "evenstride-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _steps(folder: Path) -> list[int]:
    names = [parse_name(path.parent.name) for path in folder.glob("*/manifest.json")]
    return sorted(name.step for name in names if name is not None)


def test_a_full_disk_fails_the_save_but_not_the_run(
    runs: Runs, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs(small_disk, every=2, keep=1)
    run.train(2)
    run.checkpoint.wait()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break

    run.train(2)
    with raises_message(CheckpointError):
        run.checkpoint.close()

    assert _steps(small_disk) == [2]
    check_message(caplog.messages)
    assert len(list(small_disk.glob("step-*"))) == 1, "the failed attempt gave its space back"
    ballast.unlink()
    again = runs(small_disk, every=2, keep=1)
    again.restore()
    again.train(2)
    again.checkpoint.close()
    assert _steps(small_disk) == [4]


def test_a_limit_on_file_sizes_fails_the_save_only(runs: Runs, tmp_path: Path) -> None:
    run = runs(tmp_path, every=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        run.train(2)
        with raises_message(CheckpointError):
            run.checkpoint.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)

    assert _steps(tmp_path) == []


def test_an_unwritable_folder_is_reported_at_once_and_saves_still_try(
    runs: Runs, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remount = ["mount", "-o", "remount,{}", str(small_disk)]
    subprocess.run([word.format("ro") for word in remount], check=True)

    run = runs(small_disk, every=2)

    check_message(caplog.messages, "rank 0")
    assert "Read-only file system" in caplog.text
    run.train(3)
    run.settle()
    subprocess.run([word.format("rw") for word in remount], check=True)
    run.train(2)
    run.checkpoint.close()
    assert _steps(small_disk) == [4]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_reported(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o500)

    runs(tmp_path)

    assert "Permission denied" in caplog.text


def test_writes_are_retried_at_once_only_after_temporary_errors(runs: Runs) -> None:
    storage = FullStorage()
    run = runs(storage)

    tries = []
    for error in (OSError(errno.ENOSPC, "full"), TimeoutError("busy")):
        storage.error, storage.tries = error, 0
        with raises_message(CheckpointError, error.args[-1]):
            run.checkpoint.save()
        tries.append(storage.tries)

    assert tries == [1, 4]
    storage.error = None
    run.checkpoint.save()
    run.checkpoint.close()


def test_the_leader_requests_another_save_soon(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FullStorage()
    run = runs(storage, every=1000)
    storage.error = OSError(errno.ENOSPC, "full")
    with pytest.raises(CheckpointError):
        run.checkpoint.save()
    storage.error = None

    run.train(12)
    run.checkpoint.wait()
    assert not storage.checkpoints(), "not at once"
    hours_later(monkeypatch)
    run.train(12)
    run.checkpoint.wait()

    assert len(storage.checkpoints()) == 1


def test_a_requested_save_is_made_despite_failures(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FullStorage()
    run = runs(storage, every=1)
    storage.error = OSError(errno.ENOSPC, "full")
    run.train(4)  # fails at 1, 2 and 4: the next three are skipped
    run.settle()
    storage.error = None
    hours_later(monkeypatch)

    run.train(3)
    run.checkpoint.wait()

    (step,) = [name.step for text in storage.checkpoints() if (name := parse_name(text))]
    assert 5 <= step <= 7


@pytest.mark.parametrize(
    ("every", "steps", "interval_s"),
    [(1, 1, 0), (100, 100, 0), ("30s", 0, 30), ("5min", 0, 300), ("1.5h", 0, 5400)],
)
def test_a_cadence_is_steps_or_a_duration(every: int | str, steps: int, interval_s: float) -> None:
    cadence = parse_every(every)

    assert (cadence.steps, cadence.interval_s, cadence.auto) == (steps, interval_s, False)
    assert cadence.by_clock == (not steps)
