"""What goes on in a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from evenstride.cli.live_progress import LiveTable
from tests.messages import check_message
from tests.unit.lab.traces import write_run


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def board(self, *speeds: float) -> LiveTable:
        """Return a board on this terminal."""
        with contextlib.redirect_stderr(self):
            return LiveTable(speeds)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The user's screen."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def _follow(board: LiveTable, trace: Path) -> None:
    with board:
        board.say("Workers are slowed down by numbers.")
        board.follow(trace, "balanced")
        board.refresh()  # there is no trace yet
        write_run(trace, "adaptive", [0.1, 0.2], [(6, 2)], wait_s=0.05)
        board.refresh()


def test_a_terminal_shows_the_workers_as_they_were_last_heard_of(
    terminal: Terminal, tmp_path: Path
) -> None:
    _follow(terminal.board(1.0, 0.25), tmp_path / "trace.jsonl")

    text = terminal.getvalue()
    check_message(text)
    assert "balanced, step 2" in text
    rows = [line.split() for line in text.splitlines() if "here-" in line]
    cells = [[cell for cell in row if cell not in {"│", "|"}] for row in rows]
    assert ["here-0", "1", "6", "150", "ms", "50", "ms"] in cells
    assert ["here-1", "0.25", "2", "75", "ms", "125", "ms"] in cells


def test_the_table_is_gone_and_the_cursor_back_at_the_end(
    terminal: Terminal, tmp_path: Path
) -> None:
    _follow(terminal.board(1.0, 0.25), tmp_path / "trace.jsonl")

    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "\x1b[2K" in text[text.rindex("here-1") :], "the last table was wiped"


def test_the_table_goes_away_after_an_error_too(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), terminal.board(1.0):
        raise KeyboardInterrupt

    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_without_a_terminal_only_plain_lines_go_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _follow(LiveTable((1.0, 0.25)), tmp_path / "trace.jsonl")

    output = capsys.readouterr()
    check_message(output.err)
    assert output.out == ""


def test_a_line_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveTable((1.0,)) as board:
        board.say("static:1,2 [bold]took[/bold] 3 ms")

    assert capsys.readouterr().err == "static:1,2 [bold]took[/bold] 3 ms\n"


def test_without_a_terminal_a_long_line_stays_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = " ".join(["word"] * 60)

    with LiveTable((1.0,)) as board:
        board.say(line)

    assert capsys.readouterr().err == f"{line}\n"


def test_a_new_run_starts_with_an_empty_table(terminal: Terminal, tmp_path: Path) -> None:
    board = terminal.board(1.0, 0.25)
    _follow(board, tmp_path / "trace.jsonl")
    terminal.truncate(0)
    terminal.seek(0)

    with board:
        board.follow(tmp_path / "next.jsonl", "equal")
        board.refresh()

    assert "here-" not in terminal.getvalue()
