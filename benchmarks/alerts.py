"""Measure false alerts, and the delay of true ones, on simulated workers.

    python benchmarks/alerts.py [--steps 5000] [--seeds 2] [--out results.json]

* mistakes: Runs every scenario file without speed changes under `adaptive`, then workers at chosen
  levels of noise and spikes. Each worker that is named as slow is a mistake. Workers that are named
  as not worth their place are listed separately, because that may be correct.
* slow-downs: Runs four workers, one of which becomes slower, at several levels of noise. Counts the
  steps until the worker is named, and how often it is named exactly once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from evenstride.core.control.state import Control
from evenstride.core.diagnostics.alerts import Alert, Alerts
from evenstride.core.fleet import FloatArray
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.core.time_model.observation import Measurements
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.scenario import builtin_scenarios
from evenstride.sim.scenario.scenario_file import load_scenario
from evenstride.sim.scenario.scenario_model import Scenario

SCENARIOS = builtin_scenarios.SCENARIOS
MOST_WORKERS = 64
NOISES = ((0.02, 0.01), (0.05, 0.01), (0.1, 0.02), (0.2, 0.05), (0.3, 0.02))
SPEEDS = (0.3, 0.5, 0.6, 0.65)
SLOW_AT, AFTER = 500, 400


class Watched(Simulation):
    """A simulated run that is watched by the same alerts as a real run.

    Args:
        scenario: Cluster and events.
        policy: Policy that decides the shares.
        seed: Seed of the noise.
        below: Fraction of its best speed below which a worker is named.
        lockstep: Passed to the alerts.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy[Any],
        seed: int = 0,
        below: float = 0.7,
        *,
        lockstep: bool = True,
    ) -> None:
        self.alerts, self.found, self._lockstep = Alerts(below), list[Alert](), lockstep
        self._heard: Measurements | None = None
        super().__init__(scenario, policy, seed)

    @property
    def control(self) -> Control:
        """The state of the decision path."""
        return self._control

    def _measured(self, cpu_load: FloatArray) -> Measurements:
        self._heard = super()._measured(cpu_load)
        return self._heard

    def _exchange(self, step: int) -> None:
        super()._exchange(step)
        assert self._heard is not None
        sound = self._control.roster.inward(self._heard.only(self._heard.sound))
        situation = self._control.situation(step + 1, sound)
        self.alerts, found = self.alerts.after(situation, lockstep=self._lockstep)
        self.found += found


def stationary(steps: int) -> Iterator[Scenario]:
    """Yield the scenarios without events, and workers at several levels of noise."""
    for path in sorted(SCENARIOS.glob("*.yaml")):
        found = load_scenario(path)
        if not found.events and found.size <= MOST_WORKERS and found.sync == "bsp":
            yield load_scenario(path, {"steps": steps, "exchange.every": "leader"})
    for noise, spike_rate in NOISES:
        kinds = [_kind(f"n{k}", 4, noise, spike_rate, rate) for k, rate in enumerate((1000, 600))]
        yield _made(f"noise {noise:.0%}, spikes {spike_rate:.0%}", kinds, steps)


def mistakes(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Return the named workers of each scenario without speed changes."""
    rows = []
    for scenario in stationary(steps):
        found = list[Alert]()
        for seed in range(seeds):
            run = Watched(scenario, policy_from_spec("adaptive"), seed)
            run.run()
            found += run.found
        rows.append(
            {
                "scenario": scenario.name,
                "worker_steps": steps * seeds * scenario.size,
                "slow": sum(alert.kind == "slow" for alert in found),
                "unneeded": sorted({alert.worker for alert in found if alert.kind == "unneeded"}),
            }
        )
    return rows


def slow_downs(seeds: int) -> list[dict[str, Any]]:
    """Return, for each slow-down, how often and after how many steps the worker was named."""
    rows = []
    for speed in SPEEDS:
        for noise, spike_rate in NOISES[:3]:
            kinds = [_kind("n", 4, noise, spike_rate, 1000)]
            event = {"kind": "step", "at": SLOW_AT, "workers": 1, "speed": speed}
            scenario = _made("slow", kinds, SLOW_AT + AFTER, [event])
            taken, times = [], []
            for seed in range(seeds):
                run = Watched(scenario, policy_from_spec("adaptive"), seed)
                run.run()
                named = [a for a in run.found if (a.kind, a.worker) == ("slow", "n/1")]
                times.append(len(named))
                taken += [alert.step - SLOW_AT for alert in named[:1]]
            rows.append(
                {
                    "speed": speed,
                    "noise": noise,
                    "runs": seeds,
                    "named_once": times.count(1),
                    "steps_median": median(taken) if taken else None,
                    "steps_most": max(taken, default=None),
                }
            )
    return rows


def _kind(name: str, count: int, noise: float, spike_rate: float, rate: float) -> dict[str, Any]:
    fixed = {"name": name, "count": count, "fixed_s": 0.02, "samples_per_s": rate}
    return {**fixed, "noise": noise, "spike_rate": spike_rate}


def _made(
    name: str, workers: list[dict[str, Any]], steps: int, events: list[dict[str, Any]] | None = None
) -> Scenario:
    batch = 64 * sum(kind["count"] for kind in workers)
    plain = {"name": name, "global_batch": batch, "steps": steps, "workers": workers}
    return Scenario.model_validate(
        {**plain, "events": events or [], "exchange": {"every": "leader"}}
    )


def main() -> None:
    """Run the simulations, then print and save the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead of sentences")
    args = parser.parse_args()
    found = {"mistakes": mistakes(args.steps, args.seeds), "slow_downs": slow_downs(args.seeds)}
    print(json.dumps(found) if args.json else _sentences(found))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=2))


def _sentences(found: dict[str, Any]) -> str:
    lines = [
        f"{row['scenario']}: {row['slow']} named as slow in {row['worker_steps']:,} worker steps"
        + (f"; not worth their place: {', '.join(row['unneeded'])}" if row["unneeded"] else "")
        for row in found["mistakes"]
    ]
    total = sum(row["worker_steps"] for row in found["mistakes"])
    lines.append(f"total: {sum(r['slow'] for r in found['mistakes'])} in {total:,} worker steps")
    lines += [
        f"slow-down to {row['speed']:.0%} at {row['noise']:.0%} noise: named once in "
        f"{row['named_once']} of {row['runs']} runs, after {row['steps_median']} steps (median; "
        f"at most {row['steps_most']})"
        for row in found["slow_downs"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
