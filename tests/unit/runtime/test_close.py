"""The end of a run: its parts are closed once, in the process that it belongs to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import evenstride
from evenstride.runtime.session.model_watcher import ModelWatcher
from evenstride.trace.read import read_records
from tests.ending import run_to_end
from tests.unit.runtime.solo import Trainer, numbered

FORKED = """
import os, sys
import evenstride
from tests.unit.runtime.solo import Trainer, numbered

stride = evenstride.Stride(8, trace=sys.argv[1])
loader = stride.loader(numbered(64))
trainer = Trainer(stride)
trainer.epoch(loader, steps=2)
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
trainer.epoch(loader)
"""


def kinds(trace: Path) -> list[str]:
    """Return the kinds of a trace's records."""
    return [record["kind"] for record in read_records(trace)]


def test_each_part_is_closed_even_if_one_before_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    stride = evenstride.Stride(8, trace=tmp_path)
    Trainer(stride).epoch(stride.loader(numbered(64)))
    monkeypatch.setattr(ModelWatcher, "close", interrupted)

    with pytest.raises(KeyboardInterrupt):
        stride.close()

    assert kinds(tmp_path)[-1] == "ended"
    stride.close()  # nothing is left to do


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_end_the_run_of_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path / "trace")]
    root = Path(__file__).parents[3]
    code, output = run_to_end(command, 60.0, {"PYTHONPATH": f"{root / 'src'}:{root}"})

    assert code == 0, output
    assert kinds(tmp_path / "trace").count("ended") == 1
    assert kinds(tmp_path / "trace")[-1] == "ended"
