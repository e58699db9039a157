"""``evenstride plan``: which machines to rent for a measured workload."""

from __future__ import annotations

import shlex
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.cli.plan_request import PlanRequest


_ONLINE = frozenset(
    {"online", "workers", "speeds", "usd_per_h", "folder", "probe_steps", "restore"}
)
_BOTH = frozenset({"runs", "epochs", "batches", "objective", "as_json"})


def plan(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Profiles, or folders of runs of the same workload. With --online: -- SCRIPT ARGS."
        ),
    ],
    catalog: Annotated[
        Path | None,
        typer.Option(help="Prices, as CSV; the dated ones that are shipped, if not given."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Epochs that training lasts at the script's own batch.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Latest end, such as 6h, 30m or 2d; a number is hours.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Most that it may cost, in USD.")] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="time, cost or knee. If not given: cost with a deadline, time with a budget, and "
            "else the knee of both."
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            min=0.5,
            max=0.99,
            help="Probability with which limits are kept; 0.5 is the expected case.",
        ),
    ] = 0.5,
    spot: Annotated[
        bool, typer.Option("--spot", help="Plan with machines that may be taken away.")
    ] = False,
    batches: Annotated[
        str | None,
        typer.Option(help="Global batches to look at; about the script's own if not given."),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option(min=1, max=128, help="Most machines of a cluster.")
    ] = 32,
    mixed: Annotated[bool, typer.Option(help="Whether two types may be in one cluster.")] = True,
    regions: Annotated[str, typer.Option(help="Regions to look at; all if not given.")] = "",
    types: Annotated[str, typer.Option(help="Types to look at; all if not given.")] = "",
    transfer: Annotated[
        bool, typer.Option(help="Whether to carry times over to types that were not measured.")
    ] = True,
    links: Annotated[
        str | None,
        typer.Option("--links", help="Measured latency and bandwidth, as MS:GBIT, such as 0.1:10."),
    ] = None,
    trained: Annotated[
        list[str] | None,
        typer.Option(
            help="A training that reached the target, as BATCH:EPOCHS; two batches or more tell "
            "how epochs follow the batch. Can be given often.",
            metavar="BATCH:EPOCHS",
        ),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="Loss that training is to come to. The runs that did tell how many epochs it "
            "takes at their batches."
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="Name of the metric that is to come to --target-loss, as the script records it "
            "with Stride.mean(name=). For a loss that it does not record, the training loss is "
            "taken."
        ),
    ] = "loss",
    types_of_run: Annotated[
        str,
        typer.Option(
            "--as",
            help="Type of a run's machines; or one for each worker, by commas. Not needed beside a "
            "profile: the run's times do not count then.",
        ),
    ] = "",
    restart: Annotated[
        str,
        typer.Option(
            help="From the loss of a spot machine until training goes on, the wait for another one "
            "included; several equally likely ones by commas: 2m,30m,3h. 2m if not given.",
        ),
    ] = "",
    preemptions: Annotated[
        list[str] | None,
        typer.Option(
            help="Recorded losses or availability of spot machines, of a type or of all; see "
            "docs/reference/catalogue.md for what a file looks like. Can be given often.",
            metavar="FILE[:TYPE]",
        ),
    ] = None,
    sync: Annotated[
        str,
        typer.Option(
            help="bsp, or bsp-ps(servers=2) for parameter servers on the workers' machines."
        ),
    ] = "bsp",
    live: Annotated[
        str,
        typer.Option(help="Clouds to ask for today's prices, by commas, with gpuhunt: aws,gcp."),
    ] = "",
    sky: Annotated[
        Path | None, typer.Option(help="Folder to write SkyPilot's task files into.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            help="Script and arguments for the start lines; those that were measured, if not given."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of time and cost.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take profiles that do not fit together, and steps of a processor as those of the "
            "accelerator that their type has.",
        ),
    ] = False,
    online: Annotated[
        bool,
        typer.Option("--online", help="Train the script, and find workers and batch meanwhile."),
    ] = False,
    workers: Annotated[
        str | None,
        typer.Option(help="With --online: numbers of workers to choose from, such as 1,2,4."),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            help="With --online: speeds to limit the workers to, as parts of a core, such as "
            "1,0.5; as they are if not given."
        ),
    ] = None,
    usd_per_h: Annotated[
        float, typer.Option(help="With --online: price of a worker for an hour; 1 counts hours.")
    ] = 1.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="With --online: folder of the run; given again, it goes on from there."),
    ] = None,
    probe_steps: Annotated[
        int, typer.Option(min=5, help="With --online: steps by which a configuration is measured.")
    ] = 40,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore",
            help="With --online: start from the script's newest checkpoint, which is only read.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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
    _refuse_strangers(context, online=online)
    if online:
        from evenstride.cli import plan_online

        asked_online = plan_online.request_of(
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
        plan_online.perform(asked_online, as_json=as_json)
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


def _refuse_strangers(context: typer.Context, *, online: bool) -> None:
    """Refuse options that mean nothing for what is asked."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if not given or name in _BOTH or (name in _ONLINE) == online:
            continue
        option = max(parameter.opts, key=len)
        if online:
            raise ConfigError(
                f"{option} is about machines to rent, and --online chooses among workers of this "
                "one; leave one of both out"
            )
        raise ConfigError(f"{option} is for plan --online; add --online, or leave it out")


def _perform(asked: PlanRequest, sky: Path | None, plot: Path | None, *, as_json: bool) -> None:
    from evenstride.cli import plan_inputs, plan_output
    from evenstride.report.plan_text import check_plot, draw

    if plot is not None:
        check_plot(plot)
    one = plan_inputs.planned_for(asked, date.today())
    files = plan_output.write_sky(one, sky) if sky is not None else []
    if plot is not None:
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
