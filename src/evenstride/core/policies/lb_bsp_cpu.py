"""LB-BSP on CPU clusters: shares in proportion to the speeds predicted for the next step.

Source:
    Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated
    Environments", SoCC 2020, doi:10.1145/3419111.3421299. Time is taken to be linear in the
    batch, so only the speed ``v_i`` of the coming iteration is unknown; it is predicted from past
    speeds and past and current CPU and memory use by a NARX network, and
    ``x_i = X v_i / sum v`` of a batch ``X``, at every iteration. There is no dead-band: only
    rounding keeps noise from moving the split.

How we differ:
    * Workers report at an exchange, which may tell of several steps. The predictor is told of
      each of them in order, and at most one change follows. It takes effect some steps later
      than those that were told; the prediction is for the step after these.
    * In training the shares then stay for 4 to 512 steps, up to 5 s, until the next exchange. The
      prediction of one step ahead stays in force as long. The simulator exchanges after each step.
    * The newest loads known are those of the last observation, not of the moment in which the
      next iteration begins. Unknown loads (not a number) are left to the predictor.
    * Any share tells the speed, as time is linear for this policy; so steps at an earlier share
      are learned from as well.
    * ``last``, ``ema`` and ``ar`` stand behind the same seam, as the paper compares with such.
      The network's size and training are ours (`evenstride.core.predictors.narx`).
    * Rounding is by largest remainder, within the bounds of the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from evenstride.core.allocation.opening_splits import equal_split
from evenstride.core.allocation.proportional_split import apportion
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.predictors import PREDICTOR_NAMES, predictor_named
from evenstride.core.spec import check_settings, one_of
from evenstride.core.time_model.observation import SHORTEST_S, Measurements


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """What is remembered."""

    predictor: Any  # the predictor's own state
    loads: FloatArray  # processor and memory load as last told, nan if never, ``(2, W)``


@dataclass(frozen=True, slots=True)
class LbBspCpu:
    """In proportion to predicted speeds, whenever they are told anything new."""

    # ``narx``, ``ar``, ``ema`` or ``last``.
    predictor: str = field(default="narx", metadata=one_of(*PREDICTOR_NAMES))

    def __post_init__(self) -> None:
        check_settings("policy lb-bsp-cpu", self)

    @property
    def predicts_from_loads(self) -> bool:
        """Whether the workers should tell how busy their machines are."""
        return self.predictor == "narx"

    # The paper's controller has no opening phase.
    opening_steps: ClassVar[int] = 0

    def init(self, fleet: Fleet) -> tuple[Predicted, Move]:
        state = predictor_named(self.predictor).start(len(fleet))
        loads = np.full((2, len(fleet)), np.nan)
        return Predicted(state, loads), Move(
            equal_split(fleet), "equal split until speeds are known"
        )

    def decide(self, state: Predicted, situation: Situation) -> tuple[Predicted, Decision]:
        """Tell the predictor of every new step, then split by what it predicts."""
        predictor, fleet = predictor_named(self.predictor), situation.fleet
        remembered, loads = state.predictor, state.loads.copy()
        for worker, speed, newer in _step_by_step(situation.observations):
            # An observation's loads were read at its end: none of its steps was predicted by them.
            remembered = predictor.learn(remembered, worker, speed, state.loads[:, worker])
            loads[:, worker] = newer
        state = Predicted(remembered, loads)
        speed = predictor.predict(remembered, loads)
        unknown = np.isnan(speed)
        missing = unknown & (as_array(situation.shares) > 0)
        if missing.any():
            name = fleet.workers[int(np.argmax(missing))].name
            return state, Keep(f"no step of worker {name} has been measured yet")
        # Only workers without a share can be unknown here; they get their least.
        weights = np.where(unknown, 0.0, speed)
        after = as_shares(apportion(weights, fleet.global_batch, fleet.lower, fleet.upper))
        if after == situation.shares:
            return state, Keep("the predicted speeds ask for the shares there are")
        return state, Move(after, f"in proportion to the speeds predicted by {self.predictor}")


def _step_by_step(measured: Measurements) -> Iterator[tuple[IntArray, FloatArray, FloatArray]]:
    """Yield ranks, speeds and loads ``(2, n)`` of one step of each worker, in order."""
    seen = measured.only(measured.modelled & measured.sound & (measured.share > 0))
    starts = np.cumsum(seen.steps) - seen.steps
    for turn in seen.turns():
        for step in range(int(seen.steps[turn].max())):
            here = turn[seen.steps[turn] > step]
            # Speeds must be finite, whatever a clock says.
            busy_s = np.maximum(seen.busy_s[starts[here] + step], SHORTEST_S)
            yield seen.worker[here], seen.share[here] / busy_s, seen.loads[:, here]
