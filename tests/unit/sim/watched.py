"""Small simulated runs whose workers are watched by the code that names them in real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.alerts import Watched

from evenstride.core.policies import policy_from_spec
from tests.unit.sim.clusters import scenario


def worker(name: str = "n", **values: Any) -> dict[str, Any]:
    """Return a worker of 1,000 samples per second, 20 ms and a little noise."""
    usual = {"samples_per_s": 1000.0, "fixed_s": 0.02, "noise": 0.03}
    return {"name": name, **usual, **values}


def watched(
    workers: Sequence[dict[str, Any]],
    steps: int,
    events: Sequence[dict[str, Any]] = (),
    *,
    batch: int = 256,
    policy: str = "adaptive",
    seed: int = 0,
    below: float = 0.7,
    lockstep: bool = True,
) -> Watched:
    """Run a scenario to its end and return what was found."""
    asked = scenario(
        workers=list(workers),
        steps=steps,
        events=list(events),
        global_batch=batch,
        exchange={"every": "leader"},
    )
    run = Watched(asked, policy_from_spec(policy), seed, below, lockstep=lockstep)
    run.run()
    return run
