"""``evenstride plan``: which machines to rent for a measured workload."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.arguments import StoreOption
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.cli.plan_request import PlanRequest, TrainingLength
    from evenstride.cli.start_files import FileRequest


_ONLINE = frozenset(
    {"online", "workers", "speeds", "usd_per_h", "folder", "probe_steps", "restore"}
)
_BOTH = frozenset({"runs", "epochs", "trained", "batches", "objective", "as_json", "store"})


def plan(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Profiles, or folders of runs, of one workload. Default: the stored ones of "
            "--script. With --online: -- SCRIPT ARGS."
        ),
    ] = None,
    catalog: Annotated[
        Path | None,
        typer.Option(help="Prices as CSV. Default: the dated prices that the package ships."),
    ] = None,
    usd_per_gib_h: Annotated[
        float | None,
        typer.Option(help="Price machines by memory instead: USD per GiB and hour, such as 0.004."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Epochs of the training at the script's own batch.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Longest time, such as 6h, 30m or 2d. Default unit: hours.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Highest cost in USD.")] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="time, cost or knee. Default: cost with a deadline, time with a budget, otherwise "
            "the knee of both."
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            min=0.5,
            max=0.99,
            help="Probability of keeping the limits. 0.5 is the expected case.",
        ),
    ] = 0.5,
    spot: Annotated[
        bool, typer.Option("--spot", help="Include spot machines, which may be preempted.")
    ] = False,
    batches: Annotated[
        str | None,
        typer.Option(help="Global batches to consider. Default: around the script's own."),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option(min=1, max=128, help="Largest number of machines in a cluster.")
    ] = 32,
    mixed: Annotated[bool, typer.Option(help="Allow two machine types in one cluster.")] = True,
    regions: Annotated[str, typer.Option(help="Regions to consider. Default: all.")] = "",
    types: Annotated[str, typer.Option(help="Machine types to consider. Default: all.")] = "",
    transfer: Annotated[
        bool, typer.Option(help="Estimate types that were not measured from one that was.")
    ] = True,
    links: Annotated[
        str | None,
        typer.Option("--links", help="Measured latency and bandwidth as MS:GBIT, such as 0.1:10."),
    ] = None,
    trained: Annotated[
        list[str] | None,
        typer.Option(
            help="A training that reached the target, as BATCH:EPOCHS. Two or more batches show "
            "how the epochs depend on the batch. Repeatable.",
            metavar="BATCH:EPOCHS",
        ),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="Loss that the training must reach. The given runs that reached it show the "
            "epochs at their batches."
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="Metric that must reach --target-loss, recorded by the script with "
            "Stride.mean(name=). The training loss replaces a loss that is not recorded."
        ),
    ] = "loss",
    types_of_run: Annotated[
        str,
        typer.Option(
            "--as",
            help="Type of a run's machines, or a comma-separated type for each worker. Not needed "
            "with a profile, whose times count instead.",
        ),
    ] = "",
    restart: Annotated[
        str,
        typer.Option(
            help="Time from a preemption until training continues, including the wait for another "
            "machine, or a list of equally likely times: 2m,30m,3h. Default: 2m.",
        ),
    ] = "",
    preemptions: Annotated[
        list[str] | None,
        typer.Option(
            help="Recorded preemptions or availability of spot machines, of one type or of all. "
            "docs/reference/catalogue.md describes the format. Repeatable.",
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
        typer.Option(help="Clouds whose prices gpuhunt fetches now: aws,gcp."),
    ] = "",
    write: Annotated[
        list[str] | None,
        typer.Option(
            help="Write a file that starts the cluster: slurm:FILE, jobset:FILE, trainjob:FILE "
            "(Kubeflow Trainer), kuberay:FILE or sky:FOLDER. Repeatable.",
            metavar="LAUNCHER:FILE",
        ),
    ] = None,
    job_name: Annotated[
        str | None, typer.Option(help="Name of the job in these files. Default: evenstride.")
    ] = None,
    sky: Annotated[
        Path | None,
        typer.Option(help="Folder for SkyPilot task files; the same as --write sky:FOLDER."),
    ] = None,
    kuberay: Annotated[
        Path | None,
        typer.Option(
            help="File for a RayJob of KubeRay, for scripts with Ray Train; the same as --write "
            "kuberay:FILE."
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            help="Script and arguments for the start commands. Default: the measured script."
        ),
    ] = None,
    store: StoreOption = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of time and cost.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Accept profiles that do not match, and CPU steps as those of the type's "
            "accelerator.",
        ),
    ] = False,
    online: Annotated[
        bool,
        typer.Option("--online", help="Train the script and search for workers and batch."),
    ] = False,
    workers: Annotated[
        str | None,
        typer.Option(help="With --online: numbers of workers to choose from, such as 1,2,4."),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            help="With --online: CPU limits of the workers, as fractions of a core, such as 1,0.5. "
            "Default: no limits."
        ),
    ] = None,
    usd_per_h: Annotated[
        float, typer.Option(help="With --online: price of a worker per hour. 1 counts hours.")
    ] = 1.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="With --online: folder of the run. An existing run continues."),
    ] = None,
    probe_steps: Annotated[
        int, typer.Option(min=5, help="With --online: steps to measure each configuration.")
    ] = 40,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore",
            help="With --online: start from the script's newest checkpoint, which stays unchanged.",
        ),
    ] = False,
    start: Annotated[
        bool,
        typer.Option(
            "--start",
            help="Start the plan: on this machine if it is one machine of no cloud, with --sky "
            "through SkyPilot.",
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Full search: compare only the clusters and batches of the given runs, at their "
            "measured steps.",
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print all notes on the figures, not only five.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the machines to rent for a measured workload, their number, and the global batch.

    Times come from profiles (evenstride profile), prices from a catalogue. Times and costs have
    95 % intervals. A cluster is in one place and has at most two machine types. The table shows
    candidates that clearly differ; --json has all. What was measured is kept in a store, and
    completes the plans of the same job and of similar ones.

    With --online, the script trains on this machine. The search for the number of workers and the
    batch runs during the training, and its steps count. It begins with what earlier searches of
    the same or a similar job have stored.

    Examples:
        evenstride plan profile.json --epochs 30

        evenstride plan profile.json --epochs 30 --explain

        evenstride plan profile.json --epochs 30 --deadline 6h --catalog prices.csv --spot

        evenstride plan t4.json a10g.json --epochs 90 --budget 40 --sky sky --script "train.py"

        evenstride plan t4.json a10g.json --epochs 90 --write slurm:train.sbatch

        evenstride plan runs/today --as g4dn.xlarge,g5.xlarge --trained 256:12 --trained 1024:17

        evenstride plan profile.json runs/256 runs/512 runs/1024 --target-loss 0.35

        evenstride plan --script "train.py --lr 0.1" --epochs 30

        evenstride plan runs/1x64 runs/1x256 runs/4x64 runs/4x256 --as box --full --target-loss 0.4

        evenstride plan --online --workers 1,2,4 --batches 64,256 --epochs 30 -- train.py --lr 0.1
    """
    _refuse_unrelated(context, online=online)
    if online:
        from evenstride.cli import plan_online

        search = plan_online.request_of(
            tuple(runs or ()),
            workers=workers,
            batches=batches,
            length=_length(epochs, trained, target_loss, metric),
            objective=objective,
            usd_per_h=usd_per_h,
            speeds=speeds,
            folder=folder,
            probe_steps=probe_steps,
            restore=restore,
        )
        plan_online.perform(search, store, as_json=as_json)
        return
    from evenstride.cli.plan_request import ClusterRequest, PlanRequest, PriceRequest, wishes_of

    request = PlanRequest(
        runs=tuple(map(Path, runs or ())),
        prices=PriceRequest(catalog, live, regions, types, usd_per_gib_h),
        length=_length(epochs, trained, target_loss, metric),
        spot=spot,
        batches=batches,
        clusters=ClusterRequest(max_nodes, mixed, full),
        transfer=transfer,
        links=links,
        types_of_run=types_of_run,
        restart=restart,
        force=force,
        preemptions=tuple(preemptions or ()),
        sync=sync,
        script=None if script is None else _words(script),
        store=store,
        wishes=wishes_of(objective, deadline, budget, confidence),
    )
    job = _job(write, sky, kuberay, job_name)
    _perform(request, job, plot, explain=explain, as_json=as_json, start=start)


def _length(
    epochs: float | None, trained: list[str] | None, target_loss: float | None, metric: str
) -> TrainingLength:
    from evenstride.cli.plan_request import TrainingLength

    return TrainingLength(epochs, tuple(trained or ()), target_loss, metric)


def _job(
    write: list[str] | None, sky: Path | None, kuberay: Path | None, job_name: str | None
) -> FileRequest:
    from evenstride.cli.start_files import file_request

    return file_request(write or (), sky, kuberay, job_name)


def _refuse_unrelated(context: typer.Context, *, online: bool) -> None:
    """Refuse options that have no effect with or without ``--online``."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if not given or name in _BOTH or (name in _ONLINE) == online:
            continue
        option = max(parameter.opts, key=len)
        if online:
            raise ConfigError(
                f"{option} is about machines to rent, but --online chooses among workers of this "
                "machine; leave one of the two out"
            )
        raise ConfigError(f"{option} needs --online; add --online, or leave {option} out")


def _perform(
    request: PlanRequest,
    job: FileRequest,
    plot: Path | None,
    *,
    explain: bool,
    as_json: bool,
    start: bool,
) -> None:
    from evenstride.cli import plan_inputs, plan_output
    from evenstride.cli.start_files import commands_to_start, write_start_files
    from evenstride.report.plan_text import check_plot, draw

    if start and as_json:
        raise ConfigError("--start prints what the script prints, so leave --json or --start out")
    if plot is not None:
        check_plot(plot)
    one = plan_inputs.planned_for(request, date.today())
    choice = one.plan.chosen.outlook.choice
    files = write_start_files(job, choice, one.command, one.variables, one.profile.torch)
    if plot is not None:
        draw(one.plan, plot)
    text = plan_output.as_json(one, files) if as_json else ""
    typer.echo(text or plan_output.text_of(one, files, explain=explain))
    if start:
        words = commands_to_start(choice, one.command, files)
        typer.echo(f"starting: {shlex.join(words)}")
        sys.stdout.flush()
        os.execvpe(words[0], words, {**os.environ, **one.variables})


def _words(script: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(script))
    except ValueError as error:
        raise ConfigError(f"--script is {script!r}: {error}; close the quotation") from None
    if not words:
        raise ConfigError(
            "--script is empty: expected a script and its arguments, such as 'train.py --lr 0.1'"
        )
    return words
