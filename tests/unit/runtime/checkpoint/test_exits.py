"""The end of a program shows whether its newest state is saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.messages import check_message
from tests.unit.runtime.checkpoint.kept import Runs

PROGRAM = """
import atexit, sys
from pathlib import Path
import pytest
from tests.unit.runtime.checkpoint.kept import Runs
atexit.register(lambda: print("the others are still called"))
runs = Runs(pytest.MonkeyPatch())
run = runs({folder!r}, every=2)
run.train(1)
{before}
run.train(2)
{after}
"""


def _exit(tmp_path: Path, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(folder=str(tmp_path / "kept"), before=before, after=after)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )


BREAK = (
    "Path(run.checkpoint._is.storage._root).rename('{0}'); Path('{0}').with_name('kept').touch()"
)


def test_a_program_that_ends_without_close_finishes_the_save(tmp_path: Path) -> None:
    done = _exit(tmp_path)

    assert done.returncode == 0, done.stderr
    (name,) = [path.name for path in (tmp_path / "kept").glob("step-*")]
    assert (tmp_path / "kept" / name / "manifest.json").exists()


def test_a_program_with_an_unsaved_state_has_its_own_exit_code(tmp_path: Path) -> None:
    done = _exit(tmp_path, before=BREAK.format(tmp_path / "moved"))

    assert done.returncode == 120
    check_message(done.stderr, "step 2")
    check_message(done.stdout)


def test_the_ignored_error_names_the_unsaved_state(tmp_path: Path) -> None:
    done = _exit(tmp_path, before=BREAK.format(tmp_path / "moved"))

    shown = done.stderr.partition("Exception ignored")[2]
    if sys.version_info < (3, 14):  # from then on Python names what it was flushing
        check_message(shown, "120")
    assert "object at 0x" not in shown
    assert shown.count('  File "') == 1, "one line of where it was raised: it is no crash"


def test_a_program_that_ends_with_an_error_keeps_its_exit_code(tmp_path: Path) -> None:
    done = _exit(tmp_path, before=BREAK.format(tmp_path / "moved"), after="sys.exit(1 / 0)")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


KILL = """
write = run.checkpoint._is.storage.write
def kill(name, chunks):
    def half():
        whole = b"".join(map(bytes, chunks))
        yield whole[: len(whole) // 2]
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    write(name, half() if "step-000000004" in name and "manifest" in name else chunks)
run.checkpoint._is.storage.write = kill
run.train(1)
"""


def test_a_process_that_is_killed_while_it_writes_a_manifest(runs: Runs, tmp_path: Path) -> None:
    done = _exit(tmp_path, before=KILL)

    assert done.returncode == -9, done.stderr
    names = sorted(path.name[:14] for path in (tmp_path / "kept").glob("step-*"))
    assert names == ["step-000000002", "step-000000004"]
    restored = runs(tmp_path / "kept").restore()
    assert restored is not None
    assert restored.step == 2
