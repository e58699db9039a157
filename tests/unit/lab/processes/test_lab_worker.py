"""The real worker under the real torchrun, once: what a script sees, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evenstride._version import __version__
from evenstride.errors import LaunchError
from evenstride.lab.processes.local_launch import Launch, run
from tests.unit.lab.fake_runs import SpyLimits

SCRIPT = """
import json, os, sys
slow = ("torch", "torch._dynamo", "evenstride.runtime.stride")
loaded = all(name in sys.modules for name in slow)
import neighbour
import torch

def deep(level):
    if level == 0:
        raise ValueError(f"the reason is {neighbour.REASON}")
    deep(level - 1)

facts = {
    "name": __name__, "arguments": sys.argv[1:], "loaded": loaded,
    "threads": torch.get_num_threads(), "leads": os.getpgid(0) == os.getpid(),
    "world": os.environ["WORLD_SIZE"], "pid": os.getpid(),
}
with open(sys.argv[1], "w") as file:
    json.dump(facts, file)
deep(3)
"""


@dataclass(frozen=True)
class Failed:
    """A run of the script above, which fails after it has recorded its surroundings."""

    facts: dict[str, Any]
    error: LaunchError
    limits: SpyLimits
    path: str


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """The one run that the tests here look at, because torch takes seconds to import."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("REASON = 42\n")
    limits, path = SpyLimits(), str(folder / "facts.json")
    launch = Launch((str(folder / "train.py"), path, "--lr"), (1.0,), deadline_s=100.0)
    with pytest.raises(LaunchError) as caught:
        run(launch, limits, folder / "logs")
    return Failed(json.loads(Path(path).read_text()), caught.value, limits, path)


def test_a_script_runs_as_the_main_program_with_its_arguments_and_neighbours(
    failed: Failed,
) -> None:
    assert failed.facts["name"] == "__main__"
    assert failed.facts["arguments"] == [failed.path, "--lr"]
    assert failed.facts["world"] == "1"


def test_a_script_finds_the_slow_imports_done_and_one_thread(failed: Failed) -> None:
    assert failed.facts["loaded"] is True
    assert failed.facts["threads"] == 1


def test_the_worker_itself_is_limited_and_leads_a_process_group(failed: Failed) -> None:
    assert failed.facts["leads"] is True
    assert failed.limits.joined == [(0, failed.facts["pid"])]


def test_the_message_of_a_failed_script_reaches_the_user(failed: Failed) -> None:
    last = str(failed.error).splitlines()[-1]
    assert last.endswith("ValueError: the reason is 42"), "torchrun's own report is left out"


def test_a_module_runs_guarded_as_the_main_program() -> None:
    command = [
        sys.executable,
        "-m",
        "evenstride.runtime.launching.die_with_parent",
        "-m",
        "evenstride",
        "--version",
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)

    assert (done.returncode, done.stdout) == (0, f"evenstride {__version__}\n"), done.stderr
