"""Laws of the table of step states, and its agreement with a model made of plain flags."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import UsageError
from evenstride.runtime.loss.batch_in_hand import (
    BACKWARD_BEGAN,
    COMMITTED,
    TRANSITIONS,
    UNSTEPPED,
    StepEvent,
    StepState,
    after,
)

E, S = StepEvent, StepState
EVENTS = st.lists(st.sampled_from(list(StepEvent)), max_size=40)


def _run(events: list[StepEvent]) -> list[tuple[StepState, StepEvent, StepState]]:
    """Return the steps taken; events that are refused change nothing."""
    state, taken = S.NO_BATCH, []
    for event in events:
        try:
            following = after(state, event)
        except UsageError:
            assert (state, event) not in TRANSITIONS
            continue
        taken.append((state, event, following))
        state = following
    return taken


@dataclass
class Flags:
    """The same batch as independent flags."""

    there: bool = False
    began: bool = False
    trained: bool = False
    committed: bool = False
    stepped: bool = False
    again: bool = False
    left_due: bool = False

    def take(self, event: StepEvent) -> None:
        if event in (E.DRAW, E.LEAVE):
            due = self.left_due or (self.committed and self.trained and not self.stepped)
            vars(self).update(vars(Flags(there=event is E.DRAW)))
            self.left_due = due and event is E.LEAVE
        if event in (E.OPTIMIZER_STEPS, E.SCALER_UPDATES):
            self.left_due = False
        if event is E.SCALE and not self.trained and not self.committed:
            self.began = False
        if event is E.BACKWARD_BEGINS and not self.again:
            self.began = True
        if event is E.GRADIENTS_READY and self.committed and not self.trained:
            self.stepped = True  # the optimizer's step came before the backward pass
        if event is E.GRADIENTS_READY and not self.again:
            self.trained = True
        if event is E.SYNCHRONISE:
            self.committed = True
        if event in (E.OPTIMIZER_STEPS, E.SCALER_UPDATES, E.LOOP_ENDS):
            self.stepped = self.committed
        if event is E.OUT_OF_MEMORY:
            self.again = True


@given(EVENTS)
def test_the_table_says_what_independent_flags_say(events: list[StepEvent]) -> None:
    flags = Flags()
    for _, event, state in _run(events):
        flags.take(event)

        assert (state not in (S.NO_BATCH, S.LEFT_UNSTEPPED)) == flags.there
        assert (state is S.LEFT_UNSTEPPED) == flags.left_due
        assert (state in COMMITTED) == flags.committed
        assert (state is S.RETRY) == flags.again
        assert (state is S.BACKWARD) == (flags.trained and not flags.committed and not flags.again)
        if state is S.SYNCHRONISED:
            assert not flags.stepped
            assert state in UNSTEPPED
        if state in (S.STEPPED, S.SKIPPED):
            assert flags.stepped


@given(EVENTS)
def test_a_batch_is_committed_at_most_once_and_never_after_it_ran_out_of_memory(
    events: list[StepEvent],
) -> None:
    commits, again = 0, False
    for before, event, state in _run(events):
        if event in (E.DRAW, E.LEAVE):
            commits, again = 0, False
        again = again or event is E.OUT_OF_MEMORY
        commits += state in COMMITTED and before not in COMMITTED

        assert commits <= 1
        assert not (again and commits)


@given(EVENTS)
def test_the_optimizers_step_counts_only_after_the_commit(events: list[StepEvent]) -> None:
    for before, _, state in _run(events):
        if state in (S.STEPPED, S.SKIPPED):
            assert before in COMMITTED


def test_from_every_state_a_loop_can_be_left_and_every_state_is_reached() -> None:
    for state in S:
        left = after(state, E.LEAVE)
        assert left is (S.LEFT_UNSTEPPED if state in UNSTEPPED else S.NO_BATCH)
        assert after(left, E.DRAW) is S.DRAWN
    reached, edge = {S.NO_BATCH}, [S.NO_BATCH]
    while edge:
        following = {new for (old, _), new in TRANSITIONS.items() if old is edge[-1]} - reached
        edge.pop()
        reached |= following
        edge += sorted(following)
    assert reached == set(S)


@pytest.mark.parametrize("state", [S.DRAWN, S.SCALED, S.IN_BACKWARD])
def test_no_batch_is_drawn_over_one_that_was_not_trained(state: StepState) -> None:
    assert (state, E.DRAW) not in TRANSITIONS


def test_a_backward_pass_that_began_is_known_until_the_batch_is_gone() -> None:
    for (_, event), state in TRANSITIONS.items():
        began = event in (E.BACKWARD_BEGINS, E.GRADIENTS_READY)
        if began and state not in (S.UNSCALED, S.UNTRAINED):
            assert state in (*BACKWARD_BEGAN, S.RETRY)
