"""`LiveStride`: what a training script talks to in live mode."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import GivenShares
from evenstride.errors import ConfigError
from evenstride.integrations.torchft.live_gradients import VotingOptimizer
from evenstride.integrations.torchft.live_run import LiveArguments, LiveRun
from evenstride.integrations.torchft.quorum import WorkerEndpoint
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.engines.watched_models import is_sharded
from evenstride.runtime.loading.loader import Rank, TrainLoader
from evenstride.runtime.loading.loader_agreement import check_micro_batch, layout, order_of
from evenstride.runtime.loading.loader_options import (
    DataLoaderOptions,
    LoaderOptions,
    check_options,
)
from evenstride.runtime.loading.shards import Shards
from evenstride.runtime.usage_errors import check_whole, in_flight

ModelT = TypeVar("ModelT", bound=nn.Module)


class LiveLoader(TrainLoader):
    """An iterable over this worker's part of each global batch.

    ``len(loader)`` is the number of steps of an epoch. A batch whose step was dropped comes again,
    cut among the workers there are then; samples are the same.
    """


class LiveStride:
    """Balanced, exact training whose workers may die and come back. Experimental.

    Every worker is a process of its own, started and restarted by whatever starts it, without
    ``init_process_group``; torchft's Lighthouse brings them together.

    Args:
        global_batch: ``B``, samples per step over all workers, whoever is there.
        seed: of the order of the samples and of the randomness of their loading.
        policy: how the shares are set, as in `evenstride.Stride`; ``static:20,100`` cannot be.
        name: of this worker, the same after a restart and no other's; ``REPLICA_GROUP_ID`` if not
            given.
        lighthouse: address of the Lighthouse, ``http://HOST:29510``; ``TORCHFT_LIGHTHOUSE`` if not
            given.
        host: name or address under which the other workers reach this one; its host name if not
            given.
        min_workers: fewest workers that a step may be trained by.
        min_share: fewest samples of *this* worker in a full step.
        max_share: most samples of *this* worker in a step; ``None`` for no limit.
        timeout_s: how long a collective, a vote or the transfer of weights may take.
        quorum_timeout_s: how long a worker waits for a quorum before it gives up.

    Raises:
        ConfigError: name or Lighthouse are not given, or a setting cannot be.
    """

    def __init__(
        self,
        global_batch: int,
        *,
        seed: int = 0,
        policy: str = "adaptive",
        name: str | None = None,
        lighthouse: str | None = None,
        host: str | None = None,
        min_workers: int = 1,
        min_share: int = 1,
        max_share: int | None = None,
        timeout_s: float = 30.0,
        quorum_timeout_s: float = 60.0,
    ) -> None:
        check_whole("global_batch", global_batch, least=1)
        check_whole("min_workers", min_workers, least=1)
        _check_policy(policy)
        endpoint = WorkerEndpoint(
            name=_given("name", name, "REPLICA_GROUP_ID"),
            lighthouse=_given("lighthouse", lighthouse, "TORCHFT_LIGHTHOUSE"),
            host=host or socket.gethostname(),
            min_workers=min_workers,
            timeout_s=timeout_s,
            quorum_timeout_s=quorum_timeout_s,
        )
        self._run = LiveRun(
            LiveArguments(global_batch, seed, policy, min_share, max_share), endpoint
        )
        self._loader: LiveLoader | None = None
        self._carried = 0
        self._closed = False
        self._carry("position", self._run.go_to, self._run.progress.save)
        self._hooks = self._run.step.optimizers.listen()
        atexit.register(self.close)

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        max_micro_batch: int | None = None,
        seeded: bool = True,
        **options: Unpack[DataLoaderOptions],
    ) -> LiveLoader:
        """Return the training loader; there is one per `LiveStride`. Not collective.

        Args:
            dataset: map-style, with a length, the same on every worker.
            shuffle: false keeps the data set's order.
            drop_last: leave out the last, incomplete *global* batch.
            max_micro_batch: most samples in one batch of this worker; larger shares come as
                several batches, to be used with `accumulate`. Shares grow when workers die.
            seeded: load each sample under random seeds of its own.
            **options: those of `torch.utils.data.DataLoader`, except ``batch_size``,
                ``sampler`` and ``batch_sampler``.

        Raises:
            ConfigError: the data set or an option cannot be, or there is a loader already.
        """
        if self._loader is not None:
            raise ConfigError(
                "this LiveStride has a training loader already, and it can have one only; "
                "keep it for all epochs"
            )
        if isinstance(dataset, Shards):
            raise ConfigError(
                "Shards were given, and live mode needs samples that anyone can load; use a "
                "map-style data set"
            )
        check_options(options)
        check_micro_batch(max_micro_batch)
        asked = LoaderOptions(
            shuffle=shuffle, drop_last=drop_last, max_micro_batch=max_micro_batch, seeded=seeded
        )
        shown: Plain = layout(dataset, asked, 0, seed=None)
        run = self._run
        run.progress.attach(order_of(dataset, {**shown, "lanes": (1,)}, asked, run.asked.seed))
        alike = ("length", "shuffle", "drop_last")
        run.lay_out({key: shown[key] for key in alike}, micro=max_micro_batch is not None)
        self._loader = LiveLoader(Rank(run, run.step, run.progress), dataset, asked, options)
        return self._loader

    def watch(self, model: ModelT) -> ModelT:
        """Return the same model; its gradients are added up over the workers from now on.

        Args:
            model: a plain module, the same on every worker, with equal weights on all that start
                at the beginning. Its state is sent to workers that come later.

        Raises:
            ConfigError: it is wrapped in an engine that averages by itself.
        """
        if isinstance(model, DistributedDataParallel) or is_sharded(model):
            raise ConfigError(
                f"watch() got a {type(model).__name__}, which averages over a fixed process group; "
                "give live mode the plain module"
            )
        self._run.step.watch(model)
        self._carry("model", model.load_state_dict, model.state_dict)
        return model

    def optimizer(self, optimizer: Optimizer) -> VotingOptimizer:
        """Return an optimizer whose ``step()`` votes, and does nothing if the step is dropped.

        Its state is sent to workers that come later. A step is dropped when a worker died in it;
        its batch comes again. So step a schedule under ``if stride.committed:`` only.

        Raises:
            ConfigError: it has parameters of models that `watch` was not given.
        """
        ours = {id(p) for p in self._run.step.watched.parameters}
        groups = optimizer.param_groups
        strange = sum(id(p) not in ours for group in groups for p in group["params"])
        if strange:
            raise ConfigError(
                f"the optimizer has {strange} parameter(s) of no watched model, whose gradients "
                "nobody adds up; call model = stride.watch(model) before stride.optimizer()"
            )
        self._carry("optimizer", optimizer.load_state_dict, optimizer.state_dict)
        return VotingOptimizer(optimizer, self._run.vote)

    def carry(self, stateful: Any) -> None:
        """Send the state of something else (a schedule, say) to workers that come later, too.

        Args:
            stateful: has ``state_dict`` and ``load_state_dict``; every worker must give the same
                in the same order, before the first step.
        """
        self._carry("more", stateful.load_state_dict, stateful.state_dict)

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss * n_k / N``, whose gradients add up to the exact mean over all samples.

        Args:
            loss: mean over the samples of this worker's batch, a scalar. One backward pass per
                batch: add losses up before.

        Raises:
            ScaleError: outside the loop, or for a loss scaled before or of several elements.
        """
        return self._run.step.scaling.scale(loss, None)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Wrap forward and backward pass of one micro-batch; see `evenstride.Stride`."""
        with self._run.step.accumulation.accumulate(model):
            yield

    @property
    def synced(self) -> bool:
        """Whether the batch in hand is its step's last, so that the optimizer is due."""
        return self._run.step.batch.synced

    @property
    def committed(self) -> bool:
        """Whether the latest vote kept its step."""
        return self._run.committed

    @property
    def samples(self) -> int:
        """Samples of the batch in hand that count: 0 while weights are on their way."""
        return self._run.step.batch.read_samples()

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each worker in the latest decision, in the order of `workers`."""
        return () if self._run.generation is None else self._run.generation.shares

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers of the present generation; none before the first step."""
        return () if self._run.generation is None else self._run.generation.names

    @property
    def generation(self) -> int:
        """Number of the present generation; -1 before the first step."""
        return -1 if self._run.generation is None else self._run.generation.number

    @property
    def epoch(self) -> int:
        """The current epoch, of all workers; a worker that comes back learns it with its loop."""
        return self._run.progress.epoch

    @property
    def step(self) -> int:
        """Steps kept since the very beginning, by whoever was there."""
        return self._run.progress.earlier + self._run.progress.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: plain values, the same on every worker.

        Raises:
            StepInFlight: between a step's backward pass and its vote.
        """
        batch = self._run.step.batch
        if batch.mid_step or batch.unstepped:
            raise in_flight(self.step)
        return self._run.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; every worker must load the same, before its first step.

        Raises:
            ConfigError: the state is of another seed, global batch or data set.
        """
        self._run.load(state)

    def close(self) -> None:
        """Leave the others and end the threads; otherwise done when the program ends."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        self._run.quorums.close()

    def _carry(self, kind: str, load: Callable[[Any], Any], save: Callable[[], Any]) -> None:
        self._run.quorums.manager.register_state_dict_fn(f"{self._carried}-{kind}", load, save)
        self._carried += 1


def _given(setting: str, value: str | None, variable: str) -> str:
    value = value or os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"LiveStride has no {setting}, and {variable} is not set either; give "
            f"LiveStride({setting}=...) or set {variable}"
        )
    return value


def _check_policy(spec: str) -> None:
    if isinstance(policy_from_spec(spec), GivenShares):
        raise ConfigError(
            f"policy is {spec!r}, with a share for each worker, and live mode must deal out the "
            "batch to any number of workers; use 'adaptive' or 'uniform'"
        )
