"""FSDP2's waits, islands and refusals, on a group that is played and a clock moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenstride.errors import ConfigError
from evenstride.runtime.engines import fsdp, model_agreement
from evenstride.runtime.engines.fsdp import (
    check_engine,
    gathered,
    held_back,
    island_of,
    parameter_groups,
    subtract_collectives,
    uncounted,
)
from evenstride.runtime.engines.fsdp_stalls import StallMarks, unmarkable
from evenstride.runtime.engines.watched_models import fsdp_parts
from evenstride.runtime.timing.device_timer import RankClock
from tests.messages import raises_message
from tests.unit.runtime.timing.test_step_timer import Bench

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module|Full backward hook")

replaces_collectives = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="FSDP2 before torch 2.9"
)
regathers_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 of torch 2.6 changes parameters on a CPU that the backward pass needs",
)
RANKS, GATHER_S, SCATTER_S, REDUCE_S, WORK_S = 4, 5.0, 3.0, 7.0, 10.0


@pytest.fixture(autouse=True)
def played_group() -> Iterator[None]:
    """Be the third of four ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=2, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _sharded(*mesh: int, rest: bool = True) -> Any:
    """Return a model with two layers sharded by themselves, and perhaps a rest that is not."""
    names = ("island", "shard")[-len(mesh) :]
    whole = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())
    if rest:
        model.append(nn.Linear(4, 4))
    fully_shard(model[0], mesh=whole)
    fully_shard(model[2], mesh=whole)
    return fully_shard(model, mesh=whole)


class Collective:
    """A collective that takes its time by the clock, and counts how often it ran."""

    def __init__(self, bench: Bench, takes_s: float) -> None:
        self.bench, self.takes_s, self.runs = bench, takes_s, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, *_: Any, async_op: bool = False, **__: Any) -> dist.Work | None:
        self.runs += 1
        if async_op:
            return Later(self)
        self.bench.clock.spend(self.takes_s)
        return None


class Later(dist.Work):
    """A collective that takes its time when it is waited for."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self.collective = collective

    def wait(self, *_: Any) -> bool:
        """Let the time pass."""
        self.collective.bench.clock.spend(self.collective.takes_s)
        return True


class Rank:
    """A model whose collectives take seconds, on a rank whose own layers take seconds too."""

    def __init__(self, patch: pytest.MonkeyPatch, *mesh: int, rest: bool = True) -> None:
        self.bench, self.model = Bench(), _sharded(*mesh, rest=rest)
        self.gather = Collective(self.bench, GATHER_S)
        self.scatter = Collective(self.bench, SCATTER_S)
        self.reduce = Collective(self.bench, REDUCE_S)
        for part in (self.model, self.model[0], self.model[2]):
            part.set_custom_all_gather(self.gather)
            part.set_custom_reduce_scatter(self.scatter)
        patch.setattr(dist, "all_reduce", self.reduce)

    def step(self, *, ahead: bool = False) -> None:
        """Train a step, with work in forward and in backward."""
        bench = self.bench
        bench.fetch(0)
        if ahead:
            self.model[0].unshard(async_op=True)
            bench.clock.spend(WORK_S)
        y = self.model(torch.ones(3, 4))
        bench.clock.spend(WORK_S)
        y.register_hook(lambda _: bench.clock.spend(WORK_S))
        y.sum().backward()
        bench.timer.gradients_ready()
        bench.timer.synchronised()
        bench.leave()

    @property
    def collectives_s(self) -> float:
        """Time that all collectives have taken."""
        return sum(part.runs * part.takes_s for part in (self.gather, self.scatter, self.reduce))


@pytest.mark.parametrize(
    ("mesh", "runs"),
    [((4,), (5, 3, 0)), ((2, 2), (5, 3, 3)), ((4, 1), (0, 0, 3))],
    ids=["one island", "two islands", "islands of one rank"],
)
@pytest.mark.parametrize("ahead", [False, True])
@replaces_collectives
def test_collectives_are_waiting_and_the_rest_is_work(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], runs: tuple[int, ...], ahead: bool
) -> None:
    rank = Rank(monkeypatch, *mesh)

    assert not uncounted(rank.model)
    subtract_collectives(rank.model, RankClock(rank.bench.timer))
    rank.step(ahead=ahead)

    (record,) = rank.bench.records
    assert (rank.gather.runs, rank.scatter.runs, rank.reduce.runs) == runs
    assert record.busy_s == (2 + ahead) * WORK_S
    assert record.wait_s == rank.collectives_s > 0


@replaces_collectives
def test_without_counting_they_pass_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, 2, 2)

    rank.step()

    assert rank.bench.records[0].busy_s == 2 * WORK_S + rank.collectives_s


@replaces_collectives
def test_a_second_timer_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, earlier = Rank(monkeypatch, 2, 2), Bench()

    subtract_collectives(rank.model, RankClock(earlier.timer))
    subtract_collectives(rank.model, RankClock(rank.bench.timer))
    monkeypatch.setattr(earlier, "timer", None)
    rank.step()

    assert rank.bench.records[0].wait_s == rank.collectives_s


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@replaces_collectives
def test_a_hook_of_the_users_still_runs_and_is_waiting(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...]
) -> None:
    rank, seen = Rank(monkeypatch, *mesh), list[Tensor]()

    def reduce_by_hand(gradient: Tensor) -> None:
        seen.append(gradient)
        rank.bench.clock.spend(1.0)

    rank.model[2].set_all_reduce_hook(reduce_by_hand)
    subtract_collectives(rank.model, RankClock(rank.bench.timer))
    rank.step()

    assert len(seen) == 1
    assert rank.bench.records[0].busy_s == 2 * WORK_S
    assert rank.bench.records[0].wait_s == rank.collectives_s + 1.0


@replaces_collectives
def test_an_all_reduce_that_is_left_out_marks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, 2, 2)
    rank.model.set_requires_all_reduce(False)

    subtract_collectives(rank.model, RankClock(rank.bench.timer))
    rank.step()

    assert rank.reduce.runs == 0
    assert rank.bench.records[0].busy_s == 2 * WORK_S


@pytest.mark.parametrize(
    "group",
    [
        SimpleNamespace(device=torch.device("cuda"), _reduce_scatter_comm=None),
        SimpleNamespace(device=torch.device("cpu")),
    ],
    ids=["CUDA, other internals", "torch before 2.8"],
)
def test_waits_that_cannot_be_counted_are_reported_and_not_marked(
    monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    model, before = _sharded(4), dict(vars(group))
    monkeypatch.setattr(fsdp, "parameter_groups", lambda _: [group])

    subtract_collectives(model, RankClock(Bench().timer))

    assert "waits from work" in uncounted(model)
    assert vars(group) == before


class Waits:
    """What the compute stream of real FSDP2 waits for before the backward pass ends."""

    def __init__(self, patch: pytest.MonkeyPatch, timer: Any) -> None:
        self.marked, self.unmarked = list[Any](), list[Any]()
        self._inside = self._ended = False
        compute = torch.cpu.current_stream()

        def wait_event(stream: Any, event: Any) -> None:
            if stream is compute and not self._ended:
                (self.marked if self._inside else self.unmarked).append(event)

        gather = vars(_fsdp_param_group)["foreach_all_gather"]

        def gather_on(params: Any, group: Any, async_op: bool, *rest: Any) -> Any:
            if not async_op and compute in rest[:2]:
                (self.marked if self._inside else self.unmarked).append("gather")
            return gather(params, group, async_op, *rest)

        patch.setattr(_fsdp_param_group, "foreach_all_gather", gather_on)
        # Streams of a CPU have neither method in torch 2.6.
        patch.setattr(torch.cpu.Stream, "wait_event", wait_event, raising=False)
        patch.setattr(torch.cpu.Stream, "record_event", lambda _: torch.cpu.Event(), raising=False)
        for name, inside in (("wait_began", True), ("wait_ended", False)):
            patch.setattr(timer, name, partial(setattr, self, "_inside", inside))
        end = FSDPState._root_post_backward_final_callback

        def ended(state: Any) -> None:
            # From torch 2.15 on, a program can wait by itself after the backward pass.
            context: Any = state._state_ctx
            self._ended = not getattr(context, "manual_backward_finalization_active", False)
            end(state)

        patch.setattr(FSDPState, "_root_post_backward_final_callback", ended)


def _watched(bench: Bench, *mesh: int) -> Any:
    """Return a sharded model whose waits are marked as on a device."""
    model, marks = _sharded(*mesh), StallMarks(RankClock(bench.timer))
    for part in fsdp_parts(model):
        marks.watch_end(part._get_fsdp_state())
        for group in parameter_groups(part):
            assert not unmarkable(group)
            marks.watch(group)
    return model


def test_steps_are_marked_as_often_as_the_cost_of_marks_allows() -> None:
    bench = Bench()

    class Group:
        comm_ctx = None

        @property
        def _all_gather_result(self) -> None:
            bench.clock.spend(0.0003)  # of the host, 3 % of a step

        def wait_for_unshard(self) -> None:
            bench.clock.spend(0.0102)

    group = Group()
    StallMarks(RankClock(bench.timer)).watch(group)
    for step in range(100):
        bench.fetch(step)
        group.wait_for_unshard()
        bench.train(0.0, 0.0, 0.0)
    bench.leave()

    later = [record for record in bench.records if record.step > 52]
    assert [record.step for record in later if record.modelled] == [60, 70, 80, 90]
    unmarked = [record.busy_s for record in later if not record.modelled]
    assert unmarked == pytest.approx([0.0102] * len(unmarked)), "nothing is looked for"


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize(
    ("kept", "count"), [pytest.param(False, 7, marks=regathers_on_cpu), (True, 5)]
)
def test_on_a_device_every_wait_is_queued_between_marks_first(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], kept: bool, count: int
) -> None:
    bench = Bench()
    model, waits = _watched(bench, *mesh), Waits(monkeypatch, bench.timer)

    bench.fetch(0)
    with held_back(model, last=True) if kept else nullcontext():
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()

    # Three groups gather in forward, two perhaps again in backward, and two wait for a buffer.
    assert len(waits.marked) == count
    assert waits.unmarked == waits.marked, "torch repeats what is marked, and has no other wait"


def test_on_a_device_an_all_gather_by_hand_is_between_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    model, waits = _watched(bench, 4), Waits(monkeypatch, bench.timer)

    bench.fetch(0)
    model[0].unshard()

    assert waits.marked[0] == "gather"
    assert waits.unmarked == waits.marked[1:], "only its end is waited for again"
    assert len(waits.unmarked) == 1


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15"
)
@pytest.mark.parametrize("async_op", [False, True])
def test_on_a_device_a_backward_pass_that_is_ended_by_hand_has_marks(
    monkeypatch: pytest.MonkeyPatch, async_op: bool
) -> None:
    bench = Bench()
    model, waits = _watched(bench, 2, 2), Waits(monkeypatch, bench.timer)
    model.set_manual_backward_finalization(True)

    bench.fetch(0)
    model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    before = len(waits.marked)
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        assert len(waits.marked) == before
        handle.wait()

    assert before == 7
    assert len(waits.marked) == before + 2, "the last reduction, and the buffer of its scatter"
    assert waits.unmarked == waits.marked


def test_a_model_without_fsdp_has_nothing_to_count() -> None:
    assert not uncounted(nn.Linear(1, 1))


@replaces_collectives
def test_a_step_gathers_and_scatters_once_whatever_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []
    for count in (1, 3):
        rank = Rank(monkeypatch, 2, 2)
        for number in range(count):
            with held_back(rank.model, last=number == count - 1):
                rank.model(torch.ones(3, 4)).sum().backward()
        done.append((rank.gather.runs, rank.scatter.runs, rank.reduce.runs))

    assert done == [(3, 3, 3)] * 2


@replaces_collectives
def test_after_a_micro_batch_that_broke_off_the_model_synchronises_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch, 2, 2)

    with pytest.raises(ZeroDivisionError), held_back(rank.model, last=False):
        raise ZeroDivisionError
    for _ in range(2):
        rank.model(torch.ones(3, 4)).sum().backward()

    assert rank.gather.runs == rank.scatter.runs == rank.reduce.runs == 2 * 3


@pytest.mark.parametrize("forwards", [0, 1, 3])
@pytest.mark.parametrize("rest", [False, True])
@replaces_collectives
def test_evaluation_gathers_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, forwards: int, rest: bool
) -> None:
    rank, untouched = Rank(monkeypatch, 4, rest=rest), Rank(monkeypatch, 4, rest=rest)

    with torch.no_grad(), gathered(rank.model):
        for _ in range(forwards):
            rank.model(torch.ones(3, 4))
    assert rank.gather.runs == 2 + rest, "once per layer"
    for trained in (rank, untouched):
        trained.gather.runs = 0
        trained.step()

    assert rank.gather.runs == untouched.gather.runs == 4 + rest


@pytest.mark.parametrize(
    ("mesh", "island"), [((4,), (0, 1, 2, 3)), ((2, 2), (2, 3)), ((4, 1), (2,))]
)
def test_a_shard_group_is_the_ranks_of_one_replica(
    mesh: tuple[int, ...], island: tuple[int]
) -> None:
    assert island_of(_sharded(*mesh)) == island


def test_without_sharding_everyone_is_alone() -> None:
    assert island_of(nn.Linear(1, 1)) == (2,)
    dist.destroy_process_group()
    assert island_of(nn.Linear(1, 1)) == (0,)
    dist.init_process_group("fake", rank=2, world_size=RANKS, store=FakeStore())


def _deepspeed() -> nn.Module:
    kind = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    engine: nn.Module = type("Wrapped", (kind,), {})(1, 1)
    return engine


def _megatron() -> nn.Module:
    parts = {"__module__": "megatron.core.distributed", "finish_grad_sync": lambda _: None}
    engine: nn.Module = type("DistributedDataParallel", (nn.Linear,), parts)(1, 1)
    return engine


def _fsdp1() -> nn.Module:
    engine: nn.Module = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(engine)
    return engine


def _divided() -> nn.Module:
    model = _sharded(4)
    model[2].set_gradient_divide_factor(1.0)
    engine: nn.Module = model
    return engine


def _half_of_the_ranks() -> nn.Module:
    return DistributedDataParallel(nn.Linear(1, 1), process_group=dist.new_group([2, 3]))


@pytest.mark.parametrize(
    ("make", "kinds", "message"),
    [
        (_fsdp1, ["cpu"], ("FSDP1", "FSDP2", "fully_shard")),
        (lambda: nn.DataParallel(nn.Linear(1, 1)), ["cpu"], ("nn.DataParallel",)),
        (_deepspeed, ["cpu"], ("DeepSpeed", "DistributedDataParallel")),
        (_megatron, ["cpu"], ("Megatron's DistributedDataParallel", "fully_shard")),
        (lambda: nn.Sequential(_fsdp1()), ["cpu"], ("FSDP1",)),
        (lambda: _sharded(4), ["cpu", "cpu", "cuda", "cpu"], ()),
        (lambda: _sharded(4), ["cpu"] * 2, ("4 ranks", "process_group")),
        (lambda: _sharded(2, 2), ["cpu"] * 2, ("4 ranks",)),
        pytest.param(
            _divided,
            ["cpu"] * 4,
            ("1 ranks", "gradient_divide_factor"),
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_gradient_divide_factor"), reason="torch before 2.8"
            ),
        ),
        (_half_of_the_ranks, ["cpu"] * 4, ("DistributedDataParallel", "2 ranks")),
    ],
)
def test_an_engine_that_would_be_wrong_is_refused(
    make: Callable[[], nn.Module], kinds: list[str], message: tuple[str, ...]
) -> None:
    model = make()

    with raises_message(ConfigError, *message):
        check_engine(model, kinds)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: DistributedDataParallel(nn.Linear(1, 1)), ["cpu"] * 4),
        (lambda: DistributedDataParallel(nn.Linear(1, 1)), ["cpu", "cuda", "cpu", "cuda"]),
        (lambda: _sharded(4), ["cpu"] * 4),
        (lambda: _sharded(2, 2), ["cpu"] * 4),
        (lambda: _sharded(4, 1), ["cuda"] * 4),
        (lambda: nn.Linear(1, 1), ["cpu"]),
    ],
)
def test_an_engine_that_averages_over_the_ranks_passes(
    make: Callable[[], nn.Module], kinds: list[str]
) -> None:
    check_engine(make(), kinds)


@pytest.mark.parametrize(
    ("connections", "backend", "device", "refused"),
    [
        (1, "cuda:nccl", "cuda", True),
        (1, "cpu:gloo,cuda:nccl", "cuda", True),
        (8, "cuda:nccl", "cuda", False),
        (None, "cuda:nccl", "cuda", False),
        (1, "gloo", "cuda", False),
        (1, "cpu:gloo,cuda:nccl", "cpu", False),
    ],
)
def test_one_hardware_queue_under_nccl_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
    connections: int | None,
    backend: str,
    device: str,
    refused: bool,
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
    monkeypatch.setattr(model_agreement, "device_of", lambda _: torch.device(device))

    why = model_agreement.why_not_measured(nn.Linear(1, 1), dist.group.WORLD, connections)

    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in why) == refused
    assert bool(why) == refused
