"""``evenstride lab``: a training script on local workers of given speeds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from evenstride.cli.arguments import read_modes, split_policies


def lab(
    command: Annotated[
        list[str],
        typer.Argument(help="Script and its arguments, after --.", metavar="-- SCRIPT ARGS"),
    ],
    speeds: Annotated[str, typer.Option(help="Speed of each worker, as a fraction of a core.")],
    policies: Annotated[
        str, typer.Option(help="Policies to compare, in the order in which they alternate.")
    ] = "uniform,adaptive",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps per run. The first 40 are the cold block.")
    ] = 120,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 2,
    change: Annotated[
        list[str] | None,
        typer.Option(help="Change of speed in each run, as STEP:SPEEDS or SECONDSs:SPEEDS."),
    ] = None,
    sync: Annotated[
        list[str] | None,
        typer.Option(
            help="Synchronisation modes to compare under every policy: bsp, bsp-ps, asp, "
            "'ssp(staleness=3)', 'local-sgd(every=8)', delayed. Default: the script's own."
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Measure true curves before and after, and run fixed splits.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for traces and logs. Default: runs/lab-TIME.")
    ] = None,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore",
            help="Start each run from the script's newest checkpoint, which stays unchanged.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a training script on local workers of given speeds, under several policies.

    torchrun starts one process per speed, each under a CPU limit. The script must use evenstride
    without policy= in its Stride, because the command sets EVENSTRIDE_POLICY. Every run starts
    from scratch: its Checkpointer writes to a temporary folder.

    With --sync, each mode runs under every policy. A table shows samples per second, waiting,
    staleness, and the shortest and longest step time of a worker, after 40 steps or half of a
    shorter run. The script must not set sync=, because the command sets EVENSTRIDE_SYNC.
    Parameter servers have no CPU limit.

    Examples:
        evenstride lab --speeds 1,0.5,0.25 -- examples/ddp.py

        evenstride lab --speeds 1,0.5 --policies dynamic-batching,adaptive -- train.py --lr 0.1

        evenstride lab --speeds 1,1 --change 60:1,0.4 --policies adaptive --no-calibrate -- train.py

        evenstride lab --speeds 1,0.5,0.2 --sync 'bsp,asp,ssp(staleness=3)' -- examples/ddp.py
    """
    from evenstride.cli.lab_output import compare_modes, conclude, perform, tell
    from evenstride.core.policies import policy_from_spec
    from evenstride.lab.comparison.lab_session import LabPlan
    from evenstride.lab.processes.speeds import parse_change, parse_speeds

    wanted, names = parse_speeds(speeds), split_policies(policies, "--policies")
    modes = read_modes(",".join(sync) if sync else None)
    for name in names:
        policy_from_spec(name)
    folder = out or Path("runs") / time.strftime("lab-%Y%m%d-%H%M%S")
    plan = LabPlan(
        command=tuple(command),
        speeds=wanted,
        policies=names,
        steps=steps,
        repeats=repeats,
        changes=tuple(parse_change(text, len(wanted)) for text in change or []),
        folder=folder.resolve(),
        calibrate=calibrate,
        modes=modes,
        restore=restore,
    )
    if modes:
        compare_modes(plan, as_json)
        return
    outcome, _ = perform(plan)
    conclude(outcome, tell, as_json)
