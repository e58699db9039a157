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
        self.device_handle = SimpleNamespace(
            current_stream=lambda: SimpleNamespace(wait_event=self.log.append)
        )
        self.comm_ctx: Any = SimpleNamespace(
            reduce_scatter_states=[], reduce_scatter_max_input_buffers=1
        )
        self._training_state = SimpleNamespace(name="PRE_BACKWARD")
        self._param_group_index, self._num_param_groups = 0, 1
        self._all_gather_result: Any = None
        self._post_reduce_event: Any = None
        self._all_reduce_state: Any = None

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

    def step(self, number: int, waits: int = 1) -> None:
        """Run a step of one second with waits."""
        if number:
            self._fetch(number)
        for _ in range(waits):
            event = f"gather {number}"
            vars(self.group)["_all_gather_result"] = SimpleNamespace(
                all_gather_event=event, all_gather_work=None
            )
            self.group.wait_for_unshard()
        self.device.host(1.0)
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


def test_older_releases_have_one_buffer() -> None:
    run = Run(comm_ctx=SimpleNamespace(reduce_scatter_state=_state("only")))
    run.group.post_backward()
    run.group.comm_ctx = SimpleNamespace(reduce_scatter_state=None)
    run.group.post_backward()

    assert run.group.log == ["only", "backward", "backward"]


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


def test_marks_that_cost_too_much_are_set_in_some_steps_only() -> None:
    run = Run()
    # In a step of about a second: 3.3 times what marks may cost.
    wait_s = MOST_COST * 3.3 / 4
    record = run.device.record

    def slowly() -> Any:
        run.device.host(wait_s / 2)
        return record()

    vars(run.device)["record"] = slowly
    for number in range(80):
        run.step(number, waits=4)
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
        assert unmarkable(group)
