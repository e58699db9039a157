"""A rank's position in the data: counted, saved, and loaded only where it means the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import ConfigError
from evenstride.runtime.loading.position import POSITION_VERSION, CommittedPosition, EpochOrder
from tests.messages import raises_message


def _progress(
    length: int = 20,
    batch: int = 6,
    seed: int = 3,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
) -> CommittedPosition:
    progress = CommittedPosition(seed, batch)
    progress.attach(EpochOrder(length, seed, shuffle, drop_last))
    return progress


def _train(progress: CommittedPosition, steps: int) -> list[tuple[int, int]]:
    """Train some steps over as many epochs as it takes; return (epoch, first position) of each."""
    trained = []
    for _ in range(steps):
        trained.append((progress.epoch, progress.position))
        progress.commit(len(progress.cursor.window))
        if progress.cursor.done:
            progress.end_pass()
    return trained


@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    before=st.integers(0, 30),
    after=st.integers(0, 30),
)
def test_a_loaded_position_goes_on_as_if_never_interrupted(
    length: int, batch: int, drop_last: bool, before: int, after: int
) -> None:
    drop_last = drop_last and length >= batch
    through, first, second = (_progress(length, batch, drop_last=drop_last) for _ in range(3))

    trained = _train(first, before)
    second.load(json.loads(json.dumps(first.save())))

    assert second.save() == first.save()
    assert trained + _train(second, after) == _train(through, before + after)
    assert second.save() == through.save()
    assert second.step == after, "a process counts its own steps"


@given(batches=st.integers(0, 7))
def test_steps_are_counted_over_several_restarts(batches: int) -> None:
    total, state = 0, _progress().save()

    for _ in range(3):
        progress = _progress()
        progress.load(state)
        _train(progress, batches)
        total, state = total + batches, progress.save()

    assert state["step"] == total


def test_a_state_may_be_loaded_before_a_loader_exists() -> None:
    saved = _progress()
    _train(saved, 5)
    progress = CommittedPosition(3, 6)

    progress.load(saved.save())
    progress.attach(EpochOrder(20, 3))

    assert (progress.epoch, progress.position) == (1, 6)


def test_a_state_saved_before_there_was_a_loader_fits_every_loader() -> None:
    progress = _progress(length=9, shuffle=False)

    progress.load(CommittedPosition(3, 6).save())

    assert (progress.epoch, progress.position) == (0, 0)


def test_a_state_of_a_finished_epoch_begins_the_next() -> None:
    state = _progress().save() | {"epoch": 4, "position": 20, "step": 17}
    progress = _progress()

    progress.load(state)

    assert (progress.epoch, progress.position) == (5, 0)


def test_leaving_an_epoch_that_has_not_begun_leaves_nothing() -> None:
    progress = _progress()

    progress.next_epoch()
    assert progress.epoch == 0
    _train(progress, 1)
    progress.next_epoch()

    assert (progress.epoch, progress.position) == (1, 0)


def test_a_pass_is_reported_with_its_start() -> None:
    progress = _progress()
    progress.begin_pass()
    _train(progress, 2)
    first = progress.now
    progress.begin_pass()
    _train(progress, 1)
    second = progress.now

    assert (first.step, first.stands) == (2, ((0, 0, 0),))
    assert (second.step, second.stands) == (3, ((0, 0, 0), (2, 0, 12)))


def test_a_pass_without_training_before_a_state_is_loaded_is_not_reported() -> None:
    saved = _progress()
    _train(saved, 2)
    progress = _progress()
    progress.begin_pass()

    progress.load(saved.save())
    progress.begin_pass()
    _train(progress, 1)

    assert progress.now.stands == ((0, 0, 12),)


def test_another_layout_in_mid_epoch_is_refused() -> None:
    progress = _progress()
    _train(progress, 2)

    with raises_message(ConfigError, "12 samples"):
        progress.attach(EpochOrder(30, 3))
    progress.attach(EpochOrder(20, 3))

    assert progress.position == 12


def test_a_state_at_an_epochs_end_shows_the_next_epoch_before_a_loader_exists() -> None:
    state = {**_progress().save(), "position": 20, "epoch": 4}
    progress = CommittedPosition(3, 6)

    progress.load(state)

    assert (progress.epoch, progress.position) == (5, 0)


@pytest.mark.parametrize("state", [{"version": POSITION_VERSION}, None, [1]])
def test_an_invalid_state_is_refused(state: Any) -> None:
    with raises_message(ConfigError, "state_dict()"):
        _progress().load(state)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another seed": ({"seed": 4}, ("seed 4",)),
    "another global batch": ({"global_batch": 7}, ("global_batch",)),
    "another length": ({"length": 21}, ("length 21", "20")),
    "another order": ({"shuffle": False}, ()),
    "another end": ({"drop_last": True}, ("drop_last",)),
    "a later version": ({"version": POSITION_VERSION + 1}, (f"version {POSITION_VERSION + 1}",)),
    "an earlier version": ({"version": 1}, ("version 1",)),
    "no version": ({"version": None}, ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_something_else_is_refused_and_nothing_changes(name: str) -> None:
    change, complaint = REFUSED[name]
    progress = _progress()
    _train(progress, 2)
    before = progress.save()
    elsewhere = {**before, "epoch": 9, "position": 6, "step": 40, **change}

    with raises_message(ConfigError, *complaint):
        progress.load(elsewhere)

    assert progress.save() == before
    assert progress.restored is None


def test_a_loader_that_the_loaded_state_does_not_fit_is_refused() -> None:
    saved = _progress()
    _train(saved, 1)
    progress = CommittedPosition(3, 6)
    progress.load(saved.save())

    with raises_message(ConfigError, "length 20", "21"):
        progress.attach(EpochOrder(21, 3))

    progress.attach(EpochOrder(20, 3))
    assert progress.position == 6


def test_a_loaded_state_is_compared_with_one_loader_only() -> None:
    progress = _progress()
    progress.load(progress.save())

    progress.attach(EpochOrder(21, 3))  # the first loader is gone, a second one is made

    assert progress.cursor.length == 21


def test_steps_of_another_size_train_what_the_parts_have_left() -> None:
    saved, order = CommittedPosition(3, 6), EpochOrder(20, 3, by_epoch=True)
    saved.attach(order)
    saved.commit(6)
    saved.keep_parts((2, 4), 0)
    other, alike = CommittedPosition(3, 5, varies=True), CommittedPosition(3, 6)
    for progress in (other, alike):
        progress.attach(order)
        progress.load(saved.save())

    assert (alike.parts, alike.parts_end) == ((2, 4), 0)
    assert (other.parts, other.parts_end, other.position) == ((2, 4), 6, 6)


def test_an_exchange_reports_the_epoch_of_the_latest_step() -> None:
    progress = _progress(12, 6)

    progress.epoch = 4
    assert progress.now.epoch == 4, "before the first step"
    epochs = []
    for _ in range(2):
        progress.commit(6)
        epochs.append((progress.now.epoch, progress.steps_alone.epoch))
    progress.end_pass()

    assert epochs == [(4, 4), (4, 4)]
    assert (progress.now.epoch, progress.epoch) == (4, 5)


def test_parts_matter_within_an_epoch_only() -> None:
    """So another policy may go on from the end of an epoch."""
    in_parts = EpochOrder(20, 3, by_epoch=True)
    saved = _progress(20, 10)
    saved.commit(10)
    within = saved.save()
    saved.commit(10)

    progress = CommittedPosition(3, 10)
    progress.attach(in_parts)
    progress.load(saved.save())
    assert (progress.epoch, progress.position) == (1, 0)
    with raises_message(ConfigError, "by_epoch"):
        progress.load(within)
