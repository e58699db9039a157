"""A scenario in any mode of synchronisation, in simulated time, with the controller that trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.core.sync_modes.mode_specs import Asynchronous, StaleSynchronous, SyncMode
from evenstride.sim.engine.asynchronous import AsyncRun
from evenstride.sim.engine.synchronous import Rounds
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.mode_result import Entry, ModeResult
from evenstride.sim.scoring.suite import Suite


@dataclass(frozen=True, slots=True)
class SyncRow:
    """What one policy came to in one scenario and mode under one seed."""

    scenario: str
    policy: str
    lag: int
    seed: int
    outcome: ModeResult

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, the outcome's beside the others."""
        return {
            "scenario": self.scenario,
            "policy": self.policy,
            "lag": self.lag,
            "seed": self.seed,
            **self.outcome.to_dict(),
        }


def modes_of(scenario: Scenario, asked: Sequence[SyncMode]) -> tuple[SyncMode, ...]:
    """Return the modes to simulate a scenario in: those asked for, else its own."""
    return tuple(asked) or (scenario.mode,)


def simulate_modes(suite: Suite, asked: Sequence[SyncMode]) -> Iterator[SyncRow]:
    """Simulate everything in every mode, and yield each run as it ends.

    In order of scenario, mode, policy and seed, so that what is compared stands together.

    Args:
        suite: scenarios with their policies, and seeds.
        asked: modes; each scenario's own if there are none.
    """
    for scenario, policies in suite.cases:
        timelines = {seed: Timeline(scenario, seed) for seed in suite.seeds}
        for mode in modes_of(scenario, asked):
            for policy in policies:
                for seed, timeline in timelines.items():
                    outcome = simulate_sync(scenario, policy, mode, seed, timeline=timeline)
                    yield SyncRow(scenario.name, policy, scenario.exchange.lag, seed, outcome)


def simulate_sync(
    scenario: Scenario,
    policy: str | Policy[Any],
    mode: SyncMode | None = None,
    seed: int = 0,
    *,
    timeline: Timeline | None = None,
    record: list[Entry] | None = None,
) -> ModeResult:
    """Return what becomes of a scenario's samples in one mode of synchronisation.

    The samples are those of the scenario's ``steps``, in every mode. Events and decisions that
    count steps count steps in lockstep; in ``asp`` and ``ssp``, global batches of samples trained.

    Args:
        scenario: the cluster and what befalls it.
        policy: decides the shares; its specification, or itself.
        mode: of synchronisation; the scenario's own if left out.
        seed: of noise and random events. A worker's n-th step has the same noise in every mode.
        timeline: that of the scenario and the seed, if it is there already.
        record: takes what happens, in order; nothing is kept if left out.

    Raises:
        ConfigError: there is no such policy, or it cannot serve a fleet of the scenario.
    """
    decides = policy_from_spec(policy) if isinstance(policy, str) else policy
    how = scenario.mode if mode is None else mode
    if isinstance(how, Asynchronous | StaleSynchronous):
        return AsyncRun(scenario, decides, how, seed, timeline, record).run()
    return Rounds(scenario, decides, how, seed, timeline, record).run()
