"""``evenstride simulate``: policies on virtual workers, as scenarios describe them."""

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

_EXAMPLE = "evenstride simulate reference"
_POLICY = "adaptive"


def simulate(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(help=arguments.SCENARIOS_HELP, metavar="SCENARIO"),
    ] = None,
    policies: Annotated[
        list[str] | None,
        arguments.policies_option(
            f"A comma-separated list, or one per option. Default: {_POLICY}."
        ),
    ] = None,
    seeds: Annotated[str, arguments.seeds_option()] = "1",
    lag: arguments.Lag = None,
    cold_lag: arguments.ColdLag = None,
    steps: Annotated[int | None, arguments.steps_option()] = None,
    every: arguments.Every = None,
    sync: Annotated[
        list[str] | None,
        typer.Option(
            help="Synchronisation modes that replace those of the scenarios: bsp, bsp-ps, asp, "
            "ssp(staleness=3), local-sgd(every=8), delayed. Shows time, updates and staleness.",
            metavar="M[,N...]",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the runs of the first seed into this .png or .svg file."),
    ] = None,
    names: Annotated[
        bool, typer.Option("--list", help="List the built-in scenarios and end.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of scenario files and end.")
    ] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Simulate policies on virtual workers.

    The controller is the one that trains. Only the time is virtual.

    Columns: efficiency is the time of the best split at every step divided by the policy's time.
    noise-free is the same without noise. informed is the noise-free efficiency of a controller
    that knows the true times after every step, at the same lag, and then its efficiency in real
    time. settled is the noise-free efficiency without the steps right after the first decision
    and each change.

    Examples:
        evenstride simulate --list

        evenstride simulate reference

        evenstride simulate cluster.yaml -p adaptive,dbs --seeds 20 --lag 1,3,8

        evenstride simulate cluster.yaml -p dbs,dynamic-batching:window=5 --json

        evenstride simulate h10 -p adaptive,uniform --sync 'bsp,asp,ssp(staleness=3)'
    """
    if schema:
        from evenstride.sim.scenario.scenario_model import Scenario

        typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))
        return
    if names:
        _list_scenarios(as_json)
        return
    from evenstride.cli.suite_request import asked_suite

    modes = arguments.read_modes(",".join(sync) if sync else None)
    suite = asked_suite(
        scenarios,
        policies or [_POLICY],
        example=_EXAMPLE,
        leave_out=False,
        seeds=seeds,
        lag=lag,
        cold_lag=cold_lag,
        steps=steps,
        every=every,
    )
    _simulate(suite, modes, plot, as_json)


def _list_scenarios(as_json: bool) -> None:
    from evenstride.sim.scenario.builtin_scenarios import summaries

    found = summaries()
    if as_json:
        typer.echo(json.dumps({"scenarios": found}))
        return
    width = max(map(len, found))
    typer.echo("\n".join(f"{name:{width}}  {about}" for name, about in found.items()))


def _simulate(suite: Suite, modes: tuple[SyncMode, ...], plot: Path | None, as_json: bool) -> None:
    from evenstride.cli.suite_request import Drawing, in_modes, run_suite, simulate_in_modes
    from evenstride.report.suite_text import means_line, simulation_sentence, simulation_table

    if in_modes(suite, modes):
        if plot is not None:
            raise ConfigError(
                "--plot draws the steps of bsp, but --sync or a scenario names another mode; "
                "leave --plot out, or simulate bsp only"
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
        lines = (means_line(groups), simulation_sentence(groups), results.times())
        say("\n" + "\n".join(lines))
    results.end()
    if drawing is not None:
        drawing.save()
