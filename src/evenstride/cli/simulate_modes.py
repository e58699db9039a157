"""``evenstride simulate --sync``: what each mode of synchronisation comes to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from evenstride.cli.render.terminal_text import say
from evenstride.cli.suite_request import INTERRUPTED, print_table
from evenstride.core.spec import split_specs
from evenstride.core.sync_modes.mode_specs import SYNC_NAMES, AllReduce, SyncMode, sync_from_spec
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.sim.engine.mode_runs import SyncRow
    from evenstride.sim.scoring.suite import Suite


def read_modes(text: str | None) -> tuple[SyncMode, ...]:
    """Return the modes in a list; none if there is no list.

    Raises:
        ConfigError: it is empty, names one twice, or one that cannot be.
    """
    if text is None:
        return ()
    modes = tuple(map(sync_from_spec, split_specs(text, SYNC_NAMES)))
    if not modes:
        raise ConfigError("--sync names no mode; give some, such as bsp,ssp(staleness=3)")
    twice = next((mode for number, mode in enumerate(modes) if mode in modes[:number]), None)
    if twice is not None:
        raise ConfigError(f"sync {twice} is given twice; its figures would be the same; give one")
    return modes


def in_modes(suite: Suite, asked: tuple[SyncMode, ...]) -> bool:
    """Return whether a suite is to be told by mode: one was asked for, or is not the default."""
    default = AllReduce()
    return bool(asked) or any(scenario.mode != default for scenario, _ in suite.cases)


def simulate_in_modes(suite: Suite, asked: tuple[SyncMode, ...], as_json: bool) -> None:
    """Simulate a suite in some modes, or each scenario's own, and print what it comes to.

    Raises:
        typer.Exit: it was interrupted.
    """
    from evenstride.cli.render.progress_line import Advance
    from evenstride.report.mode_table import sync_table
    from evenstride.sim.engine.mode_runs import modes_of, simulate_modes

    rows: list[SyncRow] = []
    interrupted = ""
    modes = [modes_of(scenario, asked) for scenario, _ in suite.cases]
    counts = zip(modes, suite.cases, strict=True)
    total = len(suite.seeds) * sum(len(some) * len(policies) for some, (_, policies) in counts)
    with Advance(total, "runs") as advance:
        try:
            for row in simulate_modes(suite, asked):
                rows.append(row)
                advance.step()
                advance.begin(f"after {row.scenario}, {row.outcome.sync}, {row.policy}")
        except KeyboardInterrupt:
            interrupted = advance.told
    if as_json:
        more = {"interrupted": interrupted} if interrupted else {}
        typer.echo(json.dumps({"rows": [row.to_dict() for row in rows], **more}))
    elif rows:
        print_table(sync_table(rows))
    for mode in dict.fromkeys(mode for some in modes for mode in some):
        for sentence in mode.forgoes:
            say(f"note: {mode}: {sentence}", err=True)
    if interrupted:
        typer.echo(f"interrupted after {interrupted}", err=True)
        raise typer.Exit(INTERRUPTED)
