"""Commands that run a user's script leave the checkpoints of its training as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstride.errors import LaunchError
from evenstride.lab.profiling import Measuring, profile
from evenstride.runtime.launching.rank_environment import lone_rank
from tests.files import contents
from tests.multiproc import tried

SCRIPT = str(Path(tried.__file__))
COMMAND = "from evenstride.cli.main import main; main()"
LATER = "which is deleted afterwards"

pytestmark = pytest.mark.timeout(300)  # most tests start three processes, one after the other


def train(folder: Path | str, *arguments: str, **variables: str) -> str:
    """Train in one process of its own, as a user does; return what it said."""
    with lone_rank() as alone:
        done = subprocess.run(
            [sys.executable, SCRIPT, str(folder), *arguments],
            env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of a training that was interrupted after six steps."""
    folder = tmp_path / "saved"
    assert "starts at 0\n" in train(folder, EVENSTRIDE_MAX_STEPS="6")
    assert len(list(folder.glob("step-*"))) == 2
    return folder


def measuring(*arguments: str, restore: bool = False) -> Measuring:
    return Measuring((SCRIPT, *arguments), "box", (0.5, 1.0), 0.4, "2026-05-01", restore)


def test_a_profile_leaves_checkpoints_and_the_next_training_goes_on_from_them(saved: Path) -> None:
    before, reported = contents(saved), list[str]()

    found = profile(measuring(str(saved)), reported.append)

    # On a busy machine one of the sizes gets too few steps in its time, and is left out.
    assert {point.samples for point in found.devices[0].points} <= {16, 32}
    assert contents(saved) == before
    (line,) = reported
    assert line.startswith("Checkpoints of this run go to ")
    assert line.endswith(f"{LATER}; those in {saved} are not read or changed.")
    assert not Path(line.split(" go to ")[1].split(",")[0]).exists()
    assert "starts at 192\n" in train(saved), "that is where the training was interrupted"


def test_a_profile_starts_from_a_checkpoint_if_asked_which_it_only_reads(saved: Path) -> None:
    before, reported = contents(saved), list[str]()

    profile(measuring(str(saved), restore=True), reported.append)

    assert contents(saved) == before
    assert reported[0].endswith(f"those in {saved} are read, but not changed.")


def test_checkpoints_behind_a_url_are_left_by_a_profile(saved: Path) -> None:
    pytest.importorskip("fsspec")
    before, reported, url = contents(saved), list[str](), f"local://{saved}"

    profile(measuring(url), reported.append)

    assert contents(saved) == before
    assert reported[0].endswith(f"those in {url} are not read or changed.")
    assert "starts at 192\n" in train(url)


def test_a_calibration_by_hand_leaves_checkpoints(saved: Path) -> None:
    before = contents(saved)

    said = train(saved, EVENSTRIDE_CALIBRATE="0.5:0.1,1:0.1")

    assert "starts at 0\n" in said
    assert f"those in {saved} are not read or changed." in said
    assert contents(saved) == before


def test_a_file_that_a_script_saves_itself_is_named_and_not_overwritten(tmp_path: Path) -> None:
    reported, file = list[str](), tmp_path / "model.pt"

    profile(measuring(str(tmp_path / "saved"), str(file)), reported.append)

    assert reported[1] == (
        f"warning: the script itself saved {file} in a run that only measures; delete it, so "
        "that no training loads it"
    )
    before = contents(tmp_path)
    with pytest.raises(LaunchError, match=r"overwrites .*model\.pt, which is older than"):
        profile(measuring(str(tmp_path / "saved"), str(file)))
    assert contents(tmp_path) == before


def lab(
    folder: Path, *command: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    asked = ["--speeds", "0.4,0.4", "--policies", "uniform,adaptive", "--steps", "10"]
    more = ["--repeats", "1", "--out", "runs", *options, "--", SCRIPT, *command]
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "lab", *asked, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def starts(folder: Path) -> dict[str, set[str]]:
    """Return where the workers of each run of a lab said that they start."""
    return {
        log.parent.name: {line for line in log.read_text().splitlines() if "starts at" in line}
        for log in (folder / "runs").glob("*/*.log")
    }


def test_every_run_of_the_lab_starts_from_scratch(saved: Path, tmp_path: Path) -> None:
    before = contents(saved)

    done = lab(tmp_path, str(saved))

    assert done.returncode in (0, 3), done.stderr  # 3: the machine was disturbed
    assert contents(saved) == before
    began = starts(tmp_path)
    names = {"uniform-1", "adaptive-1", "calibration-before", "calibration-after"}
    assert names <= set(began)
    assert all(said == {"starts at 0"} for said in began.values())
    assert done.stderr.count("Checkpoints of this run go to") == 1
    assert f"{LATER}; those in {saved} are not read or changed." in done.stderr
    assert not list((tmp_path / "runs").glob("checkpoints-*"))


def test_every_run_of_the_lab_starts_from_the_same_checkpoint_if_asked(
    saved: Path, tmp_path: Path
) -> None:
    before = contents(saved)

    done = lab(tmp_path, str(saved), options=("--restore", "--no-calibrate"))

    assert done.returncode == 0, done.stderr
    assert contents(saved) == before
    assert starts(tmp_path) == {name: {"starts at 192"} for name in ("uniform-1", "adaptive-1")}


def test_runs_of_the_lab_do_not_load_what_another_one_saved(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"

    done = lab(tmp_path, "saved", str(file), options=("--no-calibrate",))

    assert done.returncode == 2
    assert f"the script loads {file}, which another run of this command has saved" in done.stderr
    assert f"warning: the script itself saved {file}" in done.stderr
