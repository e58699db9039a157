"""What a message waits for: its own link, the server's, and who came before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.sim.engine.network import ParameterServers, Queues, Ring
from tests.unit.sim.clusters import scenario

LATENCY_S, PART_S, UPDATE_S = 0.5, 1.0, 3.0


def queues(servers: int = 2, update_s: float = UPDATE_S) -> Queues:
    """Return servers whose parts take a second each."""
    return Queues(ParameterServers(servers, LATENCY_S, 100.0, 100.0 * servers, servers * update_s))


def test_a_ring_sends_a_part_of_the_bytes_to_and_fro() -> None:
    # 2 (W - 1) / W of the bytes, and 2 (W - 1) latencies.
    ring = Ring(latency_s=0.01, bytes_per_s=1000.0, gradient_bytes=800.0)

    assert ring.all_reduce_s(4) == pytest.approx(2 * 3 / 4 * 0.8 + 6 * 0.01)
    assert ring.all_reduce_s(1) == 0


def test_links_without_a_limit_take_their_latency_only() -> None:
    made = scenario(communication={"latency_s": 0.2, "gradient_bytes": 1e9})

    assert made.communication.step_s(3) == pytest.approx(0.8)
    assert Queues(made.communication.served_by(3)).push(1.0) == pytest.approx([1.2] * 3)


def test_a_push_sends_one_part_after_the_other() -> None:
    assert queues().push(10.0) == pytest.approx([11.5, 12.5])


def test_a_push_waits_at_each_server_for_earlier_pushes() -> None:
    full = queues()
    full.push(10.0)

    assert full.push(10.25) == pytest.approx([12.5, 13.5])
    assert full.push(20.0) == pytest.approx([21.5, 22.5])  # no worker is left


def test_a_server_makes_one_update_after_the_other() -> None:
    busy = queues()

    assert busy.update(busy.push(0.0)) == pytest.approx(2.5 + UPDATE_S)
    # The second server has the first worker's part at 2.5, is done at 5.5, and then at 8.5.
    assert busy.update(busy.push(0.0)) == pytest.approx(2.5 + 2 * UPDATE_S)


def test_weights_come_one_part_after_the_other_and_one_worker_after_the_other() -> None:
    shared = queues()

    assert shared.pull(7.0) == pytest.approx(7 + 2 * PART_S + LATENCY_S)
    # Both servers send the second worker's parts from 8 to 9; its own link takes one at a time.
    assert shared.pull(7.0) == pytest.approx(8 + 2 * PART_S + LATENCY_S)
    assert shared.pull(30.0) == pytest.approx(30 + 2 * PART_S + LATENCY_S)


def test_both_directions_and_the_updates_do_not_hinder_each_other() -> None:
    alone, beside = queues(1), queues(1)
    for at_s in (0.0, 0.1, 0.2):
        beside.push(at_s)

    assert beside.pull(1.0) == alone.pull(1.0)
    assert beside.update([0.0]) == alone.update([0.0])


def test_more_servers_share_what_one_has_to_do() -> None:
    gradient_bytes, workers = 600.0, 6
    ends_s = []
    for servers in (1, 2, 3):
        at = Queues(ParameterServers(servers, 0.0, 100.0, gradient_bytes, update_s=1.2))
        ends_s.append(max(at.update(at.push(0.0)) for _ in range(workers)))

    # One link takes six gradients of 6 s; of several servers each a part, the last one a little
    # later than the first, as a worker sends them in turn.
    assert ends_s == pytest.approx([36 + 1.2, 3 + 18 + 0.6, 4 + 12 + 0.4])


@given(st.lists(st.floats(0, 20), min_size=1, max_size=12), st.integers(1, 4))
def test_requests_are_served_in_order_and_no_sooner_than_alone(
    asked_s: list[float], servers: int
) -> None:
    asked_s.sort()
    shared = queues(servers)

    applied_s = [shared.update(shared.push(at_s)) for at_s in asked_s]

    assert applied_s == sorted(applied_s)
    for at_s, end_s in zip(asked_s, applied_s, strict=True):
        assert end_s >= at_s + LATENCY_S + servers * PART_S + UPDATE_S - 1e-9
    least_s = asked_s[0] + LATENCY_S + servers * PART_S + len(asked_s) * UPDATE_S
    assert applied_s[-1] >= least_s - 1e-9
    waited_s = asked_s[-1] + LATENCY_S + servers * PART_S + len(asked_s) * max(UPDATE_S, PART_S)
    assert applied_s[-1] <= waited_s + 1e-9
