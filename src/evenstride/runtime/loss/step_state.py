"""How far the batch in hand has come: one table of states and events, without torch.

A batch is one micro-batch of a step. It is drawn, its loss is scaled, its backward pass runs, and
the last one of the step is synchronised between the ranks and stepped by the optimizer. A batch
without samples (a share of 0) goes through the same states, because the other ranks need its
collectives. `TRANSITIONS` is the whole of it; `BatchInHand` hears of the events.
"""

from __future__ import annotations

from enum import IntEnum, auto

from evenstride.errors import UsageError


# Integers, because every step looks several transitions up: their hash is computed in C.
class StepState(IntEnum):
    """Where the batch in hand stands."""

    NO_BATCH = auto()
    """The training loop has no batch: it has not begun, has ended or was left."""
    DRAWN = auto()
    """The loop has the batch."""
    SCALED = auto()
    """A loss of the batch was scaled."""
    IN_BACKWARD = auto()
    """A backward pass has begun and not ended."""
    BACKWARD = auto()
    """This rank's gradients of the batch are complete."""
    SYNCHRONISED = auto()
    """The gradients are averaged over the ranks, which commits the step."""
    STEPPED = auto()
    """The optimizer has stepped."""
    SKIPPED = auto()
    """A gradient scaler has left the optimizer's step out, because of infinite gradients."""
    UNSCALED = auto()
    """The optimizer has synchronised and stepped before a loss of the batch was scaled."""
    UNTRAINED = auto()
    """The same, and a loss has been scaled, but no backward pass of the batch has ended."""
    RETRY = auto()
    """The batch did not fit into memory and comes again."""
    LEFT_UNSTEPPED = auto()
    """The loop was left with a committed step whose optimizer has not stepped."""


class StepEvent(IntEnum):
    """What happens to the batch in hand."""

    DRAW = auto()
    SCALE = auto()
    BACKWARD_BEGINS = auto()
    GRADIENTS_READY = auto()
    SYNCHRONISE = auto()
    OPTIMIZER_STEPS = auto()
    SCALER_UPDATES = auto()
    """Of a gradient scaler, after each step that the optimizer took or was kept from."""
    LOOP_ENDS = auto()
    """All that the loop does in its last step is done."""
    OUT_OF_MEMORY = auto()
    """The batch is to come again."""
    LEAVE = auto()
    """The loop is left, and the batch forgotten."""


_S, _E = StepState, StepEvent
_EARLY = (_S.UNSCALED, _S.UNTRAINED)
# As tuples: with so few states, `in` is quicker than in a set.
COMMITTED = (_S.SYNCHRONISED, _S.STEPPED, _S.SKIPPED, *_EARLY)
UNSTEPPED = (_S.SYNCHRONISED, _S.LEFT_UNSTEPPED)
BACKWARD_BEGAN = (_S.IN_BACKWARD, _S.BACKWARD, _S.SYNCHRONISED, _S.STEPPED, _S.SKIPPED)

TRANSITIONS: dict[tuple[StepState, StepEvent], StepState] = {
    (_S.NO_BATCH, _E.DRAW): _S.DRAWN,
    (_S.DRAWN, _E.SCALE): _S.SCALED,
    (_S.SCALED, _E.SCALE): _S.SCALED,  # another loss of the batch
    # The pass before raised, so its callback never came.
    (_S.IN_BACKWARD, _E.SCALE): _S.SCALED,
    (_S.BACKWARD, _E.SCALE): _S.BACKWARD,
    # The graph may hold the hook of a loss that was scaled for an earlier batch.
    (_S.DRAWN, _E.BACKWARD_BEGINS): _S.IN_BACKWARD,
    (_S.SCALED, _E.BACKWARD_BEGINS): _S.IN_BACKWARD,
    (_S.BACKWARD, _E.BACKWARD_BEGINS): _S.BACKWARD,
    (_S.IN_BACKWARD, _E.GRADIENTS_READY): _S.BACKWARD,
    (_S.BACKWARD, _E.GRADIENTS_READY): _S.BACKWARD,
    # A checkpointed loss is scaled again where its own backward pass recomputes it.
    (_S.SCALED, _E.GRADIENTS_READY): _S.BACKWARD,
    (_S.BACKWARD, _E.SYNCHRONISE): _S.SYNCHRONISED,
    # Where the optimizer's step synchronises, a loop can call it before the backward pass, with the
    # gradients of the batch before. If no backward pass follows, the next fetch is refused.
    (_S.DRAWN, _E.SYNCHRONISE): _S.UNSCALED,
    (_S.SCALED, _E.SYNCHRONISE): _S.UNTRAINED,
    (_S.IN_BACKWARD, _E.SYNCHRONISE): _S.UNTRAINED,
    (_S.SYNCHRONISED, _E.OPTIMIZER_STEPS): _S.STEPPED,
    (_S.SYNCHRONISED, _E.SCALER_UPDATES): _S.SKIPPED,
    (_S.SYNCHRONISED, _E.LOOP_ENDS): _S.STEPPED,
    # Of several optimizers, a scaler may keep some from stepping.
    (_S.SKIPPED, _E.OPTIMIZER_STEPS): _S.STEPPED,
    # The step after a micro-batch that is not its last, and after each that was committed.
    (_S.BACKWARD, _E.DRAW): _S.DRAWN,
    **{(state, _E.DRAW): _S.DRAWN for state in COMMITTED},
    # A committed step stays so: a second loss of the batch may follow, or a second optimizer.
    **{
        (state, event): state
        for state in COMMITTED
        for event in (_E.SCALE, _E.BACKWARD_BEGINS, _E.GRADIENTS_READY, _E.SYNCHRONISE)
    },
    (_S.UNSCALED, _E.SCALE): _S.UNTRAINED,
    **{(state, _E.GRADIENTS_READY): _S.STEPPED for state in _EARLY},
    **{(_S.STEPPED, event): _S.STEPPED for event in (_E.OPTIMIZER_STEPS, _E.SCALER_UPDATES)},
    (_S.SKIPPED, _E.SCALER_UPDATES): _S.SKIPPED,
    # Once committed, a batch cannot come again: other ranks have its gradients.
    **{
        (state, _E.OUT_OF_MEMORY): _S.RETRY
        for state in (_S.DRAWN, _S.SCALED, _S.IN_BACKWARD, _S.BACKWARD)
    },
    # Callbacks of the pass that failed may still arrive.
    **{(_S.RETRY, event): _S.RETRY for event in (_E.BACKWARD_BEGINS, _E.GRADIENTS_READY)},
    (_S.RETRY, _E.DRAW): _S.DRAWN,
    **{(state, _E.LEAVE): _S.NO_BATCH for state in _S},
    # The position is past this step and the weights are not, so a state must not be saved yet.
    **{(state, _E.LEAVE): _S.LEFT_UNSTEPPED for state in UNSTEPPED},
    (_S.LEFT_UNSTEPPED, _E.DRAW): _S.DRAWN,
    # An optimizer of parameters that are not ours may step at any time; a loop may end anywhere.
    **{
        (state, event): state
        for state in (*(set(_S) - set(COMMITTED)), *_EARLY)
        for event in (_E.OPTIMIZER_STEPS, _E.SCALER_UPDATES)
    },
    (_S.LEFT_UNSTEPPED, _E.OPTIMIZER_STEPS): _S.NO_BATCH,
    (_S.LEFT_UNSTEPPED, _E.SCALER_UPDATES): _S.NO_BATCH,
    **{(state, _E.LOOP_ENDS): state for state in set(_S) - {_S.SYNCHRONISED}},
}
"""The state that follows each state by an event; what is not here is an error."""


def after(state: StepState, event: StepEvent) -> StepState:
    """Return the state that follows.

    Raises:
        UsageError: the event cannot happen in this state.

    >>> after(StepState.BACKWARD, StepEvent.SYNCHRONISE).name
    'SYNCHRONISED'
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise UsageError(
            f"{event.name.lower()} came while the batch in hand was in state "
            f"{state.name.lower()}, which a training loop never does; please report it with the "
            "loop's code"
        ) from None
