"""Prose on a terminal is broken between words, and stays whole elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.cli.terminal_text import say, wrapped
from tests.messages import check_message

TEXT = st.text(alphabet="ab- /\n", max_size=200)


@given(TEXT, st.integers(1, 30))
def test_only_spaces_become_line_ends(text: str, columns: int) -> None:
    there = wrapped(text, columns)

    assert there.split() == text.split()
    assert all(len(line) <= columns or " " not in line for line in there.split("\n"))


@given(TEXT)
def test_what_fits_stays_as_it_is(text: str) -> None:
    assert wrapped(text, 200) == text


def test_lines_are_as_full_as_they_can_be() -> None:
    words = [f"word{number}" for number in range(40)]

    lines = wrapped(" ".join(words), 30).split("\n")

    assert all(len(f"{one} {other.split()[0]}") > 30 for one, other in pairwise(lines))


def test_names_with_hyphens_stay_whole() -> None:
    assert wrapped("see adaptive-run here", 10) == "see\nadaptive-run\nhere"


def test_what_a_terminal_would_act_on_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    say("esc\x1b]0;t\x07pf\nand on", err=True)

    check_message(capsys.readouterr().err)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_short_lines_and_a_pipe_whole_ones(columns: int) -> None:
    command = [sys.executable, "-m", "evenstride", "estimate", "1,1,0.4"]
    whole = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    leader, follower = os.openpty()
    environment = {**os.environ, "COLUMNS": str(columns)}
    subprocess.run(command, stdout=follower, env=environment, timeout=60, check=True)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode().replace("\r\n", "\n")
    os.close(leader)

    sentence = whole.strip().split("\n")[-1]
    assert len(sentence) > 80
    assert wrapped(sentence, columns) in shown
    assert "\n" in wrapped(sentence, columns)
