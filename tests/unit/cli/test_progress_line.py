"""How far a long command is: a bar on a terminal, elsewhere a line now and then on stderr."""

from __future__ import annotations

import io
import sys

import pytest

from evenstride.cli.live_progress import Advance
from tests.messages import check_message


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Advance(3, "runs", clock=iter([0.0, 1.0, 2.0, 3.0]).__next__) as advance:
        for _ in range(3):
            advance.begin("small, adaptive, lag 1")
            advance.step()

    assert tuple(capsys.readouterr()) == ("", "")


def test_a_long_one_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Advance(4, "runs", clock=iter([0.0, 9.0, 11.0, 20.0, 90.0]).__next__) as advance:
        for number in range(4):
            advance.begin(f"small, adaptive, lag {number}")
            advance.step()

    check_message(tuple(capsys.readouterr()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_says_what_it_is_about_while_that_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")

    with Advance(2, "runs") as advance:
        advance.begin("small, uniform")
        advance.step()
        advance.begin(f"a-cluster-{'x' * 60}, adaptive, lag 1")

    last = screen.getvalue().split("1/2")[-1].splitlines()[0]
    assert last.startswith(" runs, 0:00:0")
    assert " elapsed: a-cluster-" in last
    assert ", lag 1" in last and "…" in last
