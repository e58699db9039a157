"""The script of the tutorials, after each of their changes, as a reader makes it from the pages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.blocks import ROOT, blocks_of

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = (TUTORIALS / "two-unequal-gpus.md", TUTORIALS / "evaluate-and-resume.md")
SPOT = TUTORIALS / "spot-nodes.md"
# The pages' sizes, and those with which they are tested: as many epochs, of two steps each.
SMALL = {
    "nn.Linear(64, 1024)": "nn.Linear(64, 32)",
    "nn.Linear(1024, 1024)": "nn.Linear(32, 32)",
    "nn.Linear(1024, 10)": "nn.Linear(32, 10)",
    "16_384": "2_048",
    "4_096": "512",
    "every=20": "every=5",
}


def script(steps: int) -> str:
    """Return ``train.py`` after the first so many changes, made small.

    Args:
        steps: 0 for the script as it begins, 1 for the balanced one, 2 with evaluation, 3 with
            checkpoints, 4 as for spot nodes.
    """
    balanced, _ = _diffs(PAGES[0])
    return _small(_changed(_start(), [balanced, *_diffs(PAGES[1]), *_diffs(SPOT)][:steps]))


def script_for_gpus() -> str:
    """Return the balanced script for two GPUs."""
    return _changed(_start(), _diffs(PAGES[0]))


def _start() -> str:
    (text,) = (one.text for one in blocks_of(PAGES[0]) if one.language == "python")
    return text


def _diffs(page: Path) -> list[str]:
    return [one.text for one in blocks_of(page) if one.language == "diff"]


def _small(text: str) -> str:
    for long, short in SMALL.items():
        text = text.replace(long, short)
    return text


def _changed(text: str, diffs: list[str]) -> str:
    """Return a text with the diffs of a page made, whose old lines must be there once."""
    for hunk in (hunk for diff in diffs for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)):
        lines = hunk.splitlines(keepends=True)
        old, new = (
            "".join(line[1:] or "\n" for line in lines if not line.startswith(sign))
            for sign in "+-"
        )
        assert text.count(old) == 1, f"{text.count(old)} places for\n{hunk}"
        text = text.replace(old, new)
    return text
