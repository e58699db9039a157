"""``evenstride plan --online``: search for workers and batch while a script trains."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from evenstride._version import __version__
from evenstride.cli import arguments
from evenstride.cli.plan_request import TrainingLength, installed_torch, training_of
from evenstride.cli.terminal_text import say
from evenstride.core.convergence.batch_laws import MeasuredTraining, fit_best
from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import ConfigError
from evenstride.lab.online.online_search import search
from evenstride.lab.online.search_journal import CHECKPOINTS, OnlineRequest, OnlineResult
from evenstride.lab.processes.speeds import parse_speeds
from evenstride.planner.online_forecast import OnlineForecast
from evenstride.planner.online_store import FOLDER, SearchStore, worker_types
from evenstride.planner.search.selection import Objective
from evenstride.planner.workload.model_store import keep, read_store, store_folder
from evenstride.report.plan_text import search_table


def perform(request: OnlineRequest, store: str | None, *, as_json: bool) -> None:
    """Search, and store what was measured."""
    folder = store_folder(store, os.environ)
    known = None if folder is None else _known(request, folder)
    try:
        found = search(request, lambda line: say(line, err=True), known)
    except KeyboardInterrupt:
        typer.echo(
            f"ended; the same command with --folder {shlex.quote(str(request.folder))} continues "
            "from the last checkpoint and keeps the measurements",
            err=True,
        )
        raise
    stored = _kept(found, folder)
    if as_json:
        typer.echo(json.dumps({**to_dict(found), "stored": stored}))
    else:
        typer.echo("\n".join([tell(found), *(f"stored {file}" for file in stored)]))


def _known(request: OnlineRequest, folder: Path) -> SearchStore:
    """Return what earlier searches on this machine measured, and earlier plans anywhere."""
    types = worker_types(platform.node() or "machine", max(request.workers), request.speeds)
    torch = installed_torch()
    searches, plans = (read_store(one, __version__, torch) for one in (folder / FOLDER, folder))
    for line in (*searches.skipped, *plans.skipped):
        say(line, err=True)
    return SearchStore(types, searches.models, plans.models)


def _kept(found: OnlineResult, folder: Path | None) -> list[str]:
    """Store what was measured; return the file if it changed."""
    if folder is None or found.profile is None:
        return []
    try:
        file = keep(found.profile, folder / FOLDER)
    except ConfigError as error:
        say(str(error), err=True)
        return []
    return [] if file is None else [str(file)]


def request_of(
    command: tuple[str, ...],
    *,
    workers: str | None,
    batches: str | None,
    length: TrainingLength,
    objective: str | None,
    usd_per_h: float,
    speeds: str | None,
    folder: Path | None,
    probe_steps: int,
    restore: bool,
) -> OnlineRequest:
    """Return the search that the command line requests."""
    if not command:
        raise ConfigError(
            "no script given: plan --online expects one after --, such as evenstride plan --online "
            "--workers 1,2,4 --epochs 30 -- train.py"
        )
    limits = parse_speeds(speeds) if speeds else ()
    counts = _workers(workers, len(limits))
    if not 0 < usd_per_h < math.inf:
        raise ConfigError(f"--usd-per-h is {usd_per_h}: expected a price above 0, such as 1.2")
    sizes = arguments.wholes(batches, "--batches") if batches else ()
    trained = _trained(length, sizes)
    if sizes and sizes[-1] < counts[0]:
        raise ConfigError(
            f"the largest of --batches is {sizes[-1]}, fewer samples than {counts[0]} workers; "
            "give larger batches or fewer workers"
        )
    return OnlineRequest(
        command=command,
        workers=counts,
        batches=sizes,
        epochs=_epochs(length.epochs, trained, sizes),
        objective=_objective(objective),
        usd_per_h=usd_per_h,
        speeds=limits,
        folder=folder or Path("runs") / time.strftime("online-%Y%m%d-%H%M%S"),
        probe_steps=probe_steps,
        restore=restore,
        trained=trained,
    )


def _trained(length: TrainingLength, batches: Sequence[int]) -> tuple[MeasuredTraining, ...]:
    """Return the earlier trainings; refuse those that do not show the epochs at all batches."""
    length.aim()  # refuses --epochs with --trained
    runs = tuple(map(training_of, length.trained))
    known = {run.batch for run in runs}
    if not runs:
        return ()
    if len(known) < 2:
        raise ConfigError(
            f"--trained has only the batch {runs[0].batch}: expected trainings at two batches or "
            "more, which show how the epochs depend on the batch; give --epochs instead"
        )
    unknown = [batch for batch in batches if not min(known) <= batch <= max(known)]
    if unknown or not batches:
        raise ConfigError(
            f"--batches is {unknown[0] if unknown else 'missing'}: with --trained, expected "
            f"batches from {min(known)} to {max(known)}, where the epochs are known"
        )
    return tuple(MeasuredTraining(run.batch, run.epochs) for run in runs)


def _epochs(
    given: float | None, trained: Sequence[MeasuredTraining], batches: Sequence[int]
) -> float:
    """Return the epochs at the smallest batch."""
    if trained:
        return fit_best(trained).epochs(min(batches)).value
    if given is None or not 0 < given < math.inf:
        raise ConfigError(
            f"--epochs is {'missing' if given is None else given}: plan --online expects the "
            "epochs of the training at the smallest batch, such as --epochs 30, or trainings at "
            "several batches (--trained BATCH:EPOCHS)"
        )
    return given


def _workers(text: str | None, speeds: int) -> tuple[int, ...]:
    if text is not None:
        try:
            workers = arguments.wholes(text, "--workers")
        except ConfigError:
            raise ConfigError(
                f"--workers is {text!r}: expected integers above 0, such as 1,2,4"
            ) from None
        if speeds and workers[-1] > speeds:
            raise ConfigError(
                f"--workers has {workers[-1]}, but --speeds has {speeds} speeds; give a speed for "
                "each worker, or fewer workers"
            )
        return workers
    if not speeds:
        raise ConfigError(
            "--workers is missing: plan --online expects the numbers of workers to choose from, "
            "such as --workers 1,2,4"
        )
    return tuple(range(1, speeds + 1))


def _objective(text: str | None) -> Objective:
    try:
        return Objective(text or "time")
    except ValueError:
        names = ", ".join(Objective)
        raise ConfigError(f"--objective is {text!r}: expected one of {names}") from None


def tell(found: OnlineResult) -> str:
    journal, lines = found.journal, list[str]()
    if found.foreseen:
        width = shutil.get_terminal_size((120, 24)).columns
        lines += ["", search_table(found.foreseen, journal.chosen, found.after).text(width)]
    if journal.chosen is None:
        lines.append("\nThe training ended before the choice.")
    else:
        lines.append(f"\n{journal.chosen}: {journal.reason}")
    if found.overhead is not None:
        cost = found.overhead
        lines.append(
            f"The search took {cost.search_s:.1f} s with {len(journal.switches)} "
            f"switch{'' if len(journal.switches) == 1 else 'es'}; {cost.lost_s:.1f} s were lost, "
            f"{cost.part:.1%} of {cost.total_s:.0f} s."
        )
    elif found.continued:
        lines.append("The cost of the search is unknown, because it was interrupted.")
    run = journal.file.parent
    return "\n".join([*lines, f"run {run}", f"checkpoints {run / CHECKPOINTS}"])


def to_dict(found: OnlineResult) -> dict[str, Any]:
    journal = found.journal.to_plain()
    cost = found.overhead
    return {
        "chosen": _named(journal["chosen"]),
        "reason": journal["reason"],
        "configurations": [_configuration(one) for one in found.foreseen],
        "probes": journal["probes"],
        "switches": [
            {**one, "from": _named(one["from"]), "to": _named(one["to"])}
            for one in journal["switches"]
        ],
        "measured_after": None if found.after is None else found.after.to_plain(),
        "overhead": None
        if cost is None
        else {
            "search_s": cost.search_s,
            "useful_s": cost.useful_s,
            "lost_s": cost.lost_s,
            "total_s": cost.total_s,
            "part": cost.part,
        },
        "epochs": journal["epochs"],
        "epochs_by": found.epochs_by,
        "continued": found.continued,
        "reused": [one.to_dict() for one in found.reused],
        "trained_s": found.total_s,
        "folder": str(found.journal.file.parent),
        "checkpoints": str(found.journal.file.parent / CHECKPOINTS),
    }


def _named(pair: Sequence[int] | None) -> dict[str, int] | None:
    return None if pair is None else {"workers": pair[0], "global_batch": pair[1]}


def _configuration(one: OnlineForecast) -> dict[str, Any]:
    return {
        "workers": one.choice.workers,
        "global_batch": one.choice.batch,
        "measured": one.measured,
        "epochs": one.epochs,
        **_ends("step", "_s", one.step_s),
        **_ends("time", "_s", one.time_s),
        **_ends("cost", "_usd", one.cost_usd),
    }


def _ends(name: str, unit: str, one: Interval) -> dict[str, float | None]:
    """Return a figure and its interval; ``None`` for an unknown end."""
    ends = {
        f"{name}{unit}": one.value,
        f"{name}_low{unit}": one.low,
        f"{name}_high{unit}": one.high,
    }
    return {key: value if math.isfinite(value) else None for key, value in ends.items()}
