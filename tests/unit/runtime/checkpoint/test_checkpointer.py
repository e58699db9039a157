"""A run saves asynchronously, and another one continues from its checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenstride.errors import StepInFlight
from evenstride.runtime.checkpoint import Checkpointer, Restored
from evenstride.runtime.checkpoint.format.manifest import parse_name
from evenstride.runtime.checkpoint.restore.saved_state import collect
from evenstride.runtime.checkpoint.save.checkpoint_writer import Saver
from tests.messages import check_message, lines_with
from tests.unit.runtime.checkpoint.kept import (
    Count,
    FullStorage,
    HeldStorage,
    MemoryStorage,
    Runs,
    Solo,
    abandon,
    hours_later,
)


def _steps(storage: MemoryStorage) -> list[int]:
    return sorted(name.step for text in storage.checkpoints() if (name := parse_name(text)))


def test_a_restored_run_continues_exactly(runs: Runs) -> None:
    storage, whole = MemoryStorage(), runs(MemoryStorage())
    whole.train(17)
    first = runs(storage, every=4)
    first.train(9)
    first.checkpoint.close()

    second = runs(storage)
    restored = second.restore()
    second.train(9)

    assert restored == Restored(8, storage.checkpoints()[-1])
    assert second.weights() == whole.weights()
    assert second.stride.state_dict() == whole.stride.state_dict()


def test_without_a_checkpoint_restore_returns_none(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "evenstride")

    assert runs(MemoryStorage()).restore() is None

    check_message(caplog.messages)


def test_random_numbers_continue_after_a_restart(runs: Runs) -> None:
    storage = MemoryStorage()
    first = runs(storage)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    np.random.normal()
    first.checkpoint.save()
    expected = [float(torch.rand(())), float(np.random.normal()), random.random()]

    runs(storage).restore()

    assert [float(torch.rand(())), float(np.random.normal()), random.random()] == expected


def test_a_scheduler_a_scaler_and_an_average_are_restored(runs: Runs) -> None:
    storage = MemoryStorage()

    def more(run: Solo) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
        average = torch.optim.swa_utils.AveragedModel(run.model)
        return {"scheduler": scheduler, "extra": {"average": average, "count": Count()}}

    first = _with(runs, storage, more)
    for _ in range(3):
        first.train(1)
        first.made["scheduler"].step()
        first.made["extra"]["average"].update_parameters(first.model)
        first.made["extra"]["count"].state["n"][(1, "a")] = 2.5
    first.checkpoint.save()
    second = _with(runs, storage, more)
    second.restore()

    assert second.made["scheduler"].get_last_lr() == first.made["scheduler"].get_last_lr()
    assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
    averages = [r.made["extra"]["average"].state_dict() for r in (first, second)]
    assert all(torch.equal(averages[0][key], averages[1][key]) for key in averages[0])
    assert int(averages[1]["n_averaged"]) == 3
    assert second.made["extra"]["count"].state == {"n": {(1, "a"): 2.5}}


def _with(runs: Runs, storage: MemoryStorage, more: Any) -> Any:
    """Return a run with additional objects to save, in its attribute ``made``."""
    run: Any = runs(storage)
    run.made = more(run)
    abandon(run.checkpoint)
    run.checkpoint = Checkpointer(
        "somewhere", run.stride, model=run.model, optimizer=run.optimizer, **run.made
    )
    return run


def test_two_optimizers_one_of_them_without_state(runs: Runs) -> None:
    storage = MemoryStorage()
    nets = [nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)) for _ in range(2)]
    made: list[Solo] = []
    for each in nets:
        run = runs(storage, net=each, optimizer=lambda p: torch.optim.SGD(list(p)[:2], lr=0.01))
        other = torch.optim.SGD(list(run.model.parameters())[2:], lr=0.5)
        abandon(run.checkpoint)
        run.checkpoint = Checkpointer(
            "s", run.stride, model=run.model, optimizer=[run.optimizer, other]
        )
        if made:
            other.param_groups[0]["lr"] = 0.125
            run.restore()
            assert other.param_groups[0]["lr"] == 0.5
            assert run.optimizer.param_groups[0]["lr"] == 0.01
        else:
            run.train(2)
            run.checkpoint.save()
        made.append(run)

    assert made[0].weights() == made[1].weights()


def test_saving_never_steps_an_optimizer(runs: Runs) -> None:
    run = runs(MemoryStorage(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    steps = []
    run.optimizer.register_step_post_hook(lambda *_: steps.append(1))

    run.checkpoint.save()
    run.train(1)
    run.checkpoint.save()

    assert steps == [1]
    assert all(p.grad is None for p in run.model.parameters())


def test_a_parameter_that_was_never_trained_has_no_state(runs: Runs) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(x)
            return result

    storage = MemoryStorage()
    first = runs(storage, net=Partly())
    first.train(2)
    first.checkpoint.save()
    second = runs(storage, net=Partly())

    second.restore()

    known = {id(p) for p in second.optimizer.state}
    names = [name for name, p in second.model.named_parameters() if id(p) in known]
    assert names == ["used.weight", "used.bias"]
    first.train(3)
    second.train(3)
    assert first.weights() == second.weights()


def test_the_newest_are_kept_and_other_files_are_not_touched(runs: Runs) -> None:
    storage = MemoryStorage()
    strange = {
        "notes.txt": b"mine",
        "step-7/x": b"mine",
        "step-000000001-000000000001-0/notes.txt": b"mine",
        "step-000000001-000000000001-0/items-00000.jsonl": b"stale",
    }
    storage.files |= strange
    run = runs(storage, every=2, keep=3)

    run.train(9)
    run.checkpoint.close()

    assert _steps(storage) == [4, 6, 8]
    left = [name for name in strange if name in storage.files]
    assert left == list(strange)[:3], "what is stale is deleted, what is not ours is not"
    assert not [name for name in storage.files if name.startswith("probe")]


def test_training_continues_during_a_save(runs: Runs) -> None:
    storage = HeldStorage()
    run, same = runs(storage, every=4), runs(MemoryStorage())
    same.train(4)
    storage.begun.clear()
    storage.go_on.clear()

    run.train(7)

    assert storage.begun.wait(60)
    assert not storage.checkpoints(), "not yet"
    storage.go_on.set()
    run.checkpoint.close()
    again = runs(storage)
    again.restore()
    assert again.weights() == same.weights(), "what was saved is the state of step 4"


def test_a_due_save_waits_for_the_previous_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = HeldStorage()
    run = runs(storage, every=2)
    storage.go_on.clear()
    take = Saver.take

    def let_go(saver: Saver, *args: Any, **named: Any) -> Any:
        if saver.busy:
            storage.go_on.set()
        return take(saver, *args, **named)

    monkeypatch.setattr(Saver, "take", let_go)
    run.train(5)
    run.checkpoint.close()

    report = run.checkpoint.report()
    assert (report["saved"], report["put_off"]) == (2, 1)
    assert report["blocked_s"] > 0
    check_message(caplog.messages)


def test_a_save_within_a_step_is_refused(runs: Runs) -> None:
    run = runs(MemoryStorage())

    for (x,) in run.loader:
        run.stride.scale(run.model(x).mean()).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(StepInFlight):
            run.checkpoint.save()
        break


def test_saving_twice_at_a_step_makes_two_attempts(runs: Runs) -> None:
    storage = MemoryStorage()
    run = runs(storage)

    run.checkpoint.save()
    run.checkpoint.save()

    assert [name.rpartition("-")[2] for name in storage.checkpoints()] == ["0", "1"]


def test_a_save_that_is_due_by_the_clock_is_made_at_a_step(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    run = runs(storage, every="1h")
    run.train(2)
    assert not storage.checkpoints()

    hours_later(monkeypatch)
    run.train(12)
    run.checkpoint.close()

    assert len(storage.checkpoints()) == 1


def test_auto_computes_the_interval_from_the_cost_of_a_save(runs: Runs) -> None:
    run = runs(MemoryStorage(), every="auto")
    costs: list[float] = []
    run.checkpoint.interval_s = lambda cost_s: costs.append(cost_s) or 3600.0  # type: ignore[func-returns-value]

    run.checkpoint.save()
    run.checkpoint.save()

    assert costs[0] == 1.0
    assert 0 < costs[1] < 1000


def test_close_may_be_repeated_and_a_context_closes(runs: Runs) -> None:
    storage = MemoryStorage()
    run = runs(storage, every=2)

    with run.checkpoint:
        run.train(2)
    run.checkpoint.close()

    assert _steps(storage) == [2]


def test_a_folder_of_the_file_system(runs: Runs, tmp_path: Path) -> None:
    first = runs(tmp_path / "not" / "yet", every=2)
    first.train(4)
    first.checkpoint.close()

    second = runs(tmp_path / "not" / "yet")
    restored = second.restore()

    assert restored is not None
    assert restored.step == 4
    assert second.weights() == first.weights()
    assert len(list((tmp_path / "not" / "yet").glob("step-*"))) == 2


def test_an_error_of_the_store_is_reported_once_and_the_save_is_retried(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "evenstride")
    storage = FullStorage()
    run = runs(storage, every=1, keep=9)
    storage.error = OSError(28, "No space left on device")

    run.train(4)
    run.settle()
    storage.error = None
    run.train(5)
    run.checkpoint.close()

    # Tried at 1 and 2, one skipped, at 4, three skipped, at 8 and from then on.
    assert _steps(storage) == [8, 9]
    assert caplog.text.count("was not saved") == 1
    check_message(lines_with("\n".join(caplog.messages), "not saved", "works again"))
    assert "works again" in caplog.text
    assert run.checkpoint.report()["left_out"] == 4


@pytest.mark.parametrize("span_bytes", [1, 16, 100, 10**6])
@pytest.mark.parametrize("gap_bytes", [0, 40, 10**6])
def test_the_size_of_reads_does_not_change_the_result(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, span_bytes: int, gap_bytes: int
) -> None:
    storage = MemoryStorage()
    first = runs(storage, net=nn.Sequential(nn.Linear(1, 9), nn.Linear(9, 5)))
    first.train(2)
    first.checkpoint.save()
    monkeypatch.setattr(
        "evenstride.runtime.checkpoint.restore.checkpoint_reader.SPAN_BYTES", span_bytes
    )
    monkeypatch.setattr(
        "evenstride.runtime.checkpoint.restore.checkpoint_reader.GAP_BYTES", gap_bytes
    )
    second = runs(storage, net=nn.Sequential(nn.Linear(1, 9), nn.Linear(9, 5)))

    second.restore()

    assert second.weights() == first.weights()
    first.train(1)
    second.train(1)
    assert second.weights() == first.weights()


def test_parameters_are_split_over_the_ranks_and_buffers_come_from_the_leader(runs: Runs) -> None:
    run = runs(MemoryStorage(), net=nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    run.train(1)

    sources = collect(run.checkpoint._is.training).sources

    assert set(sources.leader) == {
        f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert {"model/0.weight", "optimizer/state/1.bias/exp_avg"} <= set(sources.shared)
