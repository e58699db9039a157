"""`LiveStride`: the object that training scripts use in live mode."""

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
from evenstride.runtime.engines.process_groups import let_threads_finish_at_exit
from evenstride.runtime.engines.watched_models import is_sharded
from evenstride.runtime.loading.loader import Rank, TrainLoader
from evenstride.runtime.loading.loader_agreement import check_micro_batch, layout, order_of
from evenstride.runtime.loading.loader_options import (
    DataLoaderOptions,
    LoaderOptions,
    check_options,
)
from evenstride.runtime.loading.shards import Shards
from evenstride.runtime.loading.streams import as_source, window_kind
from evenstride.runtime.usage_errors import check_whole, in_flight

ModelT = TypeVar("ModelT", bound=nn.Module)


class LiveLoader(TrainLoader):
    """An iterable over this worker's part of each global batch.

    ``len(loader)`` is the number of steps of an epoch. A batch whose step was dropped comes again,
    split among the workers of that moment. Its samples are the same.
    """


class LiveStride:
    """Balanced, exact training whose workers may fail and rejoin. Experimental.

    Every worker is a process of its own, without ``init_process_group``. A launcher of your choice
    starts and restarts it. torchft's Lighthouse connects the workers.

    Args:
        global_batch: Samples per step over all present workers, the same in every step.
        seed: Seed for the sample order and for per-sample augmentation.
        policy: Rule that sets the shares, as in `evenstride.Stride`; not ``static:20,100``.
        name: Name of this worker, unique and the same after a restart; ``None`` uses
            ``REPLICA_GROUP_ID``.
        lighthouse: Address of the Lighthouse, ``http://HOST:29510``; ``None`` uses
            ``TORCHFT_LIGHTHOUSE``.
        host: Name or address at which other workers reach this one; ``None`` for its host name.
        min_workers: Smallest number of workers that may train a step.
        min_share: Smallest share of *this* worker in a full step, in samples.
        max_share: Largest share of *this* worker, in samples; ``None`` for no limit.
        timeout_s: Seconds that a collective, a vote or the transfer of weights may take.
        quorum_timeout_s: Seconds that a worker waits for a quorum before it raises.

    Raises:
        ConfigError: The name or the Lighthouse is missing, or a setting is invalid.
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
        let_threads_finish_at_exit()
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
            dataset: Map-style data set with a length, the same on every worker.
            shuffle: ``False`` keeps the order of the data set.
            drop_last: Leave out the last, incomplete *global* batch.
            max_micro_batch: Largest micro-batch of this worker, in samples. A larger share comes as
                several micro-batches; use `accumulate` then. Shares grow when workers fail.
            seeded: Seed torch, numpy and random for each sample.
            **options: Options of `torch.utils.data.DataLoader`, except ``batch_size``,
                ``sampler`` and ``batch_sampler``.

        Raises:
            ConfigError: The data set or an option is invalid, or a loader exists already.
        """
        if self._loader is not None:
            raise ConfigError(
                "this LiveStride has a training loader already and can have only one; keep it for "
                "all epochs"
            )
        kind = window_kind(as_source(dataset))
        if isinstance(dataset, Shards) or kind:
            raise ConfigError(
                f"live mode does not support {f'a {kind}' if kind else 'Shards'}, because it "
                "needs samples that any worker can load; use a map-style data set"
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
        """Return the same model; its gradients are summed over the workers from now on.

        Args:
            model: A plain module, the same on every worker, with equal weights on all workers of
                the first step. Its state is sent to workers that join later.

        Raises:
            ConfigError: The model is wrapped in an engine that averages gradients.
        """
        if isinstance(model, DistributedDataParallel) or is_sharded(model):
            raise ConfigError(
                f"watch() got a {type(model).__name__}, which averages over a fixed process group; "
                "pass the plain module in live mode"
            )
        self._run.step.watch(model)
        self._carry("model", model.load_state_dict, model.state_dict)
        return model

    def optimizer(self, optimizer: Optimizer) -> VotingOptimizer:
        """Return an optimizer whose ``step()`` votes, and does nothing if the step is dropped.

        Its state is sent to workers that join later. A step is dropped if a worker failed in it;
        its batch comes again. So step a learning rate schedule only under
        ``if stride.committed:``.

        Raises:
            ConfigError: The optimizer has parameters of models that were not given to `watch`.
        """
        ours = {id(p) for p in self._run.step.watched.parameters}
        groups = optimizer.param_groups
        strange = sum(id(p) not in ours for group in groups for p in group["params"])
        if strange:
            raise ConfigError(
                f"the optimizer has {strange} parameter(s) that belong to no watched model, so "
                "their gradients are not summed; call model = stride.watch(model) before "
                "stride.optimizer()"
            )
        self._carry("optimizer", optimizer.load_state_dict, optimizer.state_dict)
        return VotingOptimizer(optimizer, self._run.vote)

    def carry(self, stateful: Any) -> None:
        """Also send the state of another object to workers that join later.

        Args:
            stateful: Object with ``state_dict`` and ``load_state_dict``, such as a schedule. Every
                worker must pass the same objects in the same order, before the first step.
        """
        self._carry("more", stateful.load_state_dict, stateful.state_dict)

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss * n_k / N``, whose gradients sum to the exact mean over all samples.

        Args:
            loss: Mean over the samples of this worker's batch; a tensor of one element. Only one
                backward pass per batch is possible: add several losses first.

        Raises:
            ScaleError: Called outside the loop, or the loss was scaled before or has several
                elements.
        """
        return self._run.step.scaling.scale(loss, None)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Wrap the forward and backward pass of one micro-batch; see `evenstride.Stride`."""
        with self._run.step.accumulation.accumulate(model):
            yield

    @property
    def synced(self) -> bool:
        """Whether this is the last micro-batch of the step, so that the optimizer must step."""
        return self._run.step.batch.synced

    @property
    def committed(self) -> bool:
        """Whether the latest vote kept its step."""
        return self._run.committed

    @property
    def samples(self) -> int:
        """Samples of the current batch; 0 while the weights are being received."""
        return self._run.step.batch.read_samples()

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each worker in the latest decision, in the order of `workers`."""
        return () if self._run.generation is None else self._run.generation.shares

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers of the current generation; empty before the first step."""
        return () if self._run.generation is None else self._run.generation.names

    @property
    def generation(self) -> int:
        """Number of the current generation; -1 before the first step."""
        return -1 if self._run.generation is None else self._run.generation.number

    @property
    def epoch(self) -> int:
        """Number of the current epoch; a worker that rejoins learns it when its loop starts."""
        return self._run.progress.epoch

    @property
    def step(self) -> int:
        """Steps kept since the start of training, over all workers and restarts."""
        return self._run.progress.earlier + self._run.progress.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as plain values, the same on every worker.

        Raises:
            StepInFlight: Called between the backward pass of a step and its vote.
        """
        batch = self._run.step.batch
        if batch.mid_step or batch.unstepped:
            raise in_flight(self.step)
        return self._run.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; every worker must load the same, before its first step.

        Raises:
            ConfigError: The state belongs to another seed, global batch or data set.
        """
        self._run.load(state)

    def close(self) -> None:
        """Leave the group and stop the threads; else this happens when the program ends."""
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
            f"LiveStride has no {setting}, and {variable} is not set; pass "
            f"LiveStride({setting}=...) or set {variable}"
        )
    return value


def _check_policy(spec: str) -> None:
    if isinstance(policy_from_spec(spec), GivenShares):
        raise ConfigError(
            f"policy is {spec!r}, with a share for each worker, but in live mode the number of "
            "workers may change; use 'adaptive' or 'uniform'"
        )
