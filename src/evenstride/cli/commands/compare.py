"""``evenstride compare``: policies side by side, simulated or on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli import arguments
from evenstride.cli.terminal_text import print_table, say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.cli.suite_request import Results
    from evenstride.sim.scoring.suite import Suite

_EXAMPLE = "evenstride compare reference"
_SEEDS = "5"


def compare(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{arguments.SCENARIOS_HELP} With --real: a script and its arguments.",
            metavar="SCENARIO... | -- SCRIPT ARGS",
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        arguments.policies_option("A comma-separated list, or one per option. Default: all."),
    ] = None,
    seeds: Annotated[str | None, arguments.seeds_option(f"Default: {_SEEDS}.")] = None,
    lag: arguments.Lag = None,
    cold_lag: arguments.ColdLag = None,
    steps: Annotated[int | None, arguments.steps_option("With --real: steps per run.")] = None,
    every: arguments.Every = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw step times and shares into this folder, one file per scenario."),
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Run a script on local workers of given speeds.")
    ] = False,
    speeds: Annotated[
        str | None, typer.Option(help="With --real: speeds of the workers. Default: 1,0.5,0.2.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(help="With --real: change of speed in each run, as STEP:SPEEDS."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="With --real: runs of each policy. Default: 1.", min=1)
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Compare policies by how close they come to the best split in each scenario.

    A cell is the mean noise-free efficiency over the seeds; * marks the best of a line.
    informed is a controller that knows the true times after every step, at the same lag. The
    last columns show how far adaptive is ahead of the best other policy, without noise and in
    real time, paired by seed, with a 95 % bootstrap interval. evenstride simulate --list lists
    the built-in scenarios.

    Examples:
        evenstride compare reference h10

        evenstride compare cluster.yaml --seeds 20 --lag 1,3,8

        evenstride compare cluster.yaml --policy adaptive,dbs --json

        evenstride compare --real --speeds 1,0.5 -- train.py --lr 0.1
    """
    if real:
        _refuse("--real", seeds=seeds, lag=lag, cold_lag=cold_lag, every=every)
        from evenstride.cli.lab_output import compare_real, real_plan

        plan = real_plan(
            files,
            policies,
            speeds or "1,0.5,0.2",
            change or [],
            repeats=repeats or 1,
            steps=steps,
        )
        compare_real(plan, plot, as_json)
        return
    _refuse("scenarios; add --real", speeds=speeds, change=change, repeats=repeats)
    from evenstride.cli.suite_request import asked_suite

    suite = asked_suite(
        files,
        policies,
        example=_EXAMPLE,
        leave_out=True,
        seeds=seeds or _SEEDS,
        lag=lag,
        cold_lag=cold_lag,
        steps=steps,
        every=every,
    )
    _compare(suite, plot, as_json)


def _refuse(what: str, **options: object) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} cannot be used with {what}")


def _compare(suite: Suite, plot: Path | None, as_json: bool) -> None:
    from evenstride.cli.suite_request import Drawing, run_suite

    drawing = None if plot is None else Drawing.into_folder(suite, plot)
    for line in _left_out(suite):
        say(line, err=True)
    results = run_suite(suite, drawing)
    if as_json:
        results.print_rows()
    elif results.rows:
        _print(results)
    results.end()
    if drawing is not None:
        drawing.save()


def _left_out(suite: Suite) -> list[str]:
    """Return one line for each policy that cannot run in some scenario."""
    from evenstride.cli.suite_request import listed

    lines = []
    for policy in dict.fromkeys(unfit.policy for unfit in suite.left_out):
        mine = [unfit for unfit in suite.left_out if unfit.policy == policy]
        named = listed([unfit.scenario for unfit in mine])
        reason = mine[0].reason.partition(";")[0]
        lines.append(f"left out: {policy} in {named} ({reason})")
    return lines


def _print(results: Results) -> None:
    from evenstride.report.suite_text import comparison_sentence, comparison_table, seeds_of

    groups = results.groups()
    print_table(comparison_table(groups))
    seeds = seeds_of(groups)
    say(f"\nNoise-free efficiency, mean of {seeds}; * marks the best of a line.")
    say(comparison_sentence(groups))
    say(results.times())
