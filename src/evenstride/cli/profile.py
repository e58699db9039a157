"""``evenstride profile``: measure a workload on this machine, for plans."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from evenstride.planner.workload import Profile

_UNSURE = 0.1

_Command = Annotated[
    list[str],
    typer.Argument(help="Script and its arguments, after --.", metavar="-- SCRIPT ARGS"),
]
_Type = Annotated[
    str | None,
    typer.Option("--type", help="This machine's type, as the catalogue names it: g5.xlarge."),
]
_Seconds = Annotated[float, typer.Option(min=1, help="To measure in all, after starting.")]
_Parts = Annotated[
    str, typer.Option(help="Sizes to measure, as parts of the script's global batch.")
]
_Out = Annotated[Path, typer.Option(help="File for the profile.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")]


def profile(
    command: _Command,
    type_: _Type = None,
    seconds: _Seconds = 60.0,
    parts: _Parts = "1/16,1/8,1/4,1/2,1",
    out: _Out = Path("profile.json"),
    as_json: _AsJson = False,
) -> None:
    """Measure how long steps of a script take on this machine, and store it for evenstride plan.

    The script runs as one process, on its own data and model, at several batch sizes, and ends.
    It must use evenstride, and may make a process group of one. Profiles of other machines are
    measured there; evenstride plan puts them together.

    Examples:
        evenstride profile --type g5.xlarge -- train.py

        evenstride profile --seconds 20 --parts 1/4,1/2,1 --out cpu.json -- train.py --lr 0.1
    """
    from evenstride.cli import quantities
    from evenstride.cli.progress import waiting
    from evenstride.lab.profiling import Measuring
    from evenstride.lab.profiling import profile as measured
    from evenstride.planner.workload import write_profile

    measuring = Measuring(
        command=tuple(command),
        type=type_ or "this-machine",
        parts=quantities.parts(parts, "--parts"),
        seconds=seconds,
        made_on=time.strftime("%Y-%m-%d"),
    )
    with waiting("measuring", seconds) as watch:
        found = measured(measuring, lambda line: typer.echo(line, err=True), watch)
    write_profile(found, out)
    typer.echo(found.model_dump_json() if as_json else tell(found, out))


def tell(found: Profile, out: Path) -> str:
    """Return a profile as people read it."""
    from evenstride.planner.curves import fitted

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
            f"  a step takes {curve.fixed_s * 1e3:.2f} ms and {curve.per_sample_s * 1e6:.2f} us a "
            f"sample, to within {curve.error:.1%}"
        )
        if curve.error > _UNSURE:
            lines.append("  that is much: was the machine at other work, or throttled?")
        if device.most_samples is not None:
            lines.append(f"  more than {device.most_samples} samples did not fit")
    return "\n".join([*lines, f"\nprofile {out}; next: evenstride plan {out} --epochs N"])
