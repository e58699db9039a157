"""One worker in live mode: for each step, the workers that take part, and the vote."""

from __future__ import annotations

import hashlib
import logging
import uuid
from dataclasses import dataclass
from typing import Any

import torch

from evenstride._version import __version__
from evenstride.core.sampling.draw import Draw
from evenstride.errors import UsageError, WorkerLost
from evenstride.integrations.torchft.live_generation import (
    Broken,
    LeaderRecord,
    LiveGeneration,
    Quorum,
    Shown,
)
from evenstride.integrations.torchft.live_gradients import live_step
from evenstride.integrations.torchft.quorum import Quorums, WorkerEndpoint
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.coordinator import Standing
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.failures.peers import myself
from evenstride.runtime.loading.position import CommittedPosition

logger = logging.getLogger("evenstride")


@dataclass(frozen=True, slots=True)
class LiveArguments:
    """The arguments of a `LiveStride`; see there."""

    global_batch: int
    seed: int
    policy: str
    min_share: int
    max_share: int | None


class LiveRun:
    """Position, weighting and generation of one worker: the `Coordinator` of live mode."""

    def __init__(self, asked: LiveArguments, endpoint: WorkerEndpoint) -> None:
        self.asked = asked
        self.quorums = Quorums(endpoint)
        self.progress = CommittedPosition(asked.seed, asked.global_batch)
        self.step = live_step(self.commit, self.quorums.add_up)
        self.layout: Plain = {}
        self.micro = False  # whether this worker's loader may split a share into micro-batches
        self.committed = False  # whether the latest vote kept its step
        self.generation: LiveGeneration | None = None
        self.standing = Standing(0, DrawBarrier(()))  # for a loader before the first quorum
        self._lead = LeaderRecord(asked.policy, asked.global_batch)
        self._peer = myself(0)
        self._name = f"{self._peer.host}/{endpoint.name}"
        self._incarnation = uuid.uuid4().hex
        self._number = -1
        self._kept_any, self._dropped = False, -1
        self._ready = False  # whether the next step has its generation
        self._trained: Draw | None = None

    def stand(self) -> Standing:
        """Return this worker's standing in the next step; collective, between two steps.

        Raises `WorkerLost` if there is no quorum. Any other error is the same on every worker.
        """
        self._check_voted()
        if self.generation is not None and self.committed and self.progress.cursor.done:
            return self.standing  # the epoch is over: no quorum is needed before the next one
        while not self._ready:
            try:
                with self.step.clock.waiting():
                    self._begin_step()
                self._ready = True
            except Broken as error:
                self._drop(error)
        return self.standing

    def exchange(self) -> None:
        """Do nothing: workers exchange when they have connected; see `stand`."""

    def commit(self, draw: Draw) -> None:
        """Note a trained step, for the vote at the optimizer's step."""
        self._trained = draw

    def explain_failure(self) -> None:
        """Do nothing: the loss of a worker drops the step, and training continues."""

    def vote(self) -> bool:
        """Return whether the current step is kept; votes once per step, then repeats the result."""
        if self._trained is None and not self._ready:
            return self.committed  # another optimizer in the same step
        draw = self._trained
        if draw is None or not self.step.batch.synced:
            raise UsageError(
                "optimizer.step() was called before the step's last backward pass; call it after "
                "stride.scale(loss).backward(), with micro-batches under `if stride.synced:`"
            )
        with self.step.clock.waiting():
            self.committed = self.quorums.vote()
        self._ready, self._trained = False, None
        if self.committed:
            self._kept_any = True
            self.progress.commit(draw.window)
        else:
            self._dropped = self._quorum_number
            logger.warning("step %d is dropped and comes again: a worker is gone", draw.step)
        return self.committed

    def _check_voted(self) -> None:
        if self._trained is not None:
            raise UsageError(
                f"the next batch was fetched, but step {self._trained.step} has not been voted on; "
                "call optimizer.step() of stride.optimizer(...) after each step's last backward "
                "pass"
            )

    def lay_out(self, layout: Plain, *, micro: bool) -> None:
        """Note the training loader's layout, and whether it may split shares."""
        self.layout, self.micro = layout, micro

    @property
    def _quorum_number(self) -> int:
        return -1 if self.generation is None else self.generation.quorum.number

    def _begin_step(self) -> None:
        kept = self.quorums.manager.current_step()
        quorum, now = self.quorums.begin(), self.generation
        if now is None or now.quorum != quorum or now.late:
            self._form(quorum, kept)
        else:
            self._check_another(quorum)
            now.exchange(self.progress.step)

    def _check_another(self, quorum: Quorum) -> None:
        """A worker that dropped a step must get a new quorum, or the others would not repeat it."""
        if quorum.number == self._dropped:
            raise WorkerLost(
                f"quorum {quorum.number} continues although this worker dropped a step in it; "
                "restart the worker, and it gets the weights of the others"
            )

    def _form(self, quorum: Quorum, kept: int) -> None:
        mine = self._shown(kept)
        formed = LiveGeneration(quorum, self._lead, self.quorums.gather, mine)
        self.generation, self._number = formed, formed.number
        self.standing = Standing(quorum.rank, formed.gate)
        self.step.clock.timer.report_to(formed.recorder)
        self.go_to(formed.position)  # a worker that is behind takes the position of the others
        self.step.limits.cut(micro=formed.micro)
        if formed.quorum.rank == 0:
            logger.info("generation %d: %s", formed.number, ", ".join(formed.names))

    def _drop(self, error: Broken) -> None:
        logger.warning("the workers form a new group: %s", error)
        self._dropped = self._quorum_number
        self.quorums.give_up(error)

    def _shown(self, kept: int) -> Shown:
        asked = self.asked
        settings = {
            "evenstride": __version__,
            "torch": torch.__version__.partition("+")[0],
            "global_batch": asked.global_batch,
            "seed": asked.seed,
            "policy": asked.policy,
            **self.layout,
        }
        own = {
            "min_share": asked.min_share,
            "max_share": asked.max_share,
            "device": self._peer.device,
            "slot": self._peer.slot,
        }
        return Shown(
            self._name,
            self._incarnation,
            kept,
            self._number,
            self._lead.leads,
            self.progress.save(),
            settings,
            own,
            self.micro,
            "" if self._kept_any else self._weights(),
        )

    def _weights(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.step.watched.parameters:
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {**self.progress.save(), "torchft": self.quorums.manager.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position, before the first step."""
        self.quorums.manager.load_state_dict(state["torchft"])
        self.go_to(state)

    def go_to(self, position: Plain) -> None:
        """Go to another worker's position, which comes together with its weights."""
        self.progress.go_to_step(position["step"])
        self.progress.load(position)
