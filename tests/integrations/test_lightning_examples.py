"""The examples for Lightning, run as users run them: two workers come to what one does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from tests.ending import run_to_end

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 110.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
SMALL = ("--accelerator", "cpu", "--width", "16", "--epochs", "2", "--global-batch", "128")
UNEQUAL = {"EVENSTRIDE_POLICY": "static:96,32"}


def output_of(
    name: str, *arguments: object, launcher: tuple[str, ...] = (), **variables: str
) -> str:
    """Return what an example prints, which must end well."""
    command = [
        sys.executable,
        *launcher,
        str(EXAMPLES / f"{name}.py"),
        *SMALL,
        *map(str, arguments),
    ]
    code, output = run_to_end(command, DEADLINE_S, variables)
    assert code == 0, output
    return output


def by_torchrun(name: str, *arguments: object, **variables: str) -> str:
    launcher = (*TORCHRUN, "--nproc-per-node=2")
    return output_of(name, *arguments, launcher=launcher, **UNEQUAL, **variables)


def results(output: str) -> list[float]:
    """Return the losses and accuracies of the epochs."""
    found = re.findall(r"(?:test|validation) loss ([\d.]+), accuracy ([\d.]+)", output)
    return [float(number) for pair in found for number in pair]


@pytest.mark.parametrize("name", ["lightning_trainer", "lightning_fabric"])
def test_an_example_comes_to_the_same_on_two_workers_and_after_a_break(
    tmp_path: Path, name: str
) -> None:
    saved = ("--checkpoint", tmp_path / "saved", "--save-every", 15)

    alone = results(output_of(name, "--batch-size", 128))
    cut = by_torchrun(name, "--batch-size", 64, *saved, EVENSTRIDE_MAX_STEPS="16")
    rest = output_of(name, "--batch-size", 64, *saved)

    assert len(alone) == 4
    assert alone[2] < alone[0]
    assert results(cut)[:2] + results(rest) == pytest.approx(alone, abs=2e-4)


def test_a_trainer_starts_its_processes_itself() -> None:
    output = output_of(
        "lightning_trainer",
        "--batch-size",
        64,
        launcher=(),
        LOCAL_WORLD_SIZE="2",
        WORLD_SIZE="2",
        **UNEQUAL,
    )

    assert "on 2 worker(s)" in output
    assert results(output) == pytest.approx(
        results(output_of("lightning_trainer", "--batch-size", 128)), abs=2e-4
    )
