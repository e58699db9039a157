"""``evenstride simulate``: policies on virtual workers, as scenario files describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli import arguments
from evenstride.cli.terminal_text import print_table, say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.core.sync_modes.mode_specs import SyncMode
    from evenstride.sim.scoring.suite import Suite

_EXAMPLE = "evenstride simulate cluster.yaml --policy adaptive"


def simulate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Scenario files, or folders of them.", metavar="FILE"),
    ] = None,
    policies: Annotated[
        list[str] | None, arguments.policies_option("Required, as a list or one by one.")
    ] = None,
    seeds: Annotated[str, arguments.seeds_option()] = "1",
    lag: arguments.Lag = None,
    cold_lag: arguments.ColdLag = None,
    steps: Annotated[int | None, arguments.steps_option()] = None,
    every: arguments.Every = None,
    sync: Annotated[
        list[str] | None,
        typer.Option(
            help="Modes of synchronisation, instead of the scenarios' own: bsp, bsp-ps, asp, "
            "ssp(staleness=3), local-sgd(every=8), delayed. Shows time, updates and staleness.",
            metavar="M[,N...]",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the runs of the first seed into this .png or .svg file."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of scenario files.")
    ] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Simulate policies on virtual workers: the controller that trains, in virtual time.

    efficiency: time of the best split at every step, as a part of the policy's.

    noise-free: the same by mean times, which are all that a split can help.

    informed: noise-free, of a controller that is told the truth, at the same lag.

    settled: noise-free, without the steps right after each change.

    Examples:
        evenstride simulate cluster.yaml --policy adaptive

        evenstride simulate cluster.yaml -p adaptive,dbs --seeds 20 --lag 1,3,8

        evenstride simulate cluster.yaml -p dbs,dynamic-batching:window=5 --json

        evenstride simulate cluster.yaml -p adaptive,uniform --sync 'bsp,asp,ssp(staleness=3)'

        evenstride simulate --schema
    """
    if schema:
        from evenstride.sim.scenario.scenario_model import Scenario

        typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))
        return
    if not policies:
        raise ConfigError(f"no policy to simulate; give at least one: {_EXAMPLE}")
    from evenstride.cli.suite_request import asked_suite

    modes = arguments.read_modes(",".join(sync) if sync else None)
    suite = asked_suite(
        files,
        policies,
        example=_EXAMPLE,
        leave_out=False,
        seeds=seeds,
        lag=lag,
        cold_lag=cold_lag,
        steps=steps,
        every=every,
    )
    _simulate(suite, modes, plot, as_json)


def _simulate(suite: Suite, modes: tuple[SyncMode, ...], plot: Path | None, as_json: bool) -> None:
    from evenstride.cli.suite_request import Drawing, in_modes, run_suite, simulate_in_modes
    from evenstride.report.suite_text import means_line, simulation_sentence, simulation_table

    if in_modes(suite, modes):
        if plot is not None:
            raise ConfigError(
                "--plot draws the steps of bsp, and other modes are asked for, by --sync or a "
                "scenario; leave --plot out for their table"
            )
        simulate_in_modes(suite, modes, as_json)
        return
    drawing = None if plot is None else Drawing.into_file(suite, plot)
    results = run_suite(suite, drawing)
    if as_json:
        results.print_rows()
    elif results.rows:
        groups = results.groups()
        print_table(simulation_table(groups))
        told = (means_line(groups), simulation_sentence(groups), results.times())
        say("\n" + "\n".join(told))
    results.end()
    if drawing is not None:
        drawing.save()
