"""`evenstride top` on a real terminal: it waits, follows, and ends with the run or with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.report.virtual import VirtualRun

DEADLINE_S = 60.0
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
MODULE = [sys.executable, "-m", "evenstride", "top", "--interval", "0.2"]


class Terminal:
    """A process on a terminal of its own, and all that it has drawn."""

    def __init__(self, *arguments: str, folder: Path | None = None) -> None:
        mine, theirs = pty.openpty()
        environment = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*MODULE, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            cwd=folder,
            start_new_session=True,
            # A process started in the background ignores Ctrl-C, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(theirs)
        self._mine, self._drawn = mine, b""
        self._until_s = time.monotonic() + DEADLINE_S

    @property
    def drawn(self) -> str:
        """What was drawn since `forget`, as one line: where a line ends depends on file names."""
        return " ".join(CONTROL.sub("", self._drawn.decode(errors="replace")).split())

    def forget(self) -> None:
        """Look only at what is drawn from here on."""
        self._drawn = b""

    def wait_for(self, text: str) -> None:
        """Read until a text was drawn."""
        while text not in self.drawn:
            left_s = self._until_s - time.monotonic()
            ready = select.select([self._mine], [], [], max(left_s, 0.0))[0]
            assert ready, f"{text!r} was not drawn in time: {self.drawn[-2000:]}"
            try:
                self._drawn += os.read(self._mine, 65536)
            except OSError:  # the other end is closed
                raise AssertionError(f"ended without {text!r}: {self.drawn[-2000:]}") from None

    def ends(self) -> int:
        """Return the exit code, once it has ended."""
        with contextlib.suppress(OSError, AssertionError):
            self.wait_for("\0 never drawn")
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._mine)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def watched(folder: Path, terminals: list[Terminal]) -> tuple[VirtualRun, Terminal]:
    """Return a run of thirty steps, and the terminal that shows it."""
    run = VirtualRun(folder / "trace.jsonl", lambda _: (1.0, 0.5), workers=2)
    run.begin()
    run.run(30)
    terminal = Terminal(folder.name, folder=folder.parent)
    terminals.append(terminal)
    terminal.wait_for("Ctrl-C leaves")
    return run, terminal


def test_it_waits_for_the_run_follows_it_and_ends_with_it(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    path = tmp_path / "trace.jsonl"
    terminal = Terminal(str(tmp_path))
    terminals.append(terminal)
    terminal.wait_for("Waiting for the run")
    run = VirtualRun(path, lambda _: (1.0, 0.5), workers=2)
    run.begin()
    run.run(30)
    terminal.wait_for("step 30")
    run.run(20)
    terminal.wait_for("step 50")
    run.end()

    assert terminal.ends() == 0
    assert "ended" in terminal.drawn


@pytest.mark.parametrize("length", [20, 69])
def test_a_trace_that_is_removed_leaves_the_last_view_with_a_word(
    tmp_path: Path, terminals: list[Terminal], length: int
) -> None:
    """Whatever the length of the folder's name, at which the message is broken into lines."""
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    run, terminal = watched(folder, terminals)
    kept = folder / "kept"
    run.writer.path.rename(kept)
    terminal.forget()
    terminal.wait_for("cannot be read")
    assert "step 30" in terminal.drawn
    kept.rename(run.writer.path)
    run.run(20)
    terminal.wait_for("step 50")
    run.end()

    assert terminal.ends() == 0
    assert "Traceback" not in terminal.drawn


def test_ctrl_c_leaves_it_without_a_word_of_error(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    _, terminal = watched(tmp_path, terminals)
    terminal.process.send_signal(signal.SIGINT)

    assert terminal.ends() == 0
    assert "Traceback" not in terminal.drawn
