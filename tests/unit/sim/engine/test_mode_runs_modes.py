"""Modes of synchronisation in simulated time, on cases small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.core.policies import policy_from_spec
from evenstride.core.sync_modes.mode_specs import AllReduce, Asynchronous, sync_from_spec
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.engine.asynchronous import AsyncRun
from evenstride.sim.engine.mode_result import Applied, Begun, Entry, Gone, ModeResult
from evenstride.sim.engine.mode_runs import Rounds, simulate_sync
from evenstride.sim.scenario.scenario_file import changed
from evenstride.sim.scenario.scenario_model import Scenario
from tests.messages import check_message, raises_message
from tests.unit.sim.clusters import scenario
from tests.unit.sim.recording import Recording

# Ten samples take 1 s on the first, 4 s on the second; no part of it is fixed.
FAST = {"name": "fast", "samples_per_s": 10.0}
SLOW = {"name": "slow", "samples_per_s": 2.5}
EQUAL, EVEN = "static:10,10", "static:16,4"
LINKS = {"latency_s": 0.25}  # an all-reduce of two takes half a second


def made(**values: Any) -> Scenario:
    return scenario(**{"workers": [FAST, SLOW], "global_batch": 20, "steps": 4, **values})


def ran(
    mode: str, policy: str = EQUAL, record: list[Entry] | None = None, **values: Any
) -> ModeResult:
    return simulate_sync(made(**values), policy, sync_from_spec(mode), record=record)


def applied(record: list[Entry]) -> list[tuple[int, float, int]]:
    """Return who had an update applied, when, and how stale it was."""
    return [(e.worker, e.at_s, e.staleness) for e in record if isinstance(e, Applied)]


class TestLockstep:
    def test_bsp_waits_for_the_slowest_and_then_communicates(self) -> None:
        outcome = ran("bsp", communication=LINKS)

        assert outcome.time_s == pytest.approx(4 * 4.5)
        assert (outcome.updates, outcome.epochs, outcome.samples) == (4, 1, 80)
        assert outcome.staleness.maximum == 0
        fast, slow = outcome.workers
        assert (fast.busy_s, fast.wait_s) == pytest.approx((4, 14))
        assert (slow.busy_s, slow.wait_s) == pytest.approx((16, 2))
        assert fast.period_s == slow.period_s == pytest.approx(4.5)
        assert outcome.waiting == pytest.approx(16 / 36)

    @pytest.mark.parametrize("mode", ["bsp", "local-sgd(every=4)", "bsp-ps"])
    def test_dbs_decides_at_each_end_of_an_epoch(self, mode: str) -> None:
        record = list[Entry]()

        ran(mode, "dbs", record, steps=9, epoch_samples=50)

        # Epochs of two full steps and a short one of 10 samples.
        pieces = [e.positions for e in record if isinstance(e, Applied) and not e.worker]
        assert [sum(map(len, one)) for one in pieces] == [10, 10, 5, 16, 16, 8, 16, 16, 8, 16, 8]

    def test_the_controller_gets_each_workers_busy_and_waiting_time(self) -> None:
        policy = Recording(policy_from_spec("uniform"))

        Rounds(made(communication=LINKS), policy, AllReduce()).run()

        fast, slow = policy.situations[0].observations
        assert fast.busy_s + fast.wait_s == pytest.approx((1, 3.5))
        assert slow.busy_s + slow.wait_s == pytest.approx((4, 0.5))

    def test_servers_take_the_gradients_in_as_they_come(self) -> None:
        links = {"latency_s": 0.25, "bytes_per_s": 100.0, "gradient_bytes": 100.0, "update_s": 2.0}

        outcome = ran("bsp-ps", communication=links, steps=1)

        # The fast one's gradient is there by then: 4 s, a message of 1.25 s, an update of 2 s, and
        # the weights for one after the other.
        assert outcome.time_s == pytest.approx(4 + 1.25 + 2 + 2 + 0.25)

    def test_gradients_that_come_together_wait_for_each_other(self) -> None:
        links = {"bytes_per_s": 100.0, "gradient_bytes": 100.0}

        outcome = ran("bsp-ps", EVEN, communication=links, steps=1)

        assert outcome.time_s == pytest.approx(1.6 + 2 + 2)

    def test_local_steps_need_no_communication(self) -> None:
        outcome = ran("local-sgd(every=2)", communication=LINKS)

        assert outcome.time_s == pytest.approx(2 * (8 + 0.5))
        assert outcome.updates == 2
        assert [worker.updates for worker in outcome.workers] == [4, 4]

    def test_only_the_sum_of_a_round_has_to_be_even(self) -> None:
        slow_in_turns = [
            {"kind": "step", "at": step, "until": step + 1, "workers": step % 2, "speed": 0.5}
            for step in range(4)
        ]
        alike: dict[str, Any] = {"workers": [{**FAST, "count": 2}], "events": slow_in_turns}

        assert ran("bsp", **alike).time_s == pytest.approx(4 * 2)
        assert ran("local-sgd(every=2)", **alike).time_s == pytest.approx(2 * 3)

    def test_a_round_ends_with_its_epoch(self) -> None:
        outcome = ran("local-sgd(every=3)", communication=LINKS, epoch_samples=40)

        assert (outcome.epochs, outcome.updates) == (2, 2)
        assert outcome.time_s == pytest.approx(2 * (8 + 0.5))

    def test_post_local_sgd_begins_as_bsp(self) -> None:
        outcome = ran("local-sgd(every=4,after=3)", communication=LINKS, steps=8)

        # Three steps, four without any, and the last alone as the epoch ends.
        assert outcome.updates == 3 + 1 + 1
        assert outcome.time_s == pytest.approx(8 * 4 + 5 * 0.5)

    @pytest.mark.parametrize(("latency_s", "step_s"), [(0.25, 4.0), (2.0, 4.0), (3.0, 6.0)])
    def test_delayed_hides_communication_behind_the_next_step(
        self, latency_s: float, step_s: float
    ) -> None:
        outcome = ran("delayed", communication={"latency_s": latency_s}, steps=10)

        # The first step has nothing next to it, and all wait for the last all-reduce.
        assert outcome.time_s == pytest.approx(4 + 9 * step_s + 2 * latency_s)
        assert (outcome.updates, outcome.staleness.maximum) == (10, 1)
        assert outcome.staleness.histogram[:2] == (1, 9)

    def test_delayed_lets_the_fast_be_a_step_ahead(self) -> None:
        record = list[Entry]()

        ran("delayed", record=record)

        begun = [entry.at_s for entry in record if isinstance(entry, Begun) and entry.worker == 0]
        assert begun == pytest.approx([0, 1, 4, 8])

    def test_a_worker_lost_in_a_round_loses_its_work(self) -> None:
        record, lost = list[Entry](), {"kind": "lost", "at": 2, "workers": 1}

        outcome = ran("local-sgd(every=4)", "uniform", record, steps=6, events=[lost])

        # Two steps of the fast one count; all else is trained by it alone, 20 samples at a time.
        fast, slow = outcome.workers
        assert (fast.samples, slow.samples) == (120, 0)
        assert (fast.updates, outcome.updates) == (2 + 5, 1 + 2)
        assert outcome.time_s == pytest.approx(2 * 1 + 5 * 2)
        assert [entry for entry in record if isinstance(entry, Gone)] == [Gone(1, 8.0)]
        again = [e.positions for e in record if isinstance(e, Applied)][2]
        assert again == (range(10, 20), range(30, 40))

    def test_a_worker_that_leaves_in_a_round_contributes_its_work(self) -> None:
        leave = {"kind": "leave", "at": 2, "workers": 1}

        outcome = ran("local-sgd(every=4)", "uniform", steps=6, events=[leave])

        assert [worker.samples for worker in outcome.workers] == [100, 20]
        assert outcome.time_s == pytest.approx(8 + 4 * 2)

    def test_a_worker_that_joins_begins_when_the_others_are_ready(self) -> None:
        join = {"kind": "join", "at": 2, "workers": 1}

        outcome = ran("bsp", "uniform", events=[join])

        assert outcome.time_s == pytest.approx(2 * 2 + 2 * 4)
        slow = outcome.workers[1]
        assert (slow.busy_s, slow.wait_s, slow.updates) == pytest.approx((8, 0, 2))

    def test_only_the_time_counts_for_which_a_worker_is_there(self) -> None:
        away = [
            {"kind": "leave", "at": 1, "workers": 0},
            {"kind": "join", "at": 3, "workers": 0},
        ]

        fast = ran("bsp", "uniform", events=away).workers[0]

        assert (fast.updates, fast.busy_s, fast.wait_s) == pytest.approx((2, 2, 6))


class TestFree:
    def test_no_worker_waits_in_asp(self) -> None:
        record = list[Entry]()

        outcome = ran("asp", record=record, steps=5)

        # One makes four updates while the other makes one; equal times go by order of begin.
        assert outcome.time_s == pytest.approx(8)
        assert [worker.updates for worker in outcome.workers] == [8, 2]
        assert outcome.waiting == 0
        assert [s for k, _, s in applied(record) if k == 1] == [3, 4]
        assert [s for k, _, s in applied(record) if k == 0] == [0, 0, 0, 1, 0, 0, 0, 1]

    @pytest.mark.parametrize(("policy", "most"), [(EQUAL, 4), (EVEN, 1)])
    def test_even_periods_bound_the_staleness_but_leave_its_mean(
        self, policy: str, most: int
    ) -> None:
        outcome = ran("asp", policy, steps=100)

        # Whatever the speeds: an update meets (W - 1) others on average.
        assert outcome.staleness.mean == pytest.approx(1, abs=0.03)
        slow = outcome.workers[1].staleness
        assert slow.count == outcome.workers[1].updates
        assert slow.mean == pytest.approx(most, abs=0.1)
        assert outcome.staleness.maximum == most

    def test_ssp_lets_the_fast_go_ahead_up_to_its_bound(self) -> None:
        record = list[Entry]()

        ran("ssp(staleness=2)", record=record, steps=10)

        begun = [entry.at_s for entry in record if isinstance(entry, Begun) and entry.worker == 0]
        assert begun[:6] == pytest.approx([0, 1, 2, 4, 8, 12])

    def test_a_worker_that_waited_requests_the_weights_again(self) -> None:
        record, links = list[Entry](), {"latency_s": 0.1}

        outcome = ran("ssp(staleness=0)", record=record, communication=links, steps=2)

        # A push takes 0.1 s there. The slow one has the answer 0.1 s later; the fast one hears that
        # it may, asks for weights, and is answered: three messages. Then each asks for its piece.
        times = {(k, n): t for n, (k, t, _) in enumerate(applied(record))}
        assert times[0, 0] == pytest.approx(1.1)
        assert times[1, 1] == pytest.approx(4.1)
        assert times[0, 2] == pytest.approx(4.1 + 0.3 + 0.2 + 1.1)
        assert times[1, 3] == pytest.approx(4.1 + 0.1 + 0.2 + 4.1)
        assert outcome.time_s == pytest.approx(8.5 + 0.3)
        assert outcome.staleness.histogram[:2] == (2, 2)

    @pytest.mark.parametrize(("servers", "messages"), [(1, 4), (2, 6)])
    def test_each_call_between_two_updates_takes_its_messages(
        self, servers: int, messages: int
    ) -> None:
        record, links = list[Entry](), {"latency_s": 0.1}

        ran(f"asp(servers={servers})", "uniform", record, communication=links, steps=10)

        mine = [t for k, t, _ in applied(record) if k == 0]
        # A push and its answer; with several servers the first is informed; a piece is asked for.
        assert mine[1] - mine[0] == pytest.approx(1.0 + 0.1 * messages)

    def test_an_epoch_ends_for_all_together(self) -> None:
        record = list[Entry]()

        ran("asp", record=record, steps=4, epoch_samples=30)

        begun = [entry.at_s for entry in record if isinstance(entry, Begun)]
        # 30 samples: the slow one has ten of them until 4 s, and the next epoch begins then.
        assert begun[:5] == pytest.approx([0, 0, 1, 4, 4])

    def test_updates_wait_in_line_at_the_servers(self) -> None:
        links = {"update_s": 1.0}
        four: dict[str, Any] = {"workers": [{**FAST, "count": 4}], "global_batch": 40, "steps": 50}

        outcome = ran("asp", "static:10,10,10,10", communication=links, **four)

        # Four workers of a period of 2 s each would bring two updates a second; servers make one.
        assert outcome.time_s == pytest.approx(200, abs=2)
        assert all(worker.period_s == pytest.approx(4, abs=0.1) for worker in outcome.workers)

    def test_the_share_of_a_lost_worker_is_trained_by_the_others(self) -> None:
        record, lost = list[Entry](), {"kind": "lost", "at": 1, "workers": 1}

        outcome = ran("asp", "uniform", record, events=[lost])

        # The second update of the fast one makes it 20 samples, at 2 s; the other is at work then.
        gone = next(entry for entry in record if isinstance(entry, Gone))
        assert gone == Gone(1, 2.0)
        assert [worker.samples for worker in outcome.workers] == [80, 0]
        after = next(e.positions for e in record if isinstance(e, Applied) and e.at_s > 2)
        assert after == (range(10, 20), range(30, 40))

    def test_a_leaving_worker_makes_its_update(self) -> None:
        record, leave = list[Entry](), {"kind": "leave", "at": 1, "workers": 1}

        outcome = ran("asp", "uniform", record, events=[leave])

        assert [worker.samples for worker in outcome.workers] == [70, 10]
        assert next(entry for entry in record if isinstance(entry, Gone)) == Gone(1, 4.0)

    @pytest.mark.parametrize("mode", ["asp", "ssp(staleness=1)"])
    def test_a_worker_with_a_notice_gets_no_samples_and_delays_no_other(self, mode: str) -> None:
        notice = {"kind": "notice", "at": 2, "workers": 1}
        record = list[Entry]()

        outcome = ran(mode, "uniform", record, events=[notice], steps=20)

        begun = [entry.at_s for entry in record if isinstance(entry, Begun)]
        last = max(e.at_s for e in record if isinstance(e, Begun) and e.worker == 1)
        assert sum(at_s > last for at_s in begun) > 10
        assert outcome.samples == 400

    def test_a_worker_that_joins_gets_the_weights_first(self) -> None:
        record, join = list[Entry](), {"kind": "join", "at": 1, "workers": 1}
        links = {"latency_s": 0.1}

        ran("asp", "uniform", record, events=[join], communication=links)

        # The fast one alone has made 20 samples at 2 + 0.1 s.
        first = next(entry for entry in record if isinstance(entry, Begun) and entry.worker == 1)
        assert first.at_s == pytest.approx(2.1)
        assert next(t for k, t, _ in applied(record) if k == 1) == pytest.approx(
            2.1 + 0.3 + 0.2 + 4.1
        )

    def test_the_controller_gets_each_workers_busy_and_waiting_time(self) -> None:
        join, links = {"kind": "join", "at": 1, "workers": 1}, {"latency_s": 0.1}
        policy = Recording(policy_from_spec("uniform"))

        AsyncRun(made(events=[join], communication=links), policy, Asynchronous()).run()

        reported = policy.situations
        slow = next(seen for each in reported for seen in each.observations if seen.worker == 1)
        # It came at 2.1 s, had the weights three messages later and a piece two more; a push and
        # its answer are its own time.
        assert slow.wait_s[0] == pytest.approx(0.5)
        assert slow.busy_s[0] == pytest.approx(slow.share / 2.5 + 0.2)

    def test_the_controller_evens_the_periods(self) -> None:
        alike = ran("asp", "adaptive", steps=100)

        fast, slow = (worker.period_s for worker in alike.workers)
        assert fast == pytest.approx(slow, rel=0.1)
        assert alike.moves >= 1

    def test_a_worker_that_leaves_its_band_asks_for_an_exchange(self) -> None:
        def exchanges(**values: Any) -> list[int]:
            quick = [{"samples_per_s": 1000.0}, {"samples_per_s": 250.0}]
            leader = made(workers=quick, exchange={"every": "leader"}, steps=300, **values)
            policy = Recording(policy_from_spec("adaptive"))
            AsyncRun(leader, policy, Asynchronous()).run()
            return policy.steps

        faster = [{"kind": "step", "at": 201, "workers": 0, "speed": 3.0}]
        soon = range(201, 204)

        assert not set(soon) & set(exchanges())
        assert set(soon) & set(exchanges(events=faster))

    def test_a_change_of_speed_is_answered(self) -> None:
        slower = {"kind": "step", "at": 50, "workers": 0, "speed": 0.25}
        record = list[Entry]()

        simulate_sync(
            made(events=[slower], steps=100), "adaptive", sync_from_spec("asp"), record=record
        )

        last = [e for e in record if isinstance(e, Applied)][-20:-4]
        sizes = {k: {sum(map(len, e.positions)) for e in last if e.worker == k} for k in (0, 1)}
        assert sizes == {0: {10}, 1: {10}}


class TestAsked:
    def test_a_scenario_names_its_mode(self) -> None:
        named = made(sync="ssp:staleness=1,servers=2")

        assert named.sync == "ssp(staleness=1,servers=2)"
        assert simulate_sync(named, EQUAL).sync == named.sync
        assert simulate_sync(made(), EQUAL).sync == "bsp"

    @pytest.mark.parametrize(
        ("sync", "said"),
        [
            ("sync", ("'sync'",)),
            ("ssp(staleness=-1)", ("-1",)),
            ("local-sgd", ()),
        ],
    )
    def test_a_mode_that_cannot_be_is_refused(self, sync: str, said: tuple[str, ...]) -> None:
        with pytest.raises(ScenarioError) as refused:
            changed(made(), {"sync": sync})

        assert str(refused.value).startswith("made: sync: ")
        check_message(str(refused.value), *said)

    def test_a_policy_that_cannot_serve_is_refused(self) -> None:
        with raises_message(ConfigError):
            ran("asp", "static:10,9")

    def test_an_outcome_converts_to_plain_values(self) -> None:
        reported = ran("asp").to_dict()

        assert reported["updates"] == sum(worker["updates"] for worker in reported["workers"])
        assert reported["staleness"]["count"] == reported["updates"]
        assert [worker["name"] for worker in reported["workers"]] == ["fast/0", "slow/0"]


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_new_share_costs_its_additional_time_once(mode: str) -> None:
    alone = [{**FAST, "new_share_s": 0.5}]

    result = ran(mode, "uniform", workers=alone, global_batch=10)

    assert result.time_s == pytest.approx(4 * 1.0 + 0.5)
