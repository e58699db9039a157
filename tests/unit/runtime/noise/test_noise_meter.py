"""One process measures the noise of its gradient from micro-batches, or reports why it cannot."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstride
from evenstride.core.gradients.noise_scale import GradientNorms, NoiseEstimate
from evenstride.core.sampling.draw import Draw
from evenstride.errors import TraceError
from evenstride.runtime.noise import noise_meter
from evenstride.runtime.noise.noise_parts import Reading
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_noise
from tests.inside import session
from tests.messages import check_message, lines_with, raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.memory.test_oom_retry import Small
from tests.unit.runtime.solo import numbered

BATCH = 16
Traced = list[tuple[int, GradientNorms]]


class Solo:
    """A run of one process that keeps the ids of every micro-batch that counted."""

    def __init__(self, stride: evenstride.Stride, model: nn.Module | None = None) -> None:
        self.stride = stride
        self.model = model or nn.Linear(1, 1).double()
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.pieces: list[list[list[int]]] = [[]]
        self.passes = 1  # backward passes of each batch
        self.broken: Callable[[Tensor], Tensor] = lambda loss: loss
        self.zero = True
        self.watched = self.guarded = True

    def train(self, steps: int, **options: Any) -> Solo:
        """Train over one epoch of so many steps, without changing any weights."""
        loader = self.stride.loader(numbered(BATCH * steps), **options)
        model = self.stride.watch(self.model) if self.watched else self.model
        for ids, x in loader:
            guard = self.stride.guard() if self.guarded else nullcontext()
            with guard, self.stride.accumulate(model):
                loss = self.broken(weighed_loss(model, ids, x, weighed="weight_fn" in options))
                for _ in range(self.passes):
                    part = self.stride.scale(loss / self.passes)
                    part.backward(retain_graph=self.passes > 1)  # type: ignore[no-untyped-call]
            if self.stride.samples:
                self.pieces[-1].append(ids.tolist())
            if self.stride.synced:
                self.pieces.append([])
                if self.zero:
                    self.model.zero_grad()
        return self

    def expected(self, step: int, *, weighed: bool = False) -> GradientNorms:
        """Return the figures of a step as computed by another process."""
        pieces = self.pieces[step]
        weights = [float(sum(ids) + len(ids)) if weighed else len(ids) for ids in pieces]
        gradients = [self._gradient(ids, weighed=weighed) for ids in pieces]
        parts = zip(weights, gradients, strict=True)
        mean = sum((w / sum(weights) * g for w, g in parts), torch.zeros(()))
        squared = [float(gradient.square().sum()) for gradient in gradients]
        return GradientNorms.of(weights, squared, float(mean.square().sum()))

    def _gradient(self, ids: list[int], *, weighed: bool) -> Tensor:
        xs = numbered(BATCH * (len(self.pieces) - 1))[ids][1]
        self.model.zero_grad()
        loss = weighed_loss(self.model, torch.tensor(ids), xs, weighed=weighed)
        loss.backward()  # type: ignore[no-untyped-call]
        flat = [p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return torch.cat(flat)


def weighed_loss(model: nn.Module, ids: Tensor, x: Tensor, *, weighed: bool) -> Tensor:
    """Return the mean loss over a batch, of samples or by their numbers."""
    squares = (model(x.double()) - 0.3 * ids.double()[:, None]).square()[:, 0]
    weights = (ids + 1.0).double() if weighed else torch.ones(len(ids), dtype=torch.float64)
    loss: Tensor = (weights * squares).sum() / weights.sum()
    return loss


def by_number(batch: Any) -> float:
    """Return the weight of a batch: the sum of its samples' numbers, from 1."""
    return float((batch[0] + 1).sum())


def agrees(traced: GradientNorms, expected: GradientNorms) -> bool:
    """Return whether two are equal up to rounding."""
    alike = (traced.parts, traced.batch) == (expected.parts, expected.batch)
    numbers = (expected.local, expected.mean)
    return alike and (traced.local, traced.mean) == pytest.approx(numbers, rel=1e-9)


@pytest.fixture
def measured(make_stride: MakeStride, tmp_path: Path) -> Callable[..., Solo]:
    """Return a run that measures every step, and writes its trace."""

    def make(model: nn.Module | None = None, **settings: Any) -> Solo:
        settings = {"noise_every": 1, "trace": tmp_path, **settings}
        return Solo(make_stride(global_batch=BATCH, **settings), model)

    return make


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[Solo], Traced]:
    """Return the measured steps in the trace of a run, after closing the run."""

    def read(solo: Solo) -> Traced:
        solo.stride.close()
        return list(read_noise(tmp_path))

    return read


def test_micro_batches_are_compared_with_their_mean(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced], tmp_path: Path
) -> None:
    solo = measured().train(5, max_micro_batch=6)

    found = traced(solo)

    assert [step for step, _ in found] == list(range(5))
    assert min(norms.parts for _, norms in found) == 3, "16 samples, at most 6 at once"
    assert all(agrees(norms, solo.expected(step)) for step, norms in found)
    assert replay(tmp_path).identical


def test_the_summary_has_the_figures_of_the_steps(measured: Callable[..., Solo]) -> None:
    solo = measured().train(5, max_micro_batch=6)
    solo.stride.close()
    estimate = NoiseEstimate()
    for step in range(5):
        estimate = estimate.after(solo.expected(step))

    summary = solo.stride.summary()

    assert summary.noise is not None
    assert (summary.noise.steps, summary.noise.every, summary.noise.why) == (5, 1, "")
    assert summary.noise.noise == pytest.approx(estimate.noise)
    assert summary.noise.signal == pytest.approx(estimate.signal)
    assert summary.noise.gain == pytest.approx(estimate.gain)
    assert summary.noise.scale == pytest.approx(estimate.scale().value)
    assert summary.noise.scale_low == pytest.approx(estimate.scale().low)
    check_message(lines_with(str(summary), "gradient noise"), varies=[r"\d+(\.\d+)?"])
    assert "from 5 measured step(s)" in str(summary)


def test_with_weights_the_unit_is_weights(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced]
) -> None:
    solo = measured().train(4, max_micro_batch=6, weight_fn=by_number)

    found = traced(solo)

    assert len(found) == 4
    assert all(agrees(norms, solo.expected(step, weighed=True)) for step, norms in found)
    summary = solo.stride.summary()
    assert summary.noise is not None
    assert summary.noise.unit == "weights"


@pytest.mark.parametrize("weighed", [{}, {"weight_fn": by_number}], ids=["counted", "weighed"])
@pytest.mark.parametrize("asked", [{}, {"max_micro_batch": 9}], ids=["whole", "in pieces"])
def test_batches_that_do_not_fit_are_not_parts(
    measured: Callable[..., Solo],
    traced: Callable[[Solo], Traced],
    weighed: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    model = Small(5)
    solo = measured(model).train(4, **weighed, **asked)

    found = traced(solo)

    assert max(model.tried[: len(model.tried) // 2]) > 5, "memory ended"
    assert [step for step, _ in found] == list(range(4))
    assert all(agrees(n, solo.expected(step, weighed=bool(weighed))) for step, n in found)


def test_a_later_batch_that_does_not_fit_is_not_a_part(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced]
) -> None:
    solo, failed = measured(), list[int]()

    def memory_ends(loss: Tensor) -> Tensor:
        if len(solo.pieces) == 2 and len(solo.pieces[-1]) == 2 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError
        return loss

    solo.broken = memory_ends
    found = traced(solo.train(3, max_micro_batch=6))

    assert failed
    assert [step for step, _ in found] == [0, 1, 2]
    assert all(agrees(norms, solo.expected(step)) for step, norms in found)


def test_only_every_mth_step_is_measured(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced]
) -> None:
    found = traced(measured(noise_every=3).train(8, max_micro_batch=4))

    assert [step for step, _ in found] == [2, 5]


def test_a_closed_meter_holds_no_model(make_stride: MakeStride) -> None:
    meter = noise_meter.NoiseMeter(1, 1, session(make_stride()).state.clock)
    model = nn.Linear(1, 1)
    meter.watch(model)
    held = weakref.ref(model.weight)

    meter.close()
    del model

    assert held() is None


def _in_one(solo: Solo) -> Solo:
    solo.guarded = False  # else sizes that are not proven are tried in two
    return solo.train(3)


def _unwatched(solo: Solo) -> Solo:
    solo.watched = False
    return solo.train(3, max_micro_batch=4)


def _kept(solo: Solo) -> Solo:
    solo.zero = False
    solo.model.weight.grad = torch.ones_like(solo.model.weight)  # type: ignore[arg-type]
    return solo.train(3, max_micro_batch=4)


def _twice(solo: Solo) -> Solo:
    solo.passes = 2
    return solo.train(3, max_micro_batch=4)


REASONS: dict[str, tuple[Callable[[Solo], Solo], tuple[str, ...]]] = {
    "one batch": (_in_one, ("max_micro_batch",)),
    "no model": (_unwatched, ("stride.watch()",)),
    "gradients kept": (_kept, ("optimizer.zero_grad()",)),
    "two backward passes": (_twice, ()),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_summary_says_why_nothing_was_measured(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced], name: str
) -> None:
    run, why = REASONS[name]

    solo = run(measured())

    assert not traced(solo)
    summary = solo.stride.summary()
    assert summary.noise is not None
    assert summary.noise.steps == 0
    assert summary.noise.scale is summary.noise.noise is None
    check_message(summary.noise.why, *why)
    check_message(lines_with(str(summary), "gradient noise"), summary.noise.why)


def test_sparse_gradients_are_not_measured(
    make_stride: MakeStride,
) -> None:
    stride = make_stride(noise_every=1)
    model = stride.watch(nn.Embedding(8, 2, sparse=True))
    for ids, _ in stride.loader(numbered(8), max_micro_batch=2):
        with stride.accumulate(model):
            stride.scale(model(ids).square().mean()).backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            model.zero_grad()

    summary = stride.summary()

    assert summary.noise is not None
    assert "some gradients are sparse" in summary.noise.why


def test_infinite_values_are_left_out(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced]
) -> None:
    solo = measured()
    solo.broken = lambda loss: loss / torch.zeros(()) if len(solo.pieces) == 2 else loss

    found = traced(solo.train(4, max_micro_batch=4))

    assert [step for step, _ in found] == [0, 2, 3]


def test_a_step_is_reported_when_its_numbers_have_arrived_without_waiting(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading of a device that is two steps behind its program."""
    made: list[Slow] = []

    class Slow(Reading):
        def __init__(self, numbers: Tensor) -> None:
            super().__init__(numbers)
            made.append(self)

        @property
        def there(self) -> bool:
            return made.index(self) < len(made) - 2

        def values(self) -> list[float]:
            assert self.there, "read too early"
            return super().values()

    monkeypatch.setattr(noise_meter, "Reading", Slow)

    found = traced(measured().train(6, max_micro_batch=4))

    assert len(made) == 6
    assert [step for step, _ in found] == [0, 1, 2, 3]


def test_losses_of_one_batch_with_different_weights_are_not_measured(
    make_stride: MakeStride,
) -> None:
    meter = noise_meter.NoiseMeter(1, 1, session(make_stride()).state.clock)
    meter.watch(nn.Linear(1, 1))
    meter.begin(Draw(step=0, window=8, share=8, samples=4, first=True, last=False))

    meter.weighed(3.0, 9.0)
    meter.weighed(3.0, 9.0)
    assert not meter.why

    meter.weighed(4.0, 10.0)
    assert meter.why == noise_meter.TWO_WEIGHTS


def test_a_model_on_several_devices_is_not_measured(make_stride: MakeStride) -> None:
    stride = make_stride(noise_every=1)
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
    meter = session(stride).state.noise
    assert meter is not None

    meter.watch(model)
    meter.watch(nn.Linear(1, 1))

    assert meter.why == noise_meter.DEVICES


def test_a_record_without_a_number_is_refused(
    measured: Callable[..., Solo], traced: Callable[[Solo], Traced], tmp_path: Path
) -> None:
    assert traced(measured().train(2, max_micro_batch=4))
    path = tmp_path / "trace.jsonl"
    path.write_text(path.read_text().replace('"local":', '"locally":'))

    with raises_message(TraceError):
        list(read_noise(tmp_path))
