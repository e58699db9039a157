"""How far a long command is: a line now and then on stderr, where there is no terminal."""

from __future__ import annotations

import pytest

from evenstride.cli.progress import Advance


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Advance(3, "runs", clock=iter([0.0, 1.0, 2.0, 3.0]).__next__) as advance:
        for _ in range(3):
            advance.step("small, adaptive, lag 1")

    assert tuple(capsys.readouterr()) == ("", "")


def test_a_long_one_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Advance(4, "runs", clock=iter([0.0, 9.0, 11.0, 20.0, 90.0]).__next__) as advance:
        for number in range(4):
            advance.step(f"small, adaptive, lag {number}")

    assert tuple(capsys.readouterr()) == ("", "2 of 4 runs (small, adaptive, lag 1)\n")
