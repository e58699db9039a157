"""What ``simulate`` and ``compare`` have in common: what is asked, and the way they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evenstride.cli.arguments import (
    every_policy,
    read_every,
    split_lags,
    split_policies,
    split_seeds,
)
from evenstride.cli.render.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.cli.render.simulation_progress import Drawing
    from evenstride.report.suite_text import Group
    from evenstride.report.text_tables import Table
    from evenstride.sim.scenario.scenario_model import Scenario
    from evenstride.sim.scoring.score import ScoreRow
    from evenstride.sim.scoring.suite import Ran, Suite

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
SHOWN = 6
"""Scenarios that a line names."""


def asked_suite(
    files: Sequence[Path] | None,
    policies: Sequence[str] | None,
    *,
    example: str,
    leave_out: bool,
    seeds: str,
    lag: str | None,
    cold_lag: int | None,
    steps: int | None,
    every: str | None,
) -> Suite:
    """Return what to simulate, given what the command line says; ``None`` where it says nothing.

    Args:
        files: scenario files and folders.
        policies: specifications, some of them in lists; all there are if not given.
        example: of a command that would be understood.
        leave_out: whether to leave out what a policy cannot serve.
        seeds: a number of them, or a list.
        lag: one or a list.
        cold_lag: of a fleet's first exchange, and of its policy's opening.
        steps: to simulate.
        every: steps between exchanges, or ``leader``.

    Raises:
        ConfigError: something is not understood, or cannot be simulated.
    """
    from evenstride.sim.scoring.suite import Overrides, load_all, plan

    names = split_policies(policies) if policies else every_policy()
    numbers = split_seeds(seeds)
    overrides = Overrides(split_lags(lag), cold_lag, steps, read_every(every))
    if not files:
        raise ConfigError(f"no scenario to simulate; give files or folders of them: {example}")
    return plan(load_all(files), names, numbers, overrides, leave_out=leave_out)


@dataclass(slots=True, eq=False)
class Results:
    """What the runs of a suite came to.

    Args:
        suite: what was asked for.
        rows: in its order; fewer than asked for if it was interrupted.
        steps_s: mean step with the best split and with equal batches, in each setting (scenario
            and lag), for every seed.
        unjudged: scenario, lag and seed of runs in which no change counts; see
            `sim.scoring.score.judged`.
        interrupted: how far it was; nothing if it ran to its end.
    """

    suite: Suite
    rows: list[ScoreRow] = field(default_factory=list)
    steps_s: dict[tuple[str, int], dict[int, tuple[float, float]]] = field(default_factory=dict)
    unjudged: set[tuple[str, int, int]] = field(default_factory=set)
    interrupted: str = ""

    def take(self, ran: Ran) -> None:
        """Keep what is told of a run."""
        row, sticks = ran.row, ran.stage.yardsticks
        means = float(sticks.oracle_mean_s.mean()), float(sticks.equal_mean_s.mean())
        self.rows.append(row)
        self.steps_s.setdefault((row.scenario, row.lag), {})[row.seed] = means
        if not ran.stage.judged:
            self.unjudged.add((row.scenario, row.lag, row.seed))

    def finish(self, interrupted: str = "") -> None:
        """Put the rows in the order of the suite, as no more follow."""
        from evenstride.sim.scoring.suite import in_order

        self.rows = in_order(self.suite, self.rows)
        self.interrupted = interrupted

    def groups(self) -> list[Group]:
        """Return the rows by scenario, lag and policy."""
        from evenstride.report.suite_text import grouped

        return grouped(self.rows, self.unjudged)

    def times(self) -> str:
        """Say how long steps take."""
        from evenstride.report.suite_text import times_sentence

        means = [
            [sum(values) / len(values) for values in zip(*seeds.values(), strict=True)]
            for seeds in self.steps_s.values()
        ]
        return times_sentence(*zip(*means, strict=True))

    def end(self) -> None:
        """Tell on stderr what the figures do not show, and leave if it was interrupted.

        Raises:
            typer.Exit: it was.
        """
        for note in notes(self.suite):
            say(f"note: {note}", err=True)
        if self.interrupted:
            typer.echo(f"interrupted after {self.interrupted}", err=True)
            raise typer.Exit(INTERRUPTED)


def run_suite(suite: Suite, drawing: Drawing | None = None) -> Results:
    """Simulate a suite and return what it came to, telling how far it is.

    Args:
        suite: what to simulate.
        drawing: shown each run; saving it is left to the caller, who first prints the rows.
    """
    from evenstride.cli.render.progress_line import Advance
    from evenstride.sim.scoring.suite import simulate

    results, abouts, interrupted = Results(suite), iter(_abouts(suite)), ""
    with Advance(suite.runs, "runs") as advance:
        try:
            advance.begin(next(abouts))
            for ran in simulate(suite):
                results.take(ran)
                if drawing is not None:
                    drawing.take(ran)
                advance.step()
                advance.begin(next(abouts, "all done"))
        except KeyboardInterrupt:
            interrupted = advance.told
    results.finish(interrupted)
    return results


def _abouts(suite: Suite) -> list[str]:
    """Return what each run is about, in the order in which they are simulated."""
    return [
        f"{scenario.name}, {policy}, lag {scenario.exchange.lag}, seed {seed}"
        for scenario, policies in suite.cases
        for seed in suite.seeds
        for policy in policies
    ]


def notes(suite: Suite) -> list[str]:
    """Return why some policies cannot change their split, however good they are."""
    found: dict[str, list[str]] = {}
    for scenario, policies in suite.cases:
        where = f"{scenario.name} at lag {scenario.exchange.lag}"
        reasons = [_in_vain(scenario)]
        if reasons == [None]:
            reasons = [_too_short(policy, scenario) for policy in policies]
        for reason in filter(None, reasons):
            found.setdefault(reason, []).append(where)
    return [f"in {listed(names)}: {reason}" for reason, names in found.items()]


def _in_vain(scenario: Scenario) -> str | None:
    """Return why no decision can take effect, if none can."""
    first = _in_force(scenario, 1)
    if first < scenario.steps:
        return None
    return (
        f"no decision could take effect; the first would after {first} steps, and the run has "
        f"{scenario.steps}, so every policy keeps the split that it opens with"
    )


def _too_short(spec: str, scenario: Scenario) -> str | None:
    """Return why a policy could not decide, if it waits for the end of an epoch that has none."""
    from evenstride.core.policies import policy_from_spec
    from evenstride.core.policies.dbs import UNKNOWN_EPOCH_STEPS

    epoch = getattr(policy_from_spec(spec), "epoch_steps", None)
    if epoch == 0:
        data_steps = -(-(scenario.epoch_samples or 0) // scenario.global_batch)
        epoch = data_steps or UNKNOWN_EPOCH_STEPS
    if epoch is None or (first := _in_force(scenario, epoch)) < scenario.steps:
        return None
    return (
        f"{spec} never changed the split; it decides at the first exchange after an epoch, which "
        f"here is {epoch} steps, so the first split of its own would hold from step {first} on, "
        f"and the run has {scenario.steps}; its setting epoch_steps makes epochs shorter"
    )


def _in_force(scenario: Scenario, seen: int) -> int:
    """Return the first step that what is decided after so many measured steps can hold for."""
    asked = scenario.exchange
    every = 1 if asked.every == "leader" else int(asked.every)
    exchanges = -(-seen // every)
    lag = asked.cold_lag if exchanges == 1 and asked.cold_lag is not None else asked.lag
    return exchanges * every - 1 + lag


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def print_rows(results: Results) -> None:
    """Print the rows as one JSON object, which says so if some are missing."""
    more: dict[str, Any] = {"interrupted": results.interrupted} if results.interrupted else {}
    typer.echo(json.dumps({"rows": [asdict(row) for row in results.rows], **more}))


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal if there is one."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        typer.echo(table.text())
        return
    for number, part in enumerate(table.parts(console.width)):
        if number:
            console.print()
        console.print(part.drawn(), crop=False)
