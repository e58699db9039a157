"""Files that start a plan, one for each launcher, and the commands that use them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstride.errors import ConfigError
from evenstride.planner.jobset_file import jobset_file, trainjob_file
from evenstride.planner.kuberay_file import kuberay_file
from evenstride.planner.kubernetes_pods import IMAGE
from evenstride.planner.launch_files import skypilot_files
from evenstride.planner.node_groups import check_job_name
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.slurm_file import slurm_file

SKY = "sky"
"""The launcher with a folder of files, one for each type of machine."""

_FILES: Mapping[str, Callable[..., str]] = {
    "slurm": slurm_file,
    "jobset": jobset_file,
    "trainjob": trainjob_file,
    "kuberay": kuberay_file,
}
_USUAL_NAME = "evenstride"


@dataclass(frozen=True, slots=True)
class FileRequest:
    """The files to write."""

    places: tuple[tuple[str, Path], ...]  # a launcher and its file, or its folder
    name: str = _USUAL_NAME  # of the job


@dataclass(frozen=True, slots=True)
class StartFiles:
    """Files that were written for one launcher."""

    paths: tuple[Path, ...]
    lines: tuple[str, ...]  # commands that start them


def file_request(
    written: Sequence[str], sky: Path | None, kuberay: Path | None, name: str | None
) -> FileRequest:
    """Return the checked request of ``--write``, ``--sky``, ``--kuberay`` and ``--job-name``."""
    places = [_place(text) for text in written]
    places += [(SKY, sky)] if sky is not None else []
    places += [("kuberay", kuberay)] if kuberay is not None else []
    for at, (_, path) in enumerate(places):
        if path in (other for _, other in places[:at]):
            raise ConfigError(
                f"two files or folders to be written are {path}, and the second would replace the "
                "first; give each launcher a path of its own"
            )
    if name is not None:
        if not places:
            raise ConfigError(
                "--job-name needs a file to be written; add --write LAUNCHER:FILE, or leave "
                "--job-name out"
            )
        check_job_name(name)
    return FileRequest(tuple(places), name or _USUAL_NAME)


def _place(text: str) -> tuple[str, Path]:
    launcher, colon, path = text.partition(":")
    if launcher not in (SKY, *_FILES) or not (colon and path):
        raise ConfigError(
            f"--write is {text!r}; expected a launcher and a file, such as slurm:train.sbatch; the "
            f"launchers are {', '.join(sorted((SKY, *_FILES)))}; for torchrun the plan prints the "
            "commands, and Accelerate's launcher cannot start machines with different numbers of "
            "workers"
        )
    return launcher, Path(path)


def write_start_files(
    request: FileRequest,
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str],
    torch: str = "",
) -> list[StartFiles]:
    """Write the files.

    Raises:
        ConfigError: one cannot be written, or a launcher cannot start the cluster.
    """
    written = []
    for launcher, place in request.places:
        if launcher == SKY:
            texts = skypilot_files(choice, command, env, name=request.name, torch=torch)
            paths = [_write(place / name, text) for name, text in texts.items()]
            lines = _sky_lines(choice, paths)
        else:
            text = _FILES[launcher](choice, command, env, name=request.name)
            paths = [_write(place, text)]
            lines = _start_lines(launcher, shlex.quote(str(place)))
        written.append(StartFiles(tuple(paths), tuple(lines)))
    return written


def _write(file: Path, text: str) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file} ({error.strerror})") from None
    return file


def _start_lines(launcher: str, file: str) -> list[str]:
    if launcher == "slurm":
        return [f"sbatch {file}"]
    return [f"sed 's#image: {IMAGE}#image: (your image)#' {file} | kubectl apply -f -"]


def commands_to_start(
    choice: ClusterChoice, command: Sequence[str], files: Sequence[StartFiles]
) -> tuple[str, ...]:
    """Return the words that start a plan: on this machine, or as a SkyPilot task on a cloud.

    Raises:
        ConfigError: the plan has several machines, or a cloud's without a SkyPilot file.
    """
    (launch, *more), remedy = _sky_commands(files), "add --sky FOLDER"
    if launch and more:
        remedy = "add --no-mixed: the second task needs the address of the first"
    elif launch and shutil.which("sky") is None:
        remedy = "install SkyPilot, whose command sky is not found"
    elif launch:
        return (*launch, "--yes")
    elif choice.machines == 1 and not choice.place and not choice.spot:
        workers = f"--nproc-per-node={choice.kinds[0].workers}"
        return (sys.executable, "-m", "torch.distributed.run", "--standalone", workers, *command)
    elif not choice.place:
        remedy = "run the printed lines on the machines, or add --max-nodes 1"
    raise ConfigError(f"--start cannot start {choice.name} from here; {remedy}")


def _sky_commands(files: Sequence[StartFiles]) -> list[tuple[str, ...]]:
    """Return SkyPilot's commands, one for each task; an empty one without any."""
    lines = [line for file in files for line in file.lines if line.startswith("sky ")]
    return [tuple(shlex.split(line)) for line in lines] or [()]


def _sky_lines(choice: ClusterChoice, files: Sequence[Path]) -> list[str]:
    """Return the commands for SkyPilot, which replaces lost machines only in managed jobs."""
    if len(files) == 1:
        how = "sky jobs launch" if choice.spot else "sky launch"
        return [f"{how} {shlex.quote(str(file))}" for file in files]
    alone = (
        ["# two tasks: SkyPilot replaces lost machines only for a single task (--no-mixed)"]
        if choice.spot
        else []
    )
    return alone + [
        f"sky launch {'--env _EVENSTRIDE_HEAD=ADDRESS ' if number else ''}{shlex.quote(str(file))}"
        for number, file in enumerate(files)
    ]
