"""Shares in multiples of a quantum, whatever the policy asks for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstride.core.control import Control, Exchanged, FleetFormed, SetShares, advance
from evenstride.core.fleet import Worker
from evenstride.core.observation import Measured
from evenstride.core.policies import policy_from_spec
from evenstride.errors import InfeasibleShares
from tests.contract.fleets import every_policy, fleets, observations, policy_of, splits


@settings(max_examples=50)
@every_policy
@given(data=st.data())
def test_shares_are_multiples_of_the_quantum_but_for_one_rest(
    spec: str, data: st.DataObject
) -> None:
    fleet, quantum = data.draw(fleets()), data.draw(st.integers(2, 8))
    policy = policy_of(spec, data.draw(splits(fleet)))
    formed = FleetFormed(0, 0, fleet.global_batch, fleet.workers)
    try:
        control, _ = advance(Control(policy, quantum), formed)
    except InfeasibleShares:  # see tests/property/test_allocation.py for when
        return
    for step in range(1, data.draw(st.integers(2, 5))):
        uneven = [share for share in control.shares if share % quantum]
        assert len(uneven) <= 1
        assert all(share % quantum == fleet.global_batch % quantum for share in uneven)
        assert sum(control.shares) == fleet.global_batch
        bounds = zip(control.shares, fleet.lower, fleet.upper, strict=True)
        assert all(low <= n <= high or (n == 0 and "GIVEN" in spec) for n, low, high in bounds)
        told = Measured.of(data.draw(observations(control.shares)))
        control, instructions = advance(control, Exchanged(1000 + step, 1001 + step, told))
        decided = [i.shares for i in instructions if isinstance(i, SetShares)]
        assert decided in ([], [control.shares])


def test_who_is_left_out_stays_so() -> None:
    formed = FleetFormed(0, 0, 32, tuple(Worker(str(rank)) for rank in range(3)))

    control, _ = advance(Control(policy_from_spec("static:0,20,12"), quantum=8), formed)

    assert control.shares == (0, 16, 16) or control.shares == (0, 24, 8)
