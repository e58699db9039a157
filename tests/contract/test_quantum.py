"""Shares in multiples of each worker's quantum, whatever the policy asks for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.advance import advance
from evenstride.core.control.events import Exchanged, FleetFormed, SetShares
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import InfeasibleShares
from tests.contract.fleets import every_policy, fleets, observations, policy_of, splits


@every_policy
@given(alike=st.booleans(), data=st.data())
def test_shares_are_multiples_of_the_quanta_but_for_one_rest(
    spec: str, alike: bool, data: st.DataObject
) -> None:
    fleet = data.draw(fleets())
    sizes = [data.draw(st.integers(2, 8)) for _ in fleet.workers]
    quanta = [sizes[0] if alike else size for size in sizes]
    members = [replace(w, quantum=q) for w, q in zip(fleet.workers, quanta, strict=True)]
    policy = policy_of(spec, data.draw(splits(fleet)))
    formed = FleetFormed(0, 0, fleet.global_batch, tuple(members))
    try:
        control, _ = advance(Control(policy), formed)
    except InfeasibleShares:  # see tests/property/test_quanta.py for when
        return
    for step in range(1, data.draw(st.integers(2, 5))):
        rests = [share % q for share, q in zip(control.shares, quanta, strict=True) if share % q]
        assert len(rests) <= 1
        assert not alike or all(rest == fleet.global_batch % quanta[0] for rest in rests)
        assert sum(control.shares) == fleet.global_batch
        bounds = zip(control.shares, fleet.lower, fleet.upper, strict=True)
        assert all(low <= n <= high or (n == 0 and "GIVEN" in spec) for n, low, high in bounds)
        reported = Measurements.of(data.draw(observations(control.shares)))
        control, instructions = advance(control, Exchanged(1000 + step, 1001 + step, reported))
        decided = [i.shares for i in instructions if isinstance(i, SetShares)]
        assert decided in ([], [control.shares])


def test_an_excluded_worker_stays_excluded() -> None:
    workers = tuple(Worker(str(rank), quantum=8) for rank in range(3))

    control, _ = advance(
        Control(policy_from_spec("static:0,20,12")), FleetFormed(0, 0, 32, workers)
    )

    assert control.shares in ((0, 16, 16), (0, 24, 8))
