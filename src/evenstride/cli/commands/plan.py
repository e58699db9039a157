"""``evenstride plan``: which machines to rent for a measured workload."""

from __future__ import annotations

import shlex
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.commands import online as by_training
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.cli.plan_request import PlanRequest

_Runs = Annotated[
    list[str],
    typer.Argument(
        help="Profiles, or folders of runs of the same workload. With --online: -- SCRIPT ARGS."
    ),
]
_Catalog = Annotated[
    Path | None, typer.Option(help="Prices, as CSV; the dated ones that are shipped, if not given.")
]
_Epochs = Annotated[
    float | None, typer.Option(help="Epochs that training lasts at the script's own batch.")
]
_Deadline = Annotated[
    str | None, typer.Option(help="Latest end, such as 6h, 30m or 2d; a number is hours.")
]
_Budget = Annotated[float | None, typer.Option(help="Most that it may cost, in USD.")]
_Objective = Annotated[
    str | None,
    typer.Option(
        help="time, cost or knee. If not given: cost with a deadline, time with a budget, and else "
        "the knee of both."
    ),
]
_Confidence = Annotated[
    float,
    typer.Option(
        min=0.5, max=0.99, help="Probability with which limits are kept; 0.5 is the expected case."
    ),
]
_Spot = Annotated[bool, typer.Option("--spot", help="Plan with machines that may be taken away.")]
_Batches = Annotated[
    str | None, typer.Option(help="Global batches to look at; about the script's own if not given.")
]
_MaxNodes = Annotated[int, typer.Option(min=1, max=128, help="Most machines of a cluster.")]
_Mixed = Annotated[bool, typer.Option(help="Whether two types may be in one cluster.")]
_Regions = Annotated[str, typer.Option(help="Regions to look at; all if not given.")]
_Types = Annotated[str, typer.Option(help="Types to look at; all if not given.")]
_Transfer = Annotated[
    bool, typer.Option(help="Whether to carry times over to types that were not measured.")
]
_Links = Annotated[
    str | None,
    typer.Option("--links", help="Measured latency and bandwidth, as MS:GBIT, such as 0.1:10."),
]
_Trained = Annotated[
    list[str] | None,
    typer.Option(
        help="A training that reached the target, as BATCH:EPOCHS; two batches or more tell how "
        "epochs follow the batch. Can be given often.",
        metavar="BATCH:EPOCHS",
    ),
]
_TargetLoss = Annotated[
    float | None,
    typer.Option(
        help="Loss that training is to come to. The runs that did tell how many epochs it takes at "
        "their batches."
    ),
]
_Metric = Annotated[
    str,
    typer.Option(
        help="Name of the metric that is to come to --target-loss, as the script records it with "
        "Stride.mean(name=). For a loss that it does not record, the training loss is taken."
    ),
]
_As = Annotated[
    str,
    typer.Option(
        "--as",
        help="Type of a run's machines; or one for each worker, by commas. Not needed beside a "
        "profile: the run's times do not count then.",
    ),
]
_Restart = Annotated[
    str,
    typer.Option(
        help="From the loss of a spot machine until training goes on, the wait for another one "
        "included; several equally likely ones by commas: 2m,30m,3h. 2m if not given.",
    ),
]
_Preemptions = Annotated[
    list[str] | None,
    typer.Option(
        help="Recorded losses or availability of spot machines, of a type or of all; see "
        "docs/catalogue.md for what a file looks like. Can be given often.",
        metavar="FILE[:TYPE]",
    ),
]
_Sync = Annotated[
    str,
    typer.Option(help="bsp, or bsp-ps(servers=2) for parameter servers on the workers' machines."),
]
_Live = Annotated[
    str, typer.Option(help="Clouds to ask for today's prices, by commas, with gpuhunt: aws,gcp.")
]
_Sky = Annotated[Path | None, typer.Option(help="Folder to write SkyPilot's task files into.")]
_Script = Annotated[
    str | None,
    typer.Option(
        help="Script and arguments for the start lines; those that were measured, if not given."
    ),
]
_Plot = Annotated[Path | None, typer.Option(help="File for a plot of time and cost.")]
_Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Take profiles that do not fit together, and steps of a processor as those of the "
        "accelerator that their type has.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def plan(
    context: typer.Context,
    runs: _Runs,
    catalog: _Catalog = None,
    epochs: _Epochs = None,
    deadline: _Deadline = None,
    budget: _Budget = None,
    objective: _Objective = None,
    confidence: _Confidence = 0.5,
    spot: _Spot = False,
    batches: _Batches = None,
    max_nodes: _MaxNodes = 32,
    mixed: _Mixed = True,
    regions: _Regions = "",
    types: _Types = "",
    transfer: _Transfer = True,
    links: _Links = None,
    trained: _Trained = None,
    target_loss: _TargetLoss = None,
    metric: _Metric = "loss",
    types_of_run: _As = "",
    restart: _Restart = "",
    preemptions: _Preemptions = None,
    sync: _Sync = "bsp",
    live: _Live = "",
    sky: _Sky = None,
    script: _Script = None,
    plot: _Plot = None,
    force: _Force = False,
    online: by_training.Online = False,
    workers: by_training.Workers = None,
    speeds: by_training.Speeds = None,
    usd_per_h: by_training.Price = 1.0,
    folder: by_training.Folder = None,
    probe_steps: by_training.ProbeSteps = 40,
    restore: by_training.Restore = False,
    as_json: _AsJson = False,
) -> None:
    """Say which machines to rent for a measured workload, how many, and at which batch.

    Times come from profiles (evenstride profile), prices from a catalogue. Every figure has a 95 %
    interval. Clusters are in one place; of two types at most, balanced.

    With --online the script is trained on this machine, and the number of workers and the batch
    are found while it trains: what is trained meanwhile counts.

    Examples:
        evenstride plan profile.json --epochs 30

        evenstride plan profile.json --epochs 30 --deadline 6h --catalog prices.csv --spot

        evenstride plan t4.json a10g.json --epochs 90 --budget 40 --sky sky --script "train.py"

        evenstride plan runs/today --as g4dn.xlarge,g5.xlarge --trained 256:12 --trained 1024:17

        evenstride plan profile.json runs/256 runs/512 runs/1024 --target-loss 0.35

        evenstride plan --online --workers 1,2,4 --batches 64,256 --epochs 30 -- train.py --lr 0.1
    """
    by_training.check(context, online=online)
    if online:
        asked_online = by_training.request_of(
            tuple(runs),
            workers=workers,
            batches=batches,
            epochs=epochs,
            objective=objective,
            usd_per_h=usd_per_h,
            speeds=speeds,
            folder=folder,
            probe_steps=probe_steps,
            restore=restore,
        )
        by_training.perform(asked_online, as_json=as_json)
        return
    from evenstride.cli.plan_request import PlanRequest, TrainingLength, wishes_of

    asked = PlanRequest(
        runs=tuple(map(Path, runs)),
        catalog=catalog,
        length=TrainingLength(epochs, tuple(trained or ()), target_loss, metric),
        spot=spot,
        batches=batches,
        max_nodes=max_nodes,
        mixed=mixed,
        regions=regions,
        types=types,
        transfer=transfer,
        links=links,
        types_of_run=types_of_run,
        restart=restart,
        live=live,
        force=force,
        preemptions=tuple(preemptions or ()),
        sync=sync,
        script=None if script is None else _words(script),
        wishes=wishes_of(objective, deadline, budget, confidence),
    )
    _perform(asked, sky, plot, as_json=as_json)


def _perform(asked: PlanRequest, sky: Path | None, plot: Path | None, *, as_json: bool) -> None:
    """Make the plan, write what is to be written of it, and print it."""
    from evenstride.cli import plan_inputs, plan_output

    if plot is not None:
        _check_plot(plot)
    one = plan_inputs.planned_for(asked, date.today())
    files = plan_output.write_sky(one, sky) if sky is not None else []
    if plot is not None:
        from evenstride.report.plan_text import draw

        draw(one.plan, plot)
    typer.echo(plan_output.as_json(one, files) if as_json else plan_output.tell(one, files))


def _words(script: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(script))
    except ValueError as error:
        raise ConfigError(f"--script is {script!r}: {error}; close what is quoted") from None
    if not words:
        raise ConfigError(
            "--script is empty; give the script and its arguments, such as 'train.py --lr 0.1', or "
            "leave it out"
        )
    return words


def _check_plot(path: Path) -> None:
    from evenstride.report.plan_text import check_plot

    check_plot(path)
