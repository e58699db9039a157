"""Any number of policies in any number of scenarios, each under the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstride.core.fleet import Fleet
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import GivenShares
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.engine.lockstep import SimulatedSteps
from evenstride.sim.engine.virtual_workers import Cluster
from evenstride.sim.scenario.scenario_file import ScenarioFile, changed
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.score import ScoredScenario, ScoreRow


@dataclass(frozen=True, slots=True)
class Overrides:
    """What counts instead of what the scenarios say; ``None`` and nothing leave it as it is."""

    lags: tuple[int, ...] = ()  # each scenario is simulated with each of them
    cold_lag: int | None = None  # lag of a fleet's first exchange, and of its policy's opening
    steps: int | None = None  # length; events that it leaves no room for do not happen
    every: int | str | None = None  # steps between exchanges, or ``leader``

    def of(self, scenario: Scenario) -> list[Scenario]:
        """Return the scenario once for each lag.

        Raises:
            ScenarioError: a value is out of range.
        """
        values: dict[str, Any] = {
            "exchange.cold_lag": self.cold_lag,
            "steps": self.steps,
            "exchange.every": self.every,
        }
        known = {key: value for key, value in values.items() if value is not None}
        lags = self.lags or (scenario.exchange.lag,)
        return [changed(scenario, {**known, "exchange.lag": lag}) for lag in lags]


EVERY = "every policy"


@dataclass(frozen=True, slots=True)
class Unfit:
    """A policy that cannot serve a scenario; `EVERY` where nothing can be simulated in it."""

    policy: str
    scenario: str
    reason: str


@dataclass(frozen=True, slots=True)
class Suite:
    """What to simulate."""

    cases: tuple[tuple[Scenario, tuple[str, ...]], ...]
    seeds: tuple[int, ...]
    left_out: tuple[Unfit, ...] = ()

    @property
    def runs(self) -> int:
        """How many runs it takes."""
        return len(self.seeds) * sum(len(policies) for _, policies in self.cases)


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """One run: its row, what it did step by step, and what it is measured by."""

    row: ScoreRow
    track: SimulatedSteps
    stage: ScoredScenario


def load_all(places: Sequence[Path]) -> list[ScenarioFile]:
    """Return the scenarios of some files, and of all ``.yaml`` files in some folders.

    Raises:
        ScenarioError: a file is wrong, there is none, or two scenarios have the same name.
    """
    files: list[Path] = []
    for place in places:
        found = sorted(place.glob("*.y*ml")) if place.is_dir() else [place]
        if not found:
            raise ScenarioError(
                f"there is no scenario in {place} (no file that ends in .yaml or .yml)"
            )
        files += found
    read, known = [], dict[str, Path]()
    for file in files:
        made = ScenarioFile.read(file)
        name = made.scenario.name
        if name in known:
            raise ScenarioError(
                f"{known[name]} and {file} are both named {name}, so their "
                "figures could not be told apart; give each a name of its own"
            )
        known[name] = file
        read.append(made)
    return read


def plan(
    scenarios: Sequence[Scenario | ScenarioFile],
    policies: Sequence[str],
    seeds: Sequence[int],
    overrides: Overrides,
    *,
    leave_out: bool,
) -> Suite:
    """Return what to simulate, all of which will be served.

    Args:
        scenarios: as their files have them, or made otherwise.
        policies: specifications.
        seeds: at least one.
        overrides: what counts instead of what the scenarios say.
        leave_out: whether to leave out who cannot serve a scenario, and the scenarios that
            replay a recording which is not there.

    Raises:
        ConfigError: a policy is unknown, or cannot serve a scenario.
        ScenarioError: a scenario cannot be simulated.
    """
    whole, lacking = _whole(scenarios, overrides)
    if lacking and not leave_out:
        raise ScenarioError(lacking[0].reason)
    left_out, cases = {(some.policy, some.scenario): some for some in lacking}, []
    for scenario in whole:
        reasons = {policy: unfit(policy, scenario) for policy in policies}
        for policy, reason in reasons.items():
            if reason and not leave_out:
                raise ConfigError(f"{scenario.name}: {reason}")
            if reason:
                left_out[policy, scenario.name] = Unfit(policy, scenario.name, reason)
        cases.append((scenario, tuple(policy for policy in policies if not reasons[policy])))
    if not any(served for _, served in cases):
        raise ConfigError(f"no policy can serve: {next(iter(left_out.values())).reason}")
    return Suite(tuple(cases), tuple(seeds), tuple(left_out.values()))


def _whole(
    scenarios: Sequence[Scenario | ScenarioFile], overrides: Overrides
) -> tuple[list[Scenario], list[Unfit]]:
    """Return all scenarios with what counts instead, apart from those that lack a recording."""
    whole, lacking = list[Scenario](), list[Unfit]()
    for given in scenarios:
        if isinstance(given, Scenario):
            whole += overrides.of(given)
            continue
        if overrides.steps is None:
            given.check_steps()
        if reason := given.lacking():
            lacking.append(Unfit(EVERY, given.scenario.name, reason))
        else:
            whole += overrides.of(given.scenario)
    return whole, lacking


def unfit(spec: str, scenario: Scenario) -> str:
    """Return why a policy cannot serve one of a scenario's fleets; nothing if it can.

    Raises:
        ConfigError: there is no such policy.
    """
    policy, timeline = policy_from_spec(spec), Timeline(scenario, 0)
    everyone = Cluster(scenario, 0).workers
    for step in (0, *timeline.moves):
        workers = tuple(everyone[k] for k in timeline.present(step))
        try:
            policy.init(Fleet(workers, scenario.global_batch))
        except ConfigError as error:
            if step and isinstance(policy, GivenShares) and len(workers) != len(policy.shares):
                return (
                    f"policy {spec} cannot serve a fleet that changes: from step {step} on there "
                    f"are {len(workers)} workers; use static:cores, static:flops or adaptive"
                )
            return str(error)
    return ""


def simulate(suite: Suite) -> Iterator[Ran]:
    """Simulate everything, a scenario and a seed at a time, and yield each run as it ends."""
    for scenario, policies in suite.cases:
        for seed in suite.seeds if policies else ():
            stage = ScoredScenario.of(scenario, seed)
            for policy in policies:
                row, track = stage.run(policy)
                yield Ran(row, track, stage)


def in_order(suite: Suite, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the rows of a suite as it was asked for: by scenario, lag, policy and seed."""
    order = {
        (scenario.name, scenario.exchange.lag, policy, seed): number
        for number, (scenario, policy, seed) in enumerate(
            (scenario, policy, seed)
            for scenario, policies in suite.cases
            for policy in policies
            for seed in suite.seeds
        )
    }
    return sorted(rows, key=lambda row: order[row.scenario, row.lag, row.policy, row.seed])
