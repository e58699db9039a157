"""The policies, fleets and reports that the contract is checked with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_shares
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.core.time_model.observation import Observation

# One step counts as an epoch where a policy decides by epochs, so that it does decide.
SPECS = (
    "uniform",
    "static",
    "static:cores",
    "static:GIVEN",
    "dynamic-batching",
    "lb-bsp-cpu",
    "lb-bsp-cpu:predictor=ar",
    "lb-bsp-gpu",
    "lb-bsp-gpu:version=2018",
    "dbs:epoch_steps=1",
    "omnilearn:epoch_steps=1",
    "adaptive",
    "adaptive:allow_idle=1",
)
every_policy = pytest.mark.parametrize("spec", SPECS)
FIXED = ("uniform", "static", "static:cores", "static:GIVEN")
every_balancing_policy = pytest.mark.parametrize("spec", [s for s in SPECS if s not in FIXED])

seconds = st.floats(1e-7, 10.0).map(lambda s: round(s, 7))


@st.composite
def workers(draw: st.DrawFn) -> tuple[Worker, ...]:
    found = []
    for rank in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 4))
        found.append(
            Worker(
                f"host/{rank}",
                min_share=least,
                max_share=draw(st.none() | st.integers(least, 60)),
                cores=draw(st.floats(0.1, 128)),
                flops_per_s=draw(st.floats(1e6, 1e15)),
            )
        )
    return tuple(found)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    members = draw(workers())
    least = sum(w.min_share for w in members)
    most = sum(60 if w.max_share is None else w.max_share for w in members)
    return Fleet(members, draw(st.integers(least, most)))


@st.composite
def splits(draw: st.DrawFn, fleet: Fleet) -> Shares:
    """Return shares inside the bounds, in which some workers may be left out."""
    weights = np.array(draw(st.lists(st.integers(1, 9), min_size=len(fleet), max_size=len(fleet))))
    out = np.array(draw(st.lists(st.booleans(), min_size=len(fleet), max_size=len(fleet))))
    lower, upper = np.where(out, 0, fleet.lower), np.where(out, 0, fleet.upper)
    if not int(lower.sum()) <= fleet.global_batch <= int(upper.sum()):
        lower, upper = fleet.lower, fleet.upper
    return as_shares(apportion(weights.astype(np.float64), fleet.global_batch, lower, upper))


@st.composite
def observations(draw: st.DrawFn, shares: Shares) -> tuple[Observation, ...]:
    """Return what the workers may report: the split in force, an older one, tails and ghosts."""
    thorough = draw(st.booleans())  # all workers report at length about the split in force
    reported = []
    for worker, share in enumerate(shares):
        for _ in range(1 if thorough else draw(st.sampled_from([1, 0, 2]))):
            seen = share if thorough else draw(st.just(0) | st.integers(0, sum(shares)))
            busy_s = tuple(draw(st.lists(seconds, min_size=1, max_size=3)))
            busy_s *= 12 if thorough else 1
            first_step, modelled = draw(st.integers(0, 999)), thorough or draw(st.booleans())
            reported.append(
                Observation(
                    worker, seen, first_step, busy_s, (0.0,) * len(busy_s), modelled=modelled
                )
            )
    return tuple(reported)


def policy_of(spec: str, given_shares: Shares) -> Policy[Any]:
    return policy_from_spec(spec.replace("GIVEN", ",".join(map(str, given_shares))))
