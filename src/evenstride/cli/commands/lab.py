"""``evenstride lab``: a training script on local workers of chosen speeds."""

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
    speeds: Annotated[str, typer.Option(help="Speed of each worker, as a fraction of one core.")],
    policies: Annotated[
        str, typer.Option(help="Policies to compare; every other round reverses their order.")
    ] = "uniform,adaptive",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps per run; the figures leave out the first 40.")
    ] = 120,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds; each policy runs once per round.")
    ] = 2,
    change: Annotated[
        list[str] | None,
        typer.Option(help="Change of speed in each run, as STEP:SPEEDS or SECONDSs:SPEEDS."),
    ] = None,
    sync: Annotated[
        list[str] | None,
        typer.Option(
            help="Synchronisation modes to compare, each under every policy: bsp, bsp-ps, asp, "
            "'ssp(staleness=3)', 'local-sgd(every=8)', delayed; by default the script's own."
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Measure the workers before and after, and run fixed splits.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for traces and logs; runs/lab-TIME by default.")
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
    """Run a training script on local workers of chosen speeds, under several policies.

    torchrun starts one process per speed, each under a CPU limit. The script must use evenstride
    and leave out policy= in its Stride, because EVENSTRIDE_POLICY sets the policy. Every run starts
    from scratch: its Checkpointer writes to a temporary folder in the --out folder, which is
    deleted afterwards.

    Speed-up, bound and efficiency come with 95 % intervals, from pairs of blocks of 20 steps. More
    --repeats make them narrower. The exit code is 3 if an interval is wider than +-10 %.

    With --sync, the lab runs each mode under every policy. A table shows samples per second,
    waiting time, staleness, and the workers' shortest and longest update periods, after 40 steps
    or half of a shorter run. The script must leave out sync=, because EVENSTRIDE_SYNC sets
    the mode. Parameter servers have no CPU limit.

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
