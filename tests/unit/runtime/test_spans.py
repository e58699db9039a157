"""The shares that each rank may get, which all ranks know when they form a team."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.leader_start import spans_of_ranks
from evenstride.runtime.engines.replica_groups import Islands
from tests.inside import session
from tests.unit.runtime.conftest import MakeStride

ISLANDS = Islands(((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("policy", "bounds", "expected"),
    [
        ("adaptive", {}, ((1, 13),) * 4),
        ("adaptive", {"min_share": 3, "max_share": 6}, ((3, 6),) * 4),
        ("dynamic-batching", {"max_share": 4}, ((4, 4),) * 4),
        ("dbs", {"quantum": 4}, ((4, 4),) * 4),
        ("uniform", {}, ((4, 4),) * 4),
        ("static:1,2,6,7", {}, ((1, 1), (2, 2), (6, 6), (7, 7))),
        ("static:0,0,0,16", {}, ((0, 0), (0, 0), (0, 0), (16, 16))),
    ],
)
def test_spans_are_what_policy_and_bounds_allow(
    policy: str, bounds: dict[str, Any], expected: tuple[tuple[int, int], ...]
) -> None:
    leader = Leader(Control(policy_from_spec(policy)))
    workers = tuple(Worker(f"h/{rank}", **bounds) for rank in range(4))

    verdict = leader.form(FleetFormed(0, 0, 16, workers))

    assert spans_of_ranks(leader.control, None, verdict.shares or ()) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("adaptive", ((1, 8),) * 4), ("uniform", ((5, 5), (4, 4), (4, 4), (4, 4)))],
)
def test_the_ranks_of_an_island_have_even_parts_of_its_span(
    policy: str, expected: tuple[tuple[int, int], ...]
) -> None:
    leader = Leader(Control(policy_from_spec(policy)), ISLANDS)

    verdict = leader.form(FleetFormed(0, 0, 17, tuple(Worker(f"h/{rank}") for rank in range(4))))

    assert spans_of_ranks(leader.control, ISLANDS, verdict.shares or ()) == expected


def test_a_stride_of_one_process_has_one(make_stride: MakeStride) -> None:
    assert session(make_stride(global_batch=4)).team.spans == ((4, 4),)
