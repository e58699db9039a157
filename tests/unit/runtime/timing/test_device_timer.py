"""One rank's times on a device that runs behind its program, both clocks moved by hand."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenstride.errors import UsageError, WorkerLost
from evenstride.runtime.failures import heartbeat
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.session import model_watcher
from evenstride.runtime.timing import device_timer
from evenstride.runtime.timing.device_timer import DeviceTimer
from evenstride.runtime.timing.step_timer import StepRecord, StepTimer
from tests.inside import session
from tests.messages import check_message, raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.quiet import Clock, channel
from tests.unit.runtime.weighing import Rank


@dataclass
class Mark:
    """A point that the device passes at a time known in advance."""

    device: Device
    at_s: float

    def query(self) -> bool:
        return self.device.now_s >= self.at_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, end_event: Mark) -> float:
        assert self.query(), "read too early"
        assert end_event.query(), "read too early"
        return 1000.0 * (end_event.at_s - self.at_s)


class Device:
    """A device with one stream, and the host's clock."""

    def __init__(self) -> None:
        self.now_s, self.free_s = 100.0, 0.0
        self.out, self.made = 0, 0
        self.capturing = False

    def __call__(self) -> float:
        return self.now_s

    def host(self, seconds: float) -> None:
        """Let the program spend time."""
        self.now_s += seconds

    def queue(self, seconds: float) -> None:
        """Queue work for the device; the program goes on at once."""
        self.free_s = max(self.free_s, self.now_s) + seconds

    def catch_up(self) -> None:
        """Let the program wait for the device."""
        self.now_s = max(self.now_s, self.free_s)

    def record(self) -> Mark:
        self.out += 1
        self.made = max(self.made, self.out)
        return Mark(self, max(self.free_s, self.now_s))

    def free(self, mark: Mark) -> None:
        assert mark.query(), "freed too early"
        self.out -= 1


class Bench:
    """A timer on such a device, and the steps it has finished."""

    def __init__(self) -> None:
        self.device, self.records = Device(), list[StepRecord]()
        self.retries = 3
        self.timer = DeviceTimer(self.records, self.device, self.device, lambda: self.retries)

    def step(
        self,
        number: int,
        *,
        data_s: float = 0.0,
        forward_s: float = 0.0,
        backward_s: float = 0.0,
        others_s: float = 0.0,
        optimizer_s: float = 0.0,
        blocking: bool = False,
    ) -> None:
        """Train one step: data on the host, all else queued, unless communication blocks."""
        self.timer.fetch_started()
        self.device.host(data_s)
        self.timer.fetch_ended(number, 8, modelled=True)
        self.device.queue(forward_s)
        self.device.queue(backward_s)
        self.timer.gradients_ready()
        self.device.queue(others_s)  # what the compute stream waits for
        if blocking:
            self.device.catch_up()
        self.timer.synchronised()
        self.device.queue(optimizer_s)

    def end(self) -> None:
        """Leave the loop and let the device finish."""
        self.timer.pass_ended()
        self.timer.settle()


def test_queued_work_is_measured_where_it_runs() -> None:
    bench = Bench()

    for number in range(4):
        bench.step(number, forward_s=3.0, backward_s=6.0, others_s=5.0, optimizer_s=1.0)
    assert bench.device.now_s == 100.0, "the program never waited"
    assert not bench.records, "the device has done nothing yet"
    bench.end()

    assert bench.records == [StepRecord(n, 8, 10.0, 5.0, 0.0, 0.0, 0.0, True) for n in range(4)]


def test_a_step_in_which_the_device_did_work_of_ours_is_left_out() -> None:
    bench = Bench()

    for number in range(2):
        bench.step(number, forward_s=3.0, others_s=5.0)
        marks = bench.device.out
        bench.timer.exclude(2.0)
        assert bench.device.out == marks, "each would cost time"
    bench.end()

    assert [(record.step, record.modelled) for record in bench.records] == [(0, False), (1, False)]


def _stands(bench: Bench, seconds: float) -> tuple[str, int]:
    """Let the program stand still, and return what the rank then reports."""
    assert bench.timer.at  # what asks is asked once a second
    bench.device.host(seconds)
    return bench.timer.at


@pytest.mark.parametrize(
    ("work", "doing"),
    [
        ({"others_s": 1e9}, "sync"),  # a collective of a lost rank
        ({"backward_s": 1e9}, "compute"),
        ({"forward_s": 1e9, "others_s": 1.0}, "compute"),
    ],
)
def test_a_program_that_stands_still_is_said_to_do_what_its_device_does(
    work: dict[str, float], doing: str
) -> None:
    bench = Bench()
    bench.step(6, forward_s=0.1)
    bench.step(7, **work)  # type: ignore[arg-type]

    assert bench.timer.at == ("between", 7), "the program has moved just now"
    assert _stands(bench, 1.0) == ("between", 7)
    assert _stands(bench, 2.0) == (doing, 7)


def test_a_program_that_stands_still_in_the_opening_waits_for_the_device_in_a_fetch() -> None:
    bench = Bench()
    bench.step(7, others_s=1e9)
    bench.timer.fetch_started()

    assert bench.timer.at == ("data", 7)
    assert _stands(bench, 3.0) == ("sync", 7)


def test_a_program_that_stands_still_though_its_device_is_done_is_asked_itself() -> None:
    bench = Bench()
    bench.step(7, forward_s=1.0)
    bench.device.catch_up()

    assert _stands(bench, 10.0) == ("between", 7)


def test_a_program_that_moves_is_never_asked_of_its_device() -> None:
    bench = Bench()
    for number in range(8):
        bench.step(number, others_s=1e9)
        assert _stands(bench, 2.0) == ("between", number)


def test_a_device_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Mark) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    bench = Bench()
    bench.step(7, others_s=1e9)
    assert bench.timer.at == ("between", 7)
    monkeypatch.setattr(Mark, "query", broken)

    assert _stands(bench, 3.0) == ("between", 7)


def test_a_rank_whose_device_waits_watches_the_others_and_names_the_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    bench, lost = Bench(), list[tuple[int, str]]()
    bench.step(7, others_s=1e9)
    of = channel(0, 2)
    of.put("beat/1", '[3, "compute", 7, null]')
    peers = tuple(Peer(rank, "host", f"place {rank}", 1) for rank in range(2))
    mine = heartbeat.Heartbeats(
        of, peers, lambda: bench.timer.at, lambda *it: lost.append(it), 30.0
    )

    for _ in range(40):
        clock.sleep(1.0)
        bench.device.host(1.0)
        mine.look()
    mine.close(7, None)

    check_message(caplog.messages[0], "rank 1", "step 7")
    check_message(lost, "30 s", "step 7")


@pytest.mark.parametrize(
    ("loading_s", "noticed_s"),
    [(4.0, [4.0, 0.0, 0.0]), (25.0, [25.0, 15.0, 15.0])],
    ids=["hides behind the device", "stalls it"],
)
def test_loading_is_the_workers_own_time_as_far_as_the_device_notices(
    loading_s: float, noticed_s: list[float]
) -> None:
    bench = Bench()

    for number in range(3):
        bench.step(number, data_s=loading_s, forward_s=10.0)
    bench.end()

    assert [record.data_s for record in bench.records] == noticed_s
    assert [record.busy_s for record in bench.records] == [10.0 + wait_s for wait_s in noticed_s]


def test_communication_that_blocks_the_program_is_waiting_all_the_same() -> None:
    bench = Bench()

    for number in range(3):
        bench.step(number, forward_s=2.0, backward_s=2.0, others_s=7.0, blocking=True)
    bench.end()

    assert [(r.busy_s, r.wait_s) for r in bench.records] == [(4.0, 7.0)] * 3


def test_steps_are_reported_in_order_as_the_device_passes_them() -> None:
    bench = Bench()
    for number in range(3):
        bench.step(number, forward_s=10.0)

    seen = []
    for _ in range(4):
        bench.device.host(10.0)
        bench.timer.fetch_started()
        seen.append([record.step for record in bench.records])

    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_micro_batches_add_up() -> None:
    bench = Bench()

    for data_s in (1.0, 2.0):
        bench.timer.fetch_started()
        bench.device.host(data_s)
        bench.timer.fetch_ended(0, 8, modelled=True)
        bench.device.queue(10.0)
        bench.device.catch_up()
    bench.timer.gradients_ready()
    bench.timer.synchronised()
    bench.step(1)
    bench.end()

    assert bench.records[0] == StepRecord(0, 8, 23.0, 0.0, 3.0, 0.0, 0.0, True)


@pytest.mark.parametrize(("backlog_s", "counted_s"), [(0.0, 6.0), (4.0, 2.0), (9.0, 0.0)])
def test_waiting_inside_a_pass_counts_as_far_as_the_device_notices(
    backlog_s: float, counted_s: float
) -> None:
    bench = Bench()

    bench.timer.fetch_started()
    bench.timer.fetch_ended(0, 8, modelled=True)
    bench.device.queue(backlog_s)
    with contextlib.suppress(KeyError), bench.timer.waiting():
        bench.device.host(6.0)
        raise KeyError
    bench.device.queue(3.0)
    bench.timer.gradients_ready()
    bench.timer.synchronised()
    bench.end()

    assert bench.records == [StepRecord(0, 8, backlog_s + 3.0, counted_s, 0.0, 0.0, 0.0, True)]


@pytest.mark.parametrize(("backlog_s", "data_s"), [(0.0, 5.0), (3.0, 2.0), (20.0, 0.0)])
def test_waiting_for_a_decision_is_not_loading(backlog_s: float, data_s: float) -> None:
    bench = Bench()
    bench.step(0, forward_s=backlog_s)

    bench.timer.fetch_started()
    bench.device.host(12.0)  # of which 7 for the decision
    bench.timer.control_waited(7.0)
    bench.timer.fetch_ended(1, 8, modelled=True)
    bench.timer.gradients_ready()
    bench.timer.synchronised()
    bench.end()

    second = bench.records[1]
    assert (second.data_s, second.control_wait_s, second.wait_s) == (data_s, 7.0, 0.0)


def test_waiting_during_a_fetch_belongs_to_the_step_that_is_fetched() -> None:
    bench = Bench()
    bench.step(0, forward_s=1.0, others_s=1.0)

    bench.timer.fetch_started()
    bench.device.catch_up()
    with bench.timer.waiting():
        bench.device.host(2.0)
    bench.device.host(3.0)
    bench.timer.fetch_ended(1, 8, modelled=True)
    bench.device.queue(10.0)
    bench.timer.gradients_ready()
    bench.timer.synchronised()
    bench.end()

    first, second = bench.records
    assert (first.wait_s, second.wait_s, second.data_s, second.busy_s) == (1.0, 2.0, 3.0, 13.0)


def test_time_after_the_loop_belongs_to_no_step() -> None:
    bench = Bench()
    bench.step(0, forward_s=5.0)
    bench.end()

    bench.device.host(50.0)
    bench.device.queue(500.0)
    bench.step(0, forward_s=5.0)
    bench.end()

    assert [record.busy_s for record in bench.records] == [5.0, 5.0]


def test_a_step_that_is_left_in_the_middle_is_not_reported() -> None:
    bench = Bench()
    bench.timer.fetch_started()
    bench.timer.fetch_ended(0, 8, modelled=True)
    bench.device.queue(9.0)
    bench.timer.pass_ended()
    bench.step(0, forward_s=5.0)
    bench.end()

    assert bench.records == [StepRecord(0, 8, 5.0, 0.0, 0.0, 0.0, 0.0, True)]


def test_it_goes_on_where_the_hosts_timer_stood() -> None:
    device, records = Device(), list[StepRecord]()
    host = StepTimer(records, device)
    host.fetch_started()
    host.fetch_ended(4, 8, modelled=True)

    timer = DeviceTimer.instead_of(host, device)
    assert timer.at == ("compute", 4)
    timer.gradients_ready()
    assert timer.at == ("sync", 4)
    timer.synchronised()
    timer.fetch_started()
    timer.fetch_ended(5, 8, modelled=True)
    device.queue(2.0)
    timer.gradients_ready()
    timer.synchronised()
    timer.pass_ended()
    timer.settle()

    assert [(record.step, record.busy_s) for record in records] == [(5, 2.0)]


class _OnDevice(torch.Tensor):
    """A tensor that says it lies on a CUDA device."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_a_loss_on_a_device_puts_the_clock_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, rank = Device(), Rank()
    monkeypatch.setattr(device_timer, "CudaMarks", lambda _: device)
    on_host = rank.clock.timer
    for _ in range(2):
        rank.take(4, 4)
        rank.scaling.scale(rank.loss().as_subclass(_OnDevice), None).backward()  # type: ignore[no-untyped-call]

    assert not on_host.on_device
    assert rank.clock.timer.on_device
    assert device.out == 4, "two marks for each backward pass, on one timer"


@pytest.mark.parametrize(("why", "timed"), [("", True), ("no events", False)])
def test_another_accelerator_has_the_clock_if_it_can_be_timed(
    monkeypatch: pytest.MonkeyPatch, why: str, timed: bool
) -> None:
    monkeypatch.setattr(device_timer, "untimed", lambda _: why)
    monkeypatch.setattr(device_timer, "StreamMarks", lambda _: Device())
    rank = Rank()
    rank.clock.time_on(torch.device("xpu", 0))

    assert rank.clock.timer.on_device == timed
    assert rank.clock.device == torch.device("xpu:0" if timed else "cpu")


@pytest.mark.parametrize(("index", "elapsed_ms", "why"), [(1, 0.5, ""), (2, 0.0, "same time")])
def test_an_accelerator_whose_events_do_nothing_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, index: int, elapsed_ms: float, why: str
) -> None:
    event = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda _: elapsed_ms)
    marks = SimpleNamespace(record=lambda: event)
    monkeypatch.setattr(device_timer, "StreamMarks", lambda _: marks)

    # No other test asks for these devices, whose results are kept.
    found = device_timer.untimed(torch.device("meta", index))

    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(("model", "loss"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_the_clock_is_where_the_model_is_wherever_its_loss_is(
    monkeypatch: pytest.MonkeyPatch, model: str, loss: str
) -> None:
    monkeypatch.setattr(device_timer, "CudaMarks", lambda _: Device())
    rank = Rank()
    rank.step.watch(rank.model)
    rank.clock.time_on(torch.device(model, 0))
    rank.take(4, 4)
    value = rank.loss()
    rank.scaling.scale(value.as_subclass(_OnDevice) if loss == "cuda" else value, None)

    assert rank.clock.timer.on_device == (model == "cuda")


def test_a_watched_model_moves_the_clock_to_its_device(
    monkeypatch: pytest.MonkeyPatch, make_stride: MakeStride
) -> None:
    monkeypatch.setattr(model_watcher, "device_of", lambda _: torch.device("cuda", 0))
    stride = make_stride()

    stride.watch(nn.Linear(1, 1))

    assert session(stride).state.clock.timer.on_device


def test_a_step_that_is_captured_as_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, rank = Device(), Rank()
    monkeypatch.setattr(device_timer, "CudaMarks", lambda _: device)
    rank.take(4, 4)
    device.capturing = True

    with raises_message(UsageError, "CUDA", "make_graphed_callables"):
        rank.scaling.scale(rank.loss().as_subclass(_OnDevice), None)


@pytest.mark.parametrize("why", ["device", "compiled"])
def test_the_first_step_at_a_size_is_not_modelled_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    records: list[StepRecord] = []
    device, rank = Device(), Rank()
    rank.clock.timer = StepTimer(records, device)
    monkeypatch.setattr(device_timer, "CudaMarks", lambda _: device)
    if why == "device":
        rank.clock.time_on(torch.device("cuda", 0))
    compiled = why == "compiled"
    for number, samples in enumerate((4, 4, 5, 5, 4, 5, 4)):
        rank.clock.timer.fetch_started()
        draw = rank.take(samples, 9, step=number)
        rank.clock.timer.fetch_ended(number, samples, modelled=True)
        rank.clock.handed_out(draw.samples, compiled=compiled)
        rank.gradient()

    assert [one.modelled for one in records][:5] == [False, True, False, True, True]


def test_a_batch_that_was_drawn_but_not_trained_does_not_make_its_size_known() -> None:
    records: list[StepRecord] = []
    rank = Rank()
    rank.clock.timer = StepTimer(records)
    for trained in (False, True):
        rank.clock.timer.fetch_started()
        rank.clock.timer.fetch_ended(0, 4, modelled=True)
        rank.clock.handed_out(4, compiled=True, fresh=True)
        if trained:
            rank.clock.timer.synchronised()
        rank.clock.timer.pass_ended()

    assert [one.modelled for one in records] == [False]


def test_on_the_host_the_first_step_at_a_size_is_like_any_other() -> None:
    records: list[StepRecord] = []
    rank = Rank()
    rank.clock.timer = StepTimer(records)
    for number in range(2):
        rank.clock.timer.fetch_started()
        rank.clock.timer.fetch_ended(number, 4, modelled=True)
        rank.clock.handed_out(4, compiled=False)
        rank.clock.timer.synchronised()

    assert [one.modelled for one in records] == [True]


def test_a_loss_on_the_host_leaves_the_clock_where_it_is() -> None:
    rank = Rank()
    timer = rank.clock.timer
    rank.take(4, 4)
    rank.scaling.scale(rank.loss(), None)

    assert rank.clock.timer is timer


_seconds = st.integers(0, 50).map(float)


@given(steps=st.lists(st.tuples(*[_seconds] * 5), min_size=2, max_size=20))
def test_device_times_add_up_to_the_devices_time(
    steps: list[tuple[float, float, float, float, float]],
) -> None:
    bench = Bench()
    for number, (data_s, forward_s, backward_s, others_s, optimizer_s) in enumerate(steps):
        bench.step(
            number,
            data_s=data_s,
            forward_s=forward_s,
            backward_s=backward_s,
            others_s=others_s,
            optimizer_s=optimizer_s,
        )
    bench.end()

    queued_s = sum(sum(step[1:]) for step in steps)
    stalled_s = sum(record.data_s for record in bench.records)
    assert [record.wait_s for record in bench.records] == [step[3] for step in steps]
    # Every moment of the device is in one step: what it did, and what it idled for data.
    assert bench.device.free_s - 100.0 == queued_s + stalled_s
    assert bench.device.out <= 1, "events are used again"


@pytest.mark.parametrize("how", ["in order", "lost", "raising"])
def test_an_end_waits_for_the_device_only_where_nothing_has_failed(
    make_stride: MakeStride, how: str
) -> None:
    stride = make_stride()
    parts = session(stride)
    bench = Bench()
    parts.state.clock.timer = bench.timer
    bench.step(7, others_s=1e9)
    if how == "lost":
        parts.state.gate.fail(WorkerLost("rank 1 is gone"))

    with contextlib.suppress(ValueError), contextlib.ExitStack() as stack:
        stack.callback(stride.close)
        if how == "raising":
            int("not a number")

    assert (bench.device.now_s > 1e8) == (how == "in order")
