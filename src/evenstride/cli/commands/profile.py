"""``evenstride profile``: measure a workload on this machine for `evenstride plan`."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.arguments import StoreOption
from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.planner.workload.workload_profile import WorkloadProfile

_NO_TYPE = "this-machine"


def profile(
    command: Annotated[
        list[str],
        typer.Argument(help="Script and its arguments, after --.", metavar="-- SCRIPT ARGS"),
    ],
    type_: Annotated[
        str | None,
        typer.Option("--type", help="This machine's type in the catalogue, such as g5.xlarge."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Total time of measuring, without the start.")
    ] = 60.0,
    parts: Annotated[
        str, typer.Option(help="Sizes to measure, as fractions of the script's global batch.")
    ] = "1/16,1/8,1/4,1/2,1",
    out: Annotated[Path, typer.Option(help="File for the profile.")] = Path("profile.json"),
    restore: Annotated[
        bool,
        typer.Option(
            "--restore", help="Start from the script's newest checkpoint, which stays unchanged."
        ),
    ] = False,
    store: StoreOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the profile as one JSON object.")
    ] = False,
) -> None:
    """Measure the step times of a script on this machine, for evenstride plan.

    The script runs as one process on its own data and model, at several batch sizes. It must use
    evenstride and may create a process group of one rank. Measure other machine types there;
    evenstride plan merges the profiles. It refuses CPU times for a type with an accelerator. The
    script's checkpoints stay unchanged: its Checkpointer writes to a temporary folder. A copy of
    the profile goes into the store, where later plans find it.

    Examples:
        evenstride profile --type g5.xlarge -- train.py

        evenstride profile --seconds 20 --parts 1/4,1/2,1 --out cpu.json -- train.py --lr 0.1
    """
    from evenstride.cli import arguments
    from evenstride.cli.live_progress import waiting
    from evenstride.lab.processes.trial_checkpoints import require_script
    from evenstride.lab.profiling import Measuring
    from evenstride.lab.profiling import profile as measured
    from evenstride.planner.workload.workload_profile import write_profile

    require_script(command[0])
    _check_out(out)
    measuring = Measuring(
        command=tuple(command),
        type=type_ or _NO_TYPE,
        parts=arguments.parts(parts, "--parts"),
        seconds=seconds,
        made_on=time.strftime("%Y-%m-%d"),
        restore=restore,
    )
    with waiting("measuring", seconds) as watch:
        found = measured(measuring, lambda line: say(line, err=True), watch)
    write_profile(found, out)
    for doubt in (*doubts(found), *_kept(found, store)):
        say(f"warning: {doubt}", err=True)
    typer.echo(found.model_dump_json() if as_json else tell(found, out))


def _check_out(out: Path) -> None:
    """Refuse a file in a folder that does not exist, before measuring."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out is {out}, but the folder {out.parent} does not exist; create it, or name "
            "another file"
        )


def _kept(found: WorkloadProfile, given: str | None) -> list[str]:
    """Store a profile for later plans; return why not."""
    from evenstride.planner.catalogue.catalogue_reader import shipped_catalogue
    from evenstride.planner.caveats import of_accelerator
    from evenstride.planner.workload.model_store import keep, store_folder

    folder = store_folder(given, os.environ)
    if folder is None or any(of_accelerator(one, shipped_catalogue()) for one in found.devices):
        return []
    try:
        file = keep(found, folder)
    except ConfigError as error:
        return [str(error)]
    if file is not None:
        say(f"stored {file}", err=True)
    return []


def doubts(found: WorkloadProfile) -> list[str]:
    """Return the reasons to refuse or doubt a profile, one sentence each."""
    from evenstride.planner.catalogue.catalogue_reader import shipped_catalogue
    from evenstride.planner.caveats import of_accelerator, of_device

    catalogue = shipped_catalogue()
    refusals = [why for device in found.devices if (why := of_accelerator(device, catalogue))]
    return refusals + [doubt for device in found.devices for doubt in of_device(device)]


def tell(found: WorkloadProfile, out: Path) -> str:
    from evenstride.planner.workload.step_time import fitted

    lines = [
        f"{found.script}: {found.model.parameters:,} parameters, {found.samples:,} samples, "
        f"global batch {found.global_batch}, torch {found.torch}"
    ]
    for device in found.devices:
        lines.append(f"\n{device.type}{f' ({device.device})' if device.device else ''}")
        lines += [
            f"{point.samples:>10} samples{point.step_s * 1e3:>10.1f} ms"
            f"{point.samples / point.step_s:>10.0f} samples/s   scatter {point.scatter:.1%}"
            for point in device.points
        ]
        curve = fitted(device.points)
        lines.append(
            f"  a step takes {curve.fixed_s * 1e3:.2f} ms plus {curve.per_sample_s * 1e6:.2f} us "
            f"per sample, within {curve.error:.1%}"
        )
        if device.most_samples is not None:
            lines.append(f"  more than {device.most_samples} samples do not fit into memory")
    return "\n".join([*lines, f"\nprofile {out}", *_next(found, out)])


def _next(found: WorkloadProfile, out: Path) -> list[str]:
    from evenstride.planner.catalogue.catalogue_reader import shipped_catalogue
    from evenstride.planner.caveats import nearest_types, of_accelerator

    catalogue, (device, *_) = shipped_catalogue(), found.devices
    plan = f"evenstride plan {shlex.quote(str(out))} --epochs N"
    if of_accelerator(device, catalogue):
        return ["next: measure on the accelerator; evenstride plan refuses this profile"]
    if any(offer.instance_type == device.type for offer in catalogue.offers):
        return [f"next: {plan}"]
    command = f"next: {plan} --catalog F, with a CSV of type,price that has {device.type}"
    if device.type == _NO_TYPE:
        return [f"{command}; or measure again with --type and this machine's type"]
    missing = f"the shipped catalogue does not have it ({nearest_types(device.type, catalogue)})"
    return [f"{command}; {missing}"]
