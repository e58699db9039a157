"""The path of one batch through the table of step states."""

from __future__ import annotations

import pytest

from evenstride.errors import UsageError
from evenstride.runtime.loss.batch_in_hand import StepEvent, StepState, after

E, S = StepEvent, StepState


def _states(*events: StepEvent) -> list[str]:
    state, seen = S.NO_BATCH, []
    for event in events:
        state = after(state, event)
        seen.append(state.name)
    return seen


TRAINED = (E.DRAW, E.SCALE, E.BACKWARD_BEGINS, E.GRADIENTS_READY)


def test_a_step_is_drawn_scaled_synchronised_and_stepped() -> None:
    states = _states(*TRAINED, E.SYNCHRONISE, E.OPTIMIZER_STEPS, E.DRAW)

    assert states[:4] == ["DRAWN", "SCALED", "IN_BACKWARD", "BACKWARD"]
    assert states[4:] == ["SYNCHRONISED", "STEPPED", "DRAWN"]


def test_a_step_that_a_scaler_leaves_out_is_skipped() -> None:
    assert _states(*TRAINED, E.SYNCHRONISE, E.SCALER_UPDATES)[-1] == "SKIPPED"
    assert _states(*TRAINED, E.SYNCHRONISE, E.OPTIMIZER_STEPS, E.SCALER_UPDATES)[-1] == "STEPPED"


def test_leaving_the_loop_does_not_undo_that_the_optimizer_is_due() -> None:
    left = (*TRAINED, E.SYNCHRONISE, E.LEAVE)

    assert _states(*left, E.LEAVE)[-1] == "LEFT_UNSTEPPED"
    assert _states(*left, E.OPTIMIZER_STEPS)[-1] == "NO_BATCH"
    assert _states(*left, E.DRAW)[-1] == "DRAWN"
    assert _states(*TRAINED, E.SYNCHRONISE, E.LOOP_ENDS, E.LEAVE)[-1] == "NO_BATCH"


def test_a_backward_pass_that_raised_is_as_if_it_had_not_begun() -> None:
    assert _states(E.DRAW, E.SCALE, E.BACKWARD_BEGINS, E.SCALE)[-1] == "SCALED"


def test_a_second_loss_of_a_batch_may_follow_the_first_ones_backward() -> None:
    assert _states(*TRAINED, *TRAINED[1:])[-1] == "BACKWARD"
    assert _states(*TRAINED, E.SYNCHRONISE, *TRAINED[1:], E.SYNCHRONISE)[-1] == "SYNCHRONISED"


def test_a_synchronisation_without_a_backward_pass_does_not_count_as_trained() -> None:
    assert _states(E.DRAW, E.SYNCHRONISE, E.OPTIMIZER_STEPS)[-1] == "UNSCALED"
    assert _states(E.DRAW, E.SCALE, E.SYNCHRONISE, E.OPTIMIZER_STEPS)[-1] == "UNTRAINED"
    assert _states(E.DRAW, E.SYNCHRONISE, E.OPTIMIZER_STEPS, E.SCALE)[-1] == "UNTRAINED"


def test_an_optimizer_may_step_before_the_backward_pass() -> None:
    assert _states(E.DRAW, E.SYNCHRONISE, E.OPTIMIZER_STEPS, *TRAINED[1:])[-1] == "STEPPED"


def test_a_loss_may_be_scaled_again_where_its_backward_pass_recomputes_it() -> None:
    states = _states(E.DRAW, E.SCALE, E.BACKWARD_BEGINS, E.SCALE, E.GRADIENTS_READY, E.SYNCHRONISE)

    assert states[-1] == "SYNCHRONISED"


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((E.DRAW,), E.DRAW),
        ((E.DRAW, E.SCALE), E.DRAW),
        ((), E.SCALE),
        ((*TRAINED, E.SYNCHRONISE), E.OUT_OF_MEMORY),
        ((E.DRAW, E.OUT_OF_MEMORY), E.SYNCHRONISE),
    ],
)
def test_what_a_loop_never_does_is_an_error_and_names_both(
    before: tuple[StepEvent, ...], event: StepEvent
) -> None:
    state = S[_states(*before)[-1]] if before else S.NO_BATCH

    with pytest.raises(UsageError) as raised:
        after(state, event)

    assert event.name.lower() in str(raised.value)
    assert state.name.lower() in str(raised.value)
