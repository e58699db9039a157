"""Which waits of FSDP2 get marks, how often, and what else they change: nothing.

What the marks measure: tests/virtual_device/test_sharded_device.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenstride.runtime.engines.fsdp_stalls import MOST_COST, StallMarks, unmarkable
from evenstride.runtime.timing.device_timer import DeviceTimer, RankClock
from tests.unit.runtime.timing.test_device_timer import Device


class Group:
    """A parameter group that writes down what its stream waits for, and which methods run."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.reduce_grads, self.modules = True, [object()]
        self.stream = SimpleNamespace(wait_event=self.log.append)
        self.device_handle = SimpleNamespace(current_stream=lambda: self.stream)
        self.comm_ctx: Any = SimpleNamespace(
            reduce_scatter_states=[], reduce_scatter_max_input_buffers=1
        )
        self.is_unsharded = False
        self._training_state = SimpleNamespace(name="PRE_BACKWARD")
        self._param_group_index, self._num_param_groups = 0, 1
        self._all_gather_result: Any = None
        self._post_reduce_event: Any = None
        self._all_reduce_state: Any = None

    def unshard(self, async_op: bool = False) -> None:
        """Gather the parameters, unless that is done or under way."""
        if self._all_gather_result is None:
            self.log.append("gather ahead" if async_op else "gather")
            self._all_gather_result = SimpleNamespace(all_gather_event=None, all_gather_work=None)

    def _reset_iter_state(self) -> None:
        self.log.append("reset")

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather."""
        self.log.append("unshard")

    def post_backward(self) -> None:
        """Reduce gradients."""
        self.log.append("backward")

    def _wait_for_post_backward(self) -> None:
        self.log.append("reduce")


class Run:
    """A timer on a device, and a watched group."""

    def __init__(self, **state: Any) -> None:
        self.device, self.records = Device(), list[Any]()
        clock = RankClock(DeviceTimer(self.records, self.device, self.device))
        self.timer, self.group, self.marks = clock.timer, Group(), StallMarks(clock)
        vars(self.group).update(state)
        self.marks.watch(self.group)
        self._fetch(0)

    def _fetch(self, number: int) -> None:
        self.timer.fetch_started()
        self.timer.fetch_ended(number, 4, modelled=True)

    def step(self, number: int, waits: int = 1, work_s: float = 1.0) -> None:
        """Run a step with waits."""
        if number:
            self._fetch(number)
        for _ in range(waits):
            event = f"gather {number}"
            vars(self.group)["_all_gather_result"] = SimpleNamespace(
                all_gather_event=event, all_gather_work=None
            )
            self.group.wait_for_unshard()
        self.device.host(work_s)
        self.timer.gradients_ready()
        self.timer.synchronised()


def _state(event: str | None) -> Any:
    return SimpleNamespace(event=event)


@pytest.mark.parametrize(
    ("method", "state", "log"),
    [
        ("wait_for_unshard", {}, ["unshard"]),
        ("_wait_for_post_backward", {"_post_reduce_event": "own"}, ["own", "reduce"]),
        ("_wait_for_post_backward", {"_all_reduce_state": _state("all")}, ["all", "reduce"]),
        ("_wait_for_post_backward", {"_all_reduce_state": _state(None)}, ["reduce"]),
        ("post_backward", {}, ["backward"]),
    ],
)
def test_waits_come_first_and_the_method_follows(
    method: str, state: dict[str, Any], log: list[str]
) -> None:
    run = Run(**state)
    before = run.device.out

    getattr(run.group, method)()

    assert run.group.log == log
    assert run.device.out - before == (2 if len(log) > 1 else 0), (
        "two marks for each wait, none without"
    )


@pytest.mark.parametrize(
    ("most", "index", "reduces", "log"),
    [
        (1, 0, True, ["a", "c", "backward"]),
        (2, 0, True, ["a", "backward"]),
        (3, 0, True, ["a", "backward"]),
        (4, 0, True, ["backward"]),
        (1, 1, True, ["backward"]),  # not the last group of its module
        (1, 0, False, ["backward"]),
    ],
)
def test_a_buffer_is_waited_for_if_all_are_in_use(
    most: int, index: int, reduces: bool, log: list[str]
) -> None:
    states = [_state("a"), _state(None), _state("c")]
    run = Run(reduce_grads=reduces, _param_group_index=-index)
    run.group.comm_ctx = SimpleNamespace(
        reduce_scatter_states=states, reduce_scatter_max_input_buffers=most
    )

    run.group.post_backward()

    assert run.group.log == log


def test_before_torch_2_13_all_buffers_are_waited_for() -> None:
    run = Run(comm_ctx=SimpleNamespace(reduce_scatter_states=[_state("a"), _state("b")]))

    run.group.post_backward()

    assert run.group.log == ["a", "b", "backward"]


def test_before_torch_2_12_there_is_one_buffer() -> None:
    run = Run(comm_ctx=SimpleNamespace(reduce_scatter_state=_state("only")))
    run.group.post_backward()
    run.group.comm_ctx = SimpleNamespace(reduce_scatter_state=None)
    run.group.post_backward()

    assert run.group.log == ["only", "backward", "backward"]


@pytest.mark.parametrize(
    ("async_op", "on_compute", "state", "marks"),
    [
        (False, True, {}, 2),
        (False, False, {}, 0),  # on a stream of its own, for which wait_for_unshard waits
        (True, True, {}, 0),
        (False, True, {"is_unsharded": True}, 0),
        (False, True, {"_all_gather_result": _state(None)}, 0),
    ],
)
def test_an_all_gather_on_the_compute_stream_is_a_wait(
    async_op: bool, on_compute: bool, state: dict[str, Any], marks: int
) -> None:
    run = Run(**state)
    stream = run.group.stream if on_compute else SimpleNamespace()
    vars(run.group.comm_ctx)["get_all_gather_streams"] = lambda *_: (stream, stream)
    before = run.device.out

    run.group.unshard(async_op)

    gather = "gather ahead" if async_op else "gather"
    assert run.group.log == ([] if "_all_gather_result" in state else [gather])
    assert run.device.out - before == marks


@pytest.mark.parametrize(("by_hand", "log"), [(True, ["a", "b", "c", "end"]), (None, ["end"])])
def test_the_end_of_a_backward_pass_is_marked_if_the_program_ends_it(
    by_hand: bool | None, log: list[str]
) -> None:
    run = Run(_all_gather_result=SimpleNamespace(all_gather_event="c", all_gather_work=None))
    whole = SimpleNamespace(_fsdp_param_groups=[run.group])
    state = SimpleNamespace(
        _comm_ctx=SimpleNamespace(
            device_handle=run.group.device_handle,
            _last_post_reduce_events={"stream": "a"},
            reduce_scatter_states=[_state("b"), _state(None)],
        ),
        _state_ctx=SimpleNamespace(manual_backward_finalization_active=by_hand, all_states=[whole]),
        _end_backward_iteration=lambda: run.group.log.append("end"),
    )
    run.marks.watch_end(state)
    before = run.device.out

    state._end_backward_iteration()

    assert run.group.log == log
    assert run.device.out - before == (2 if by_hand else 0)


def test_after_an_error_the_step_is_not_modelled() -> None:
    run = Run()
    vars(run.group)["_reset_iter_state"]()
    for number in range(3):
        run.step(number)
    run.timer.settle()

    assert run.group.log[0] == "reset"
    assert [record.modelled for record in run.records] == [False, True]


@pytest.mark.parametrize(
    "state",
    [
        {"modules": [1, 2], "_training_state": SimpleNamespace(name="FORWARD")},
        {"comm_ctx": SimpleNamespace()},
    ],
    ids=["only some modules ran", "unknown buffers"],
)
def test_a_step_with_an_unknown_wait_is_not_modelled(state: dict[str, Any]) -> None:
    run = Run(**state)
    run.group.post_backward()
    for number in range(3):
        run.step(number)
    run.timer.settle()

    assert [record.modelled for record in run.records] == [False, True]


@pytest.mark.parametrize("longest_s", [1.0, 20.0], ids=["even", "one long step"])
def test_marks_that_cost_too_much_are_set_in_some_steps_only(longest_s: float) -> None:
    run = Run()
    # In a step of about a second: 3.3 times what marks may cost.
    wait_s = MOST_COST * 3.3 / 4
    record = run.device.record

    def slowly() -> Any:
        run.device.host(wait_s / 2)
        return record()

    vars(run.device)["record"] = slowly
    for number in range(80):
        run.step(number, waits=4, work_s=longest_s if number == 60 else 1.0)
    run.timer.settle()

    modelled = [one.step for one in run.records if one.modelled]
    assert modelled[:51] == list(range(51))
    assert modelled[52:] == [56, 60, 64, 68, 72, 76], "every fourth, after the first that told"


def test_marks_replace_earlier_ones() -> None:
    run = Run(_post_reduce_event="own")
    StallMarks(RankClock(run.timer)).watch(run.group)

    vars(run.group)["_wait_for_post_backward"]()

    assert run.group.log == ["own", "reduce"], "the wait is queued once"


def test_a_group_without_what_the_marks_read_is_left_alone() -> None:
    assert not unmarkable(Group())
    for name in ("_all_gather_result", "_all_reduce_state", "comm_ctx"):
        group = Group()
        delattr(group, name)
        assert unmarkable(group) == f"no FSDPParamGroup.{name}"
