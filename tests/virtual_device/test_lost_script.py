"""A lost rank is named, and the others end, although their hosts hang, in ``.item()`` or later."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.ranks import started
from tests.virtual_device import lost_script
from tests.virtual_device.lost_script import VICTIM

WORLD_SIZE = 3
DEADLINE_S = 60.0  # a tenth of the watchdog's
STEP = 12
EVIDENCE = {"killed": "its process", "stopped": "no heartbeat for"}

pytestmark = pytest.mark.usefixtures("virtual_scripts")


def _survivors(
    folder: Path, fate: str, how: str, step: int, **variables: str
) -> dict[int, tuple[int, list[str]]]:
    """Return exit code and output of each survivor, all of which end before the deadline."""
    script, arguments = Path(lost_script.__file__), [fate, how, str(step)]
    with started(script, WORLD_SIZE, folder, arguments, **variables) as processes:
        end_s = time.monotonic() + DEADLINE_S
        codes = {
            rank: process.wait(max(0.0, end_s - time.monotonic()))
            for rank, process in enumerate(processes)
            if rank != VICTIM
        }
    return {
        rank: (code, (folder / f"rank-{rank}.log").read_text().splitlines())
        for rank, code in codes.items()
    }


def _ours(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("evenstride: ")]


@pytest.mark.parametrize(
    ("fate", "how", "step"),
    [
        ("killed", "ddp", STEP),
        ("stopped", "fsdp2", STEP),
        # In the opening, evenstride itself waits for the device before the next decision.
        ("killed", "runs ahead", 2),
    ],
)
def test_processes_whose_host_hangs_name_the_lost_rank_and_end(
    tmp_path: Path, fate: str, how: str, step: int
) -> None:
    silent = {"EVENSTRIDE_SILENT_S": "6"} if fate == "stopped" else {}
    survivors = _survivors(tmp_path, fate, how, step, TORCHELASTIC_RUN_ID="job", **silent)

    for rank, (code, lines) in survivors.items():
        if how == "runs ahead" and "closed" in lines:
            assert code == 0
            continue  # it asked for its next batch before it waited for the device
        # A host that runs ahead may hear of the loss while it still fetches the batch of the step.
        steps = (step - 1, step) if how == "runs ahead" else (step,)
        assert any(f"launched {one}" in lines for one in steps), "no collective stops the host"
        assert f"launched {step + 1}" not in lines
        assert (f"read {step - 1}" in lines) == (how != "runs ahead")
        assert f"read {step}" not in lines
        named, ended = _ours(lines)
        assert f"rank {VICTIM} is gone: {EVIDENCE[fate]}" in named
        assert any(f"rank {rank} cannot finish step {one} " in named for one in steps), named
        assert "this process ends so that its launcher can restart it" in ended
        assert code == 1


def test_a_program_that_hears_of_the_loss_closes_without_the_device(tmp_path: Path) -> None:
    survivors = _survivors(tmp_path, "killed", "runs ahead", STEP)

    for code, lines in survivors.values():
        assert (code, "closed" in lines) == (0, True), lines
        (named,) = _ours(lines)
        assert f"rank {VICTIM} is gone: its process" in named
