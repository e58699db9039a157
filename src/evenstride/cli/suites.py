"""What ``simulate`` and ``compare`` have in common: their options, and the way they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.cli.drawing import Drawing
    from evenstride.report.simulated import Group
    from evenstride.report.tables import Table
    from evenstride.sim.score import Row
    from evenstride.sim.suite import Suite

POLICY_METAVAR = "P[,Q...]"
SEEDS_HELP = "How many seeds (at most 10,000), or a list of them: 0,1,2, or 7, for one."
LAG_HELP = "Steps from a measurement to its decision; each of a list is simulated."
COLD_LAG_HELP = "The same for a fleet's first exchange, and while its policy opens."
STEPS_HELP = "Steps to simulate; later events do not happen."
EVERY_HELP = "Steps between exchanges, or leader for the cadence that the leader sets."
JSON_HELP = "Print one JSON object with a list of rows."


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for on the command line; ``None`` where nothing was.

    Args:
        files: scenario files and folders.
        policies: specifications, some of them in lists; all there are if not given.
        seeds: a number of them, or a list.
        lag: one or a list.
        cold_lag: of a fleet's first exchange, and of its policy's opening.
        steps: to simulate.
        every: steps between exchanges, or ``leader``.
    """

    files: Sequence[Path] | None
    policies: Sequence[str] | None
    seeds: str
    lag: str | None
    cold_lag: int | None
    steps: int | None
    every: str | None

    def suite(self, example: str, *, leave_out: bool) -> Suite:
        """Return what to simulate.

        Args:
            example: of a command that would be understood.
            leave_out: whether to leave out what a policy cannot serve.

        Raises:
            ConfigError: something is not understood, or cannot be simulated.
        """
        from evenstride.cli.lists import every_policy, split_lags, split_policies, split_seeds
        from evenstride.sim.suite import Overrides, load_all, plan

        names = split_policies(self.policies) if self.policies else every_policy()
        seeds, lags = split_seeds(self.seeds), split_lags(self.lag)
        overrides = Overrides(lags, self.cold_lag, self.steps, self._every())
        if not self.files:
            raise ConfigError(f"no scenario to simulate; give files or folders of them: {example}")
        return plan(load_all(self.files), names, seeds, overrides, leave_out=leave_out)

    def _every(self) -> int | str | None:
        every = self.every
        if every is None or every == "leader":
            return every
        if not (every.isascii() and every.isdigit() and 0 < len(every) < 8 and int(every)):
            raise ConfigError(f"every {every!r} is not understood; give steps from 1 on, or leader")
        return int(every)


def run_suite(suite: Suite, drawing: Drawing | None = None) -> list[Row]:
    """Simulate a suite and return its rows in order, telling how far it is.

    Args:
        suite: what to simulate.
        drawing: shown each run; saving it is left to the caller, who first prints the rows.
    """
    from evenstride.cli.progress import Advance
    from evenstride.sim.suite import in_order, simulate

    rows = []
    with Advance(suite.runs, "runs") as advance:
        for ran in simulate(suite):
            rows.append(ran.row)
            if drawing is not None:
                drawing.take(ran)
            advance.step(f"{ran.row.scenario}, {ran.row.policy}, lag {ran.row.lag}")
    return in_order(suite, rows)


def groups_of(rows: Sequence[Row], suite: Suite) -> list[Group]:
    """Return the rows by scenario, lag and policy."""
    from evenstride.report.simulated import grouped
    from evenstride.sim.score import judged
    from evenstride.sim.timeline import Timeline

    unjudged = [
        (scenario.name, scenario.exchange.lag, seed)
        for scenario, _ in suite.cases
        for seed in suite.seeds
        if not judged(scenario, Timeline(scenario, seed))
    ]
    return grouped(rows, frozenset(unjudged))


def print_rows(rows: Sequence[Row], **more: Any) -> None:
    """Print rows as one JSON object."""
    typer.echo(json.dumps({"rows": [asdict(row) for row in rows], **more}))


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal if there is one."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = console.width if console.is_terminal else None
    if not console.is_terminal:
        typer.echo(table.text())
        return
    for number, part in enumerate(table.parts(width)):
        if number:
            console.print()
        tall = max(heading.count("\n") + 1 for heading in part.headings)
        for index, line in enumerate(part.lines()):
            text = Text(line, style="bold" if index < tall else "", no_wrap=True, overflow="ignore")
            if index >= tall:
                text.highlight_regex(r"\S+\*", "bold green")
            console.print(text, crop=False)
