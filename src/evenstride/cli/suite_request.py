"""Simulated suites for `simulate` and `compare`: the request, the runs, the plots."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import typer

from evenstride.cli.arguments import (
    every_policy,
    read_every,
    split_lags,
    split_policies,
    split_seeds,
)
from evenstride.cli.live_progress import Advance
from evenstride.cli.terminal_text import print_drawbacks, print_table, say
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.dbs import UNKNOWN_EPOCH_STEPS
from evenstride.core.sync_modes.mode_specs import AllReduce, SyncMode
from evenstride.errors import ConfigError
from evenstride.report.suite_figures import MOST_PANELS, Panel, check_plotting, check_writable, draw
from evenstride.report.suite_text import Group, grouped, sync_table, times_sentence
from evenstride.sim.engine.mode_runs import SyncRow, modes_of, simulate_modes
from evenstride.sim.scenario.builtin_scenarios import scenario_path
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import (
    Overrides,
    Ran,
    ScoreRow,
    Suite,
    in_order,
    load_all,
    plan,
    simulate,
)

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_SHOWN = 6  # scenarios that a line names
_LONGEST = 200  # bytes of a file name; most file systems allow 255 with prefix and suffix


def asked_suite(
    scenarios: Sequence[str] | None,
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
    """Return the suite that the command line requests; ``None`` stands for an option not given.

    ``example`` is a valid command for the error message. With ``leave_out``, a policy that cannot
    run in a scenario is left out instead of refused.
    """
    names = split_policies(policies) if policies else every_policy()
    numbers = split_seeds(seeds)
    overrides = Overrides(split_lags(lag), cold_lag, steps, read_every(every))
    if not scenarios:
        raise ConfigError(
            "no scenario given: expected a scenario file, a folder of them, or the name of a "
            f"built-in scenario, such as {example}; evenstride simulate --list prints the names"
        )
    files = [scenario_path(text) for text in scenarios]
    return plan(load_all(files), names, numbers, overrides, leave_out=leave_out)


@dataclass(slots=True, eq=False)
class Results:
    """The results of a suite's runs."""

    suite: Suite
    rows: list[ScoreRow] = field(default_factory=list)  # fewer than planned if interrupted
    # Mean step time of the best and of the equal split, by scenario and lag, then by seed.
    steps_s: dict[tuple[str, int], dict[int, tuple[float, float]]] = field(default_factory=dict)
    # Scenario, lag and seed of runs without a change that counts; see `sim.scoring.suite.judged`.
    unjudged: set[tuple[str, int, int]] = field(default_factory=set)
    interrupted: str = ""  # progress at the interruption; empty for a complete suite

    def take(self, ran: Ran) -> None:
        """Add the results of one run."""
        row, best = ran.row, ran.stage.references
        means = float(best.oracle_mean_s.mean()), float(best.equal_mean_s.mean())
        self.rows.append(row)
        self.steps_s.setdefault((row.scenario, row.lag), {})[row.seed] = means
        if not ran.stage.judged:
            self.unjudged.add((row.scenario, row.lag, row.seed))

    def finish(self, interrupted: str = "") -> None:
        """Sort the rows in the order of the suite after the last run."""
        self.rows = in_order(self.suite, self.rows)
        self.interrupted = interrupted

    def groups(self) -> list[Group]:
        return grouped(self.rows, self.unjudged)

    def times(self) -> str:
        means = [
            [sum(values) / len(values) for values in zip(*seeds.values(), strict=True)]
            for seeds in self.steps_s.values()
        ]
        return times_sentence(*zip(*means, strict=True))

    def print_rows(self) -> None:
        """Print the rows as one JSON object, with a field ``interrupted`` if some are missing."""
        _print_rows([asdict(row) for row in self.rows], self.interrupted)

    def end(self) -> None:
        """Print notes on stderr, and exit if the suite was interrupted."""
        for note in notes(self.suite):
            say(f"note: {note}", err=True)
        _leave_if(self.interrupted)


def _print_rows(rows: list[dict[str, Any]], interrupted: str) -> None:
    more = {"interrupted": interrupted} if interrupted else {}
    typer.echo(json.dumps({"rows": rows, **more}))


def _leave_if(interrupted: str) -> None:
    if interrupted:
        typer.echo(f"interrupted after {interrupted}", err=True)
        raise typer.Exit(INTERRUPTED)


def run_suite(suite: Suite, drawing: Drawing | None = None) -> Results:
    """Simulate a suite with a progress display and return the results.

    Each run is added to ``drawing``. The caller saves it after printing the rows.
    """
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
            interrupted = advance.text
    results.finish(interrupted)
    return results


def _abouts(suite: Suite) -> list[str]:
    """Return a description of each run, in simulation order."""
    return [
        f"{scenario.name}, {policy}, lag {scenario.exchange.lag}, seed {seed}"
        for scenario, policies in suite.cases
        for seed in suite.seeds
        for policy in policies
    ]


def notes(suite: Suite) -> list[str]:
    """Return notes on policies that cannot change their split within a run."""
    found: dict[str, list[str]] = {}
    for scenario, policies in suite.cases:
        where = f"{scenario.name} at lag {scenario.exchange.lag}"
        reasons = [_too_late(scenario)]
        if reasons == [None]:
            reasons = [_too_short(policy, scenario) for policy in policies]
        for reason in filter(None, reasons):
            found.setdefault(reason, []).append(where)
    return [f"in {listed(names)}: {reason}" for reason, names in found.items()]


def _too_late(scenario: Scenario) -> str | None:
    """Return why no decision takes effect before the run ends; ``None`` if one does."""
    first = _in_force(scenario, 1)
    if first < scenario.steps:
        return None
    return (
        f"no decision took effect: the first one applies after {first} steps, and the run has "
        f"{scenario.steps}; every policy kept its first split"
    )


def _too_short(spec: str, scenario: Scenario) -> str | None:
    """Return why a policy that decides once per epoch never did; ``None`` if it did."""
    epoch = getattr(policy_from_spec(spec), "epoch_steps", None)
    if epoch is None:
        return None
    if epoch == 0 and scenario.epoch_samples:
        # All workers exchange at its end, and the split holds from the next step on.
        epoch = first = -(-scenario.epoch_samples // scenario.global_batch)
    else:
        epoch = epoch or UNKNOWN_EPOCH_STEPS
        first = _in_force(scenario, epoch)
    if first < scenario.steps:
        return None
    return (
        f"{spec} never changed the split: it decides after each epoch of {epoch} steps, so its "
        f"first split applies from step {first} on, and the run has {scenario.steps}; shorten the "
        "epochs with the policy's setting epoch_steps"
    )


def _in_force(scenario: Scenario, seen: int) -> int:
    """Return the first step to which a decision after ``seen`` measured steps can apply."""
    exchange = scenario.exchange
    every = 1 if exchange.every == "leader" else int(exchange.every)
    exchanges = -(-seen // every)
    cold_lag = exchange.cold_lag if exchanges == 1 else None
    lag = exchange.lag if cold_lag is None else cold_lag
    return exchanges * every - 1 + lag


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def in_modes(suite: Suite, requested: tuple[SyncMode, ...]) -> bool:
    """Return whether any mode other than the default was requested or is in a scenario."""
    default = AllReduce()
    return bool(requested) or any(scenario.mode != default for scenario, _ in suite.cases)


def simulate_in_modes(suite: Suite, requested: tuple[SyncMode, ...], as_json: bool) -> None:
    """Simulate a suite in the requested modes or each scenario's own, and print the results."""
    rows: list[SyncRow] = []
    interrupted = ""
    modes = [modes_of(scenario, requested) for scenario, _ in suite.cases]
    counts = zip(modes, suite.cases, strict=True)
    total = len(suite.seeds) * sum(len(some) * len(policies) for some, (_, policies) in counts)
    with Advance(total, "runs") as advance:
        try:
            for row in simulate_modes(suite.cases, suite.seeds, requested):
                rows.append(row)
                advance.step()
                advance.begin(f"after {row.scenario}, {row.outcome.sync}, {row.policy}")
        except KeyboardInterrupt:
            interrupted = advance.text
    if as_json:
        _print_rows([row.to_dict() for row in rows], interrupted)
    elif rows:
        print_table(sync_table(rows))
    print_drawbacks(mode for some in modes for mode in some)
    _leave_if(interrupted)


class Drawing:
    """Collects the runs of the first seed and draws them at the end."""

    def __init__(self, suite: Suite, files: dict[tuple[str, int], Path]) -> None:
        self._seed, self._files = suite.seeds[0], files
        self._panels: dict[Path, list[Panel]] = {}
        self._alone = len(set(files.values())) == len(files)

    @classmethod
    def into_file(cls, suite: Suite, path: Path) -> Self:
        """Return a drawing of all runs in one file."""
        check_plotting(path)
        runs = suite.runs // len(suite.seeds)
        if runs > MOST_PANELS:
            raise ConfigError(
                f"{runs} runs are too many for one plot: expected at most {MOST_PANELS}; give "
                "fewer scenarios, policies or lags, or use evenstride compare --plot FOLDER"
            )
        check_writable(path)
        return cls(suite, dict.fromkeys(_settings(suite), path))

    @classmethod
    def into_folder(cls, suite: Suite, folder: Path) -> Self:
        """Return a drawing with one file for each scenario and lag."""
        check_plotting()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; give a folder for the plots")
        settings = _settings(suite)
        lags = {name: [lag for other, lag in settings if other == name] for name, _ in settings}
        files = {
            (name, lag): folder / file_name(name, lag if len(lags[name]) > 1 else None)
            for name, lag in settings
        }
        for path in files.values():
            check_writable(path)
        return cls(suite, files)

    def take(self, ran: Ran) -> None:
        """Add a run, unless its seed is not the first."""
        row = ran.row
        if row.seed == self._seed:
            title = row.policy if self._alone else f"{row.policy} in {row.scenario}, lag {row.lag}"
            panels = self._panels.setdefault(self._files[row.scenario, row.lag], [])
            panels.append(Panel.of(title, ran.track, ran.stage))

    def save(self) -> None:
        for setting, path in self._files.items():
            panels = self._panels.pop(path, None)
            if panels:
                name = f"{setting[0]}, lag {setting[1]}, " if self._alone else ""
                draw(panels, f"{name}seed {self._seed}", path)
                say(f"plot written to {path}", err=True)


def _settings(suite: Suite) -> list[tuple[str, int]]:
    return [(scenario.name, scenario.exchange.lag) for scenario, _ in suite.cases]


def file_name(name: str, lag: int | None = None) -> str:
    """Return the file name of a plot, short enough for file systems.

    >>> file_name("2 x T4 / P4", 3)
    '2-x-T4-P4-lag-3.png'
    """
    plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "scenario"
    plain = plain.encode()[:_LONGEST].decode(errors="ignore")
    return f"{plain}.png" if lag is None else f"{plain}-lag-{lag}.png"
