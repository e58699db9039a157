"""Any number of policies in any number of scenarios, each under the same seeds, and their scores.

`ScoreRow` is the score of one run against the oracle, as a row of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import Fleet, FloatArray
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import GivenShares
from evenstride.core.policy import Policy
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.engine.lockstep import SimulatedSteps, Simulation
from evenstride.sim.engine.virtual_workers import Cluster
from evenstride.sim.scenario.scenario_file import ScenarioFile, changed
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.oracle import InformedRun, ReferenceTimes, reference_times

AHEAD = 10
"""Steps over which a split must be good to count as found."""

ROOM = 10
"""Steps that the response to an event may take beyond the lag."""

FOUND = 0.95
_ROUNDING = 1e-9
NEEDLESS = 0.005
"""A move with a smaller true gain, as a fraction of the step, is needless."""


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One policy in one scenario under one seed."""

    scenario: str
    policy: str  # specification.
    lag: int  # steps from a measured step to its decision.
    seed: int  # of noise and random events.
    efficiency: float  # time of the oracle's split over the policy's, with the same noise.
    efficiency_mean: float  # the same on noise-free curves.
    # `efficiency_mean` of a controller that knows the true curves after every step, same lag.
    informed: float
    informed_real: float  # `efficiency` of the same controller.
    # `efficiency_mean` over the steps later than ``2 (lag + 3)`` after the first exchange, and
    # after the first one that may respond to an event; ``None`` without such steps.
    efficiency_settled: float | None
    speedup: float  # time of the equal split over the policy's, with the same noise.
    bound: float  # time of the equal split over the oracle's, noise-free.
    # The bound if times were proportional to the share; mean over slowest speed if nothing changes.
    linear_bound: float
    # First step from which the mean `efficiency_mean` of the next ten steps is at least 0.95;
    # ``None`` if it does not exist, as in a run of fewer than ten steps.
    steps_to_95_cold: int | None
    # The same after an event, counted from it; the worst of them. Only those of
    # `ScoredScenario.judged` count; ``None`` also without such events.
    steps_to_95_after_change: int | None
    needless_changes: int  # number of moves whose true gain was below 0.5 %.
    decide_s: float | None  # median computing time of a decision, in seconds; ``None`` without any


FIELDS = tuple(field.name for field in fields(ScoreRow))


@dataclass(slots=True, eq=False)
class ScoredScenario:
    """A scenario under one seed, ready for any number of policies."""

    scenario: Scenario
    seed: int
    references: ReferenceTimes
    informed: float  # efficiency of the informed controller, noise-free
    informed_real: float  # the same with noise
    timeline: Timeline

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> ScoredScenario:
        timeline = Timeline(scenario, seed)
        references = reference_times(scenario, seed, timeline)
        mean_s, real_s = InformedRun(scenario, seed, timeline).run()
        informed = _ratio(references.oracle_mean_s, mean_s)
        real = _ratio(references.oracle_s, real_s)
        return cls(scenario, seed, references, informed, real, timeline)

    def run(self, spec: str, policy: Policy[Any] | None = None) -> tuple[ScoreRow, SimulatedSteps]:
        policy = policy_from_spec(spec) if policy is None else policy
        track = Simulation(self.scenario, policy, self.seed, self.timeline).run()
        return self.row(spec, track), track

    @property
    def judged(self) -> tuple[int, ...]:
        return judged(self.scenario, self.timeline)

    def row(self, spec: str, track: SimulatedSteps) -> ScoreRow:
        best, lag = self.references, self.scenario.exchange.lag
        cold, *found = steps_to_find(best.oracle_mean_s / track.mean_s, (0, *self.judged))
        settled = _settled(len(track.mean_s), self._responses(track), 2 * (lag + 3))
        return ScoreRow(
            scenario=self.scenario.name,
            policy=spec,
            lag=lag,
            seed=self.seed,
            efficiency=_ratio(best.oracle_s, track.real_s),
            efficiency_mean=_ratio(best.oracle_mean_s, track.mean_s),
            informed=self.informed,
            informed_real=self.informed_real,
            efficiency_settled=_ratio(best.oracle_mean_s[settled], track.mean_s[settled])
            if settled.any()
            else None,
            speedup=_ratio(best.equal_s, track.real_s),
            bound=_ratio(best.equal_mean_s, best.oracle_mean_s),
            linear_bound=best.linear_bound,
            steps_to_95_cold=cold,
            steps_to_95_after_change=_worst(found),
            needless_changes=sum(move.gain < NEEDLESS for move in track.decisions),
            decide_s=float(np.median(track.decide_s)) if track.decide_s else None,
        )

    def _responses(self, track: SimulatedSteps) -> list[tuple[int, int]]:
        """Return the start and each event, with the step after which a response was possible.

        The leader's own cadence follows the measurements, so a late exchange is a late response.
        But no policy can decide before the first exchange.
        """
        every, events = self.scenario.exchange.every, (0, *self.timeline.changes)
        if every == "leader":
            first = track.exchanges[0] if track.exchanges else self.scenario.steps
            return [(0, first), *zip(events[1:], events[1:], strict=True)]
        return [(step, step - step % every + every - 1) for step in events]


def judged(scenario: Scenario, timeline: Timeline) -> tuple[int, ...]:
    """Return the events early enough for a response to be evaluated.

    A response may come ten steps later than the lag, and is then observed over ten more. For a
    later event, a slow response could not be distinguished from the end of the run. A run without
    such an event has no response time.
    """
    last = scenario.steps - (scenario.exchange.lag + ROOM + AHEAD)
    return tuple(step for step in timeline.changes if step <= last)


def _ratio(one: FloatArray, other: FloatArray) -> float:
    return float(one.sum() / other.sum())


def steps_to_find(parts: FloatArray, events: Sequence[int]) -> list[int | None]:
    """Return the number of steps after each event until the split is good over ten steps.

    Good means that the mean of the ten parts is at least 0.95; ``None`` if that never happens. With
    fewer than ten steps left, nothing is found: one good step at the end is not a stable split.
    """
    sums = np.concatenate([[0.0], np.cumsum(parts)])
    means = (sums[AHEAD:] - sums[:-AHEAD]) / AHEAD  # empty in a run of fewer steps
    good = np.flatnonzero(means >= FOUND - _ROUNDING)
    following = np.searchsorted(good, events)
    return [
        int(good[index]) - event if index < len(good) else None
        for event, index in zip(events, following.tolist(), strict=True)
    ]


def _worst(found: Sequence[int | None]) -> int | None:
    known = [steps for steps in found if steps is not None]
    return max(known) if known and len(known) == len(found) else None


def _settled(steps: int, responses: Sequence[tuple[int, int]], after: int) -> npt.NDArray[np.bool_]:
    """Return which steps are later than ``after`` steps after any response, the first included."""
    settled = np.ones(steps, dtype=np.bool_)
    for event, response in responses:
        settled[event : response + after + 1] = False
    return settled


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that replace those of the scenarios; ``None`` and empty ones replace nothing."""

    lags: tuple[int, ...] = ()  # each scenario is simulated with each of them
    cold_lag: int | None = None  # lag of a fleet's first exchange, and of its policy's opening
    steps: int | None = None  # number of steps; later events do not occur
    every: int | str | None = None  # steps between exchanges, or ``leader``

    def of(self, scenario: Scenario) -> list[Scenario]:
        """Return the scenario once for each lag, or raise a `ScenarioError`."""
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
    """A policy that cannot run in a scenario; `EVERY` if the scenario cannot be simulated."""

    policy: str
    scenario: str
    reason: str


@dataclass(frozen=True, slots=True)
class Suite:
    """The runs to simulate."""

    cases: tuple[tuple[Scenario, tuple[str, ...]], ...]
    seeds: tuple[int, ...]
    left_out: tuple[Unfit, ...] = ()

    @property
    def runs(self) -> int:
        return len(self.seeds) * sum(len(policies) for _, policies in self.cases)


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """One run: its row, its steps, and its scored scenario."""

    row: ScoreRow
    track: SimulatedSteps
    stage: ScoredScenario


def load_all(places: Sequence[Path]) -> list[ScenarioFile]:
    """Return the scenarios of some files, and of all ``.yaml`` files in some folders."""
    files: list[Path] = []
    for place in places:
        found = sorted(place.glob("*.y*ml")) if place.is_dir() else [place]
        if not found:
            raise ScenarioError(
                f"no scenario in {place}: it has no file that ends in .yaml or .yml"
            )
        files += found
    read, known = [], dict[str, Path]()
    for file in files:
        made = ScenarioFile.read(file)
        name = made.scenario.name
        if name in known:
            raise ScenarioError(
                f"{known[name]} and {file} both have the name {name}, so their results could not "
                "be distinguished; give each a unique name"
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
    """Return the runs to simulate, all of which are possible.

    ``leave_out`` skips policies that cannot run in a scenario, and scenarios that replay a missing
    recording.

    Raises:
        ConfigError: a policy is unknown, or cannot run in a scenario.
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
        raise ConfigError(f"no policy can run: {next(iter(left_out.values())).reason}")
    return Suite(tuple(cases), tuple(seeds), tuple(left_out.values()))


def _whole(
    scenarios: Sequence[Scenario | ScenarioFile], overrides: Overrides
) -> tuple[list[Scenario], list[Unfit]]:
    """Return all scenarios with their overrides, without those that lack a recording."""
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
    """Return why a policy cannot run with one of a scenario's fleets; empty if it can."""
    policy, timeline = policy_from_spec(spec), Timeline(scenario, 0)
    all_workers = Cluster(scenario, 0).workers
    for step in (0, *timeline.moves):
        workers = tuple(all_workers[k] for k in timeline.present(step))
        try:
            policy.init(Fleet(workers, scenario.global_batch))
        except ConfigError as error:
            if step and isinstance(policy, GivenShares) and len(workers) != len(policy.shares):
                return (
                    f"policy {spec} cannot run with a changing fleet: from step {step} on it has "
                    f"{len(workers)} workers; use static:cores, static:flops or adaptive"
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
    """Return the rows of a suite in the requested order: by scenario, lag, policy and seed."""
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
