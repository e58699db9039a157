"""Parameter servers in plans: the formula, by hand, against the queues, and in simulated runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.errors import ConfigError
from evenstride.planner.search.training_forecast import ClusterChoice, outlook
from evenstride.planner.workload.epochs_to_target import KnownEpochs
from evenstride.planner.workload.step_time import servers_of
from evenstride.planner.workload.workload_profile import Links
from evenstride.sim.engine.mode_runs import simulate_sync
from evenstride.sim.engine.network import ParameterServers, Queues
from tests.messages import raises_message
from tests.unit.planner.kinds import kind, task
from tests.unit.sim.clusters import scenario


def test_the_formula_by_hand() -> None:
    """100 MB to 2 servers at 1 GB/s: parts of 50 ms.

    Four workers' weights take 4 + 1 parts until the last has all, whose gradient takes 2. With 1 ms
    of latency each way, and 20 ms of updates by two servers, 10 ms.
    """
    servers = ParameterServers(2, 1e-3, 1e9, 1e8, update_s=0.02)

    assert servers.all_reduce_s(4) == pytest.approx(2 * 0.001 + 7 * 0.05 + 0.01)


@given(
    st.integers(2, 40),
    st.integers(1, 9),
    st.floats(0, 0.1),
    st.floats(1e6, 1e10),
    st.floats(0, 1e9),
    st.floats(0, 2),
)
def test_it_is_what_comes_of_the_queues(
    workers: int, count: int, latency_s: float, per_s: float, size: float, update_s: float
) -> None:
    """Step after step, each of 1 s; the first ones begin together."""
    model = ParameterServers(count, latency_s, per_s, size, update_s)
    queues, begin_s, updates_s = Queues(model), [0.0] * workers, list[float]()
    for _ in range(3):
        arrived_s = [queues.push(at_s + 1.0) for at_s in begin_s][-1]
        updates_s.append(queues.update(arrived_s))
        begin_s = [queues.pull(updates_s[-1]) for _ in range(workers)]

    taken_s = updates_s[2] - updates_s[1]
    assert model.all_reduce_s(workers) == pytest.approx(taken_s - 1.0, rel=1e-6, abs=1e-9)


def test_a_simulated_run_takes_as_long_as_planned() -> None:
    """Two kinds, the split of the plan: within 1 %, rounding of the shares and the first step."""
    links = Links(latency_s=1e-3, bytes_per_s=1e9)
    planned = replace(task(KnownEpochs(1.0, 500), samples=100_000), servers=2, links=links)
    both = (kind("quick", 0.001, fixed_s=0.02), kind("slow", 0.0025, fixed_s=0.01))
    reported = outlook(ClusterChoice(both, (2, 3), 500), planned)
    assert reported is not None
    shares = _shares(500, reported.step.shares, (2, 3))
    workers = [
        {"samples_per_s": 1 / k.curve.per_sample_s, "fixed_s": k.curve.fixed_s, "count": n}
        for k, n in zip(both, (2, 3), strict=True)
    ]
    communication = {"latency_s": 1e-3, "bytes_per_s": 1e9, "gradient_bytes": 4e6}
    simulated = simulate_sync(
        scenario(workers=workers, global_batch=500, steps=200, communication=communication),
        f"static:{','.join(map(str, shares))}",
        sync_from_spec("bsp-ps(servers=2)"),
    )

    assert reported.step.communication_s > 0.1 * reported.step.compute_s
    assert reported.time_s.value == pytest.approx(simulated.time_s, rel=0.01)


def _shares(batch: int, largest: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
    """Return every worker's share: the largest of its kind, but for the rounding."""
    shares = [share for share, n in zip(largest, counts, strict=True) for _ in range(n)]
    for worker in range(sum(shares) - batch):
        shares[-1 - worker] -= 1
    return shares


def test_a_plan_includes_the_time_of_servers_except_for_one_worker() -> None:
    served = replace(task(), servers=2, links=Links(latency_s=1e-3, bytes_per_s=1e9))
    one, four = (outlook(ClusterChoice((kind("a"),), (n,), 256), served) for n in (1, 4))

    assert one is not None
    assert four is not None
    assert one.step.communication_s == 0.0
    assert four.step.communication_s == pytest.approx(2e-3 + 7 * 4e6 / 2 / 1e9)


@pytest.mark.parametrize(("sync", "servers"), [("bsp", 0), ("bsp-ps", 1), ("bsp-ps(servers=3)", 3)])
def test_modes_say_how_many_servers(sync: str, servers: int) -> None:
    assert servers_of(sync) == servers


@pytest.mark.parametrize("sync", ["asp", "local-sgd(every=8)", "ssp"])
def test_modes_that_change_how_a_training_converges_are_refused(sync: str) -> None:
    with raises_message(ConfigError):
        servers_of(sync)
