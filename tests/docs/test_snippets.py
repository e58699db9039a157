"""The Python of the pages runs, on two processes; what does not run here says where, or why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from evenstride.testing import RankPool
from tests.docs.blocks import ROOT, Block, blocks, shown
from tests.docs.snippets import run_snippet, taken_for_granted
from tests.docs.table import SNIPPETS_CHANGED, SNIPPETS_ELSEWHERE, SNIPPETS_NOT_RUN

# A run to look at, as pages on traces take one for granted.
RECORD = """
stride = evenstride.Stride(global_batch=64, trace="runs/today", noise_every=2)
for x, y in (loader := stride.loader(dataset)):
    loss = F.cross_entropy(model(x), y)
    stride.scale(loss).backward()
    optimizer.step(); optimizer.zero_grad()
stride.mean(loss.item() * 32, 32, name="loss")
"""


def _named() -> dict[str, Block]:
    """Return each snippet by page and first line, with a number where two begin alike."""
    seen, found = Counter[str](), {}
    for one in blocks("python"):
        seen[one.where] += 1
        found[one.where + (f"#{seen[one.where]}" if seen[one.where] > 1 else "")] = one
    return found


SNIPPETS = _named()
HERE = {
    name: one
    for name, one in SNIPPETS.items()
    if not {one.page, name} & SNIPPETS_ELSEWHERE.keys() and name not in SNIPPETS_NOT_RUN
}


SHOWN = {one: text for one, text in shown().items() if "print(" in one.text}


@pytest.fixture(scope="module")
def recorded(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recorded run in it."""
    here = tmp_path_factory.mktemp("snippets")
    ranks.run(run_snippet, 2, str(here), RECORD, "record")
    return here


@pytest.fixture(autouse=True)
def few_epochs() -> Iterator[None]:
    with patch.dict("os.environ", {"EVENSTRIDE_EPOCHS": "1"}):
        yield


@pytest.mark.parametrize("name", HERE, ids=list(HERE))
def test_it_runs(name: str, ranks: RankPool, recorded: Path, tmp_path: Path) -> None:
    block = HERE[name]
    old, new = SNIPPETS_CHANGED.get(name, ("", ""))
    assert old in block.text

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "today").symlink_to(recorded / "runs" / "today")
    both = ranks.run(run_snippet, 2, str(tmp_path), block.text.replace(old, new), name)

    printed, steps = both[0]
    if "optimizer.step()" in block.text and "for " in block.text:
        assert steps > 0
    if block in SHOWN:
        assert printed == SHOWN[block]


def test_the_tables_name_only_what_is_there() -> None:
    known = {*SNIPPETS_ELSEWHERE, *SNIPPETS_NOT_RUN, *SNIPPETS_CHANGED}

    assert sorted(known - {one.page for one in SNIPPETS.values()} - SNIPPETS.keys()) == []
    assert all(SNIPPETS_NOT_RUN.values()), "each has its reason"


@pytest.mark.parametrize("name", SNIPPETS_ELSEWHERE)
def test_the_test_that_runs_it_is_there(name: str) -> None:
    path, words = SNIPPETS_ELSEWHERE[name]

    assert words in (ROOT / path).read_text()


def test_what_a_snippet_takes_for_granted_is_found_out() -> None:
    text = "import math\nx = math.pi\nfor a, b in loader:\n    f(a, [c for c in b])\nnet = g(net)\n"

    assert taken_for_granted(text) == ["loader", "f", "g", "net"]
