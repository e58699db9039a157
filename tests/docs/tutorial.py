"""The script of the tutorial, after each of its steps, as a reader makes it from the page."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "tutorials" / "two-unequal-gpus.md"
# The page's sizes, and those with which it is tested: as many epochs, of two steps each.
SMALL = {
    "nn.Linear(64, 1024)": "nn.Linear(64, 32)",
    "nn.Linear(1024, 1024)": "nn.Linear(32, 32)",
    "nn.Linear(1024, 10)": "nn.Linear(32, 10)",
    "(20_480": "(2_560",
    "16_384": "2_048",
    "every=20": "every=5",
}


def script(steps: int) -> str:
    """Return ``train.py`` with the changes of the first so many steps that change it, made small.

    Args:
        steps: 0 for the script as it begins, 1 for the balanced one, 2 with evaluation, 3 with
            checkpoints.
    """
    inside = list(blocks_of(PAGE))
    (text,) = (one.text for one in inside if one.language == "python")
    headings = [m.start() for m in re.finditer(r"^## ", PAGE.read_text(), re.MULTILINE)]
    lines = [PAGE.read_text().count("\n", 0, start) + 1 for start in headings]
    parts: dict[int, list[str]] = {}
    for one in inside:
        if one.language == "diff":
            parts.setdefault(sum(line < one.line for line in lines), []).append(one.text)
    for part in sorted(parts)[:steps]:
        for change in parts[part]:
            text = changed(text, change)
    for long, short in SMALL.items():
        text = text.replace(long, short)
    return text


def changed(text: str, change: str) -> str:
    """Return a text with a change of the page made, whose old lines must be there once."""
    lines = change.splitlines(keepends=True)
    old, new = (
        "".join(line[1:] or "\n" for line in lines if not line.startswith(sign)) for sign in "+-"
    )
    assert text.count(old) == 1, f"{text.count(old)} places for\n{change}"
    return text.replace(old, new)
