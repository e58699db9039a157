"""`Stride`: the object that training scripts use."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evenstride.core.policy import Policy
from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.runtime.engines.process_groups import let_threads_finish_at_exit
from evenstride.runtime.loading.loader_options import CostFn, DataLoaderOptions, LoaderOptions
from evenstride.runtime.loading.streams import as_source
from evenstride.runtime.rank_session import RankSession
from evenstride.runtime.run_start import form_team, settle
from evenstride.runtime.sinks.snapshot import Sink
from evenstride.runtime.telemetry.summary import Summary
from evenstride.runtime.usage_errors import (
    by_epoch,
    refuse_for_evaluation,
    refuse_for_training,
)

ModelT = TypeVar("ModelT", bound=nn.Module)


class Stride:
    """Balanced data-parallel training with the exact gradient, over the ranks of a process group.

    Create it on every rank, after ``init_process_group``. It compares the arguments of all ranks
    and raises the same error on each. ``min_share``, ``max_share``, ``quantum`` and ``shard_group``
    may differ between ranks. With one process it only serves the batches.

    Args:
        global_batch: Samples per step over all workers, the same in every step. ``"auto"`` starts
            with the lower of ``bounds`` and chooses a new number at the end of each epoch. With
            ``"auto"``, ``EVENSTRIDE_GLOBAL_BATCH`` fixes the number instead.
        bounds: Smallest and largest global batch considered when ``global_batch="auto"``.
        seed: Seed for the sample order and for per-sample augmentation.
        policy: Rule that sets the shares: ``adaptive`` (the default), ``uniform``, ``static``,
            ``static:20,100`` or ``dynamic-batching``. Also takes an object with the methods of
            `Policy`, the same on every rank. ``None`` uses ``EVENSTRIDE_POLICY``, if set.
        sync: Synchronisation mode. ``bsp`` (the default) uses the engine's all-reduce.
            ``bsp-ps(servers=2)``, ``asp`` and ``ssp(staleness=3)`` use parameter servers.
            ``local-sgd(every=8)`` averages weights, and ``delayed`` applies each gradient one step
            late. Also takes a mode of `evenstride.core.sync_modes`, such as ``LocalSgd(every=8)``.
            ``None`` uses ``EVENSTRIDE_SYNC``, if set.
        engine: ``auto`` (the default) expects an engine that averages gradients, such as
            `DistributedDataParallel`, and refuses to train on several ranks without one. ``none``
            means that the script averages the gradients itself, between ``backward`` and
            ``optimizer.step``; `watch` then accepts a plain module, too.
        process_group: Ranks that the engine averages over; ``None`` for all ranks.
        shard_group: With HSDP, the ranks that together hold this rank's copy of the parameters:
            ``mesh["shard"].get_group()``. They are one worker: their shares differ by at most one
            sample, and ``static:20,100`` has one share per group. ``None`` makes each rank a
            worker, which is right for DDP and for FSDP2 over all ranks.
        min_share: Smallest share of *this* rank in a full step, in samples, at least 1.
        max_share: Largest share of *this* rank, in samples; ``None`` for no limit.
        quantum: Number that *this* rank's shares are multiples of. Exceptions are one rank, which
            takes the remainder of the global batch, and the last step of an epoch. With
            ``loader(max_micro_batch=quantum)`` all micro-batches have the same shape. ``None``
            allows any share and looks for one in the measured times, such as the waves of a GPU,
            which ``adaptive`` follows. 1 allows any share, and none is looked for.
        memory_fraction: Fraction of a rank's memory, above 0 and at most 1, that its share may
            fill. The memory per sample is estimated from the peaks of earlier steps. ``None``
            lets shares grow without this limit. Has no effect with micro-batches, whose size is
            ``max_micro_batch``.
        trace: Folder or ``.jsonl`` file in which the leader records the run. ``None`` uses
            ``EVENSTRIDE_TRACE``, if set.
        noise_every: Steps between two measurements of the gradient noise, which shows how large a
            batch is worth its time; 0 for no measurement. ``None`` uses ``EVENSTRIDE_NOISE``, if
            set; else 10 if the global batch is chosen during the run, and 0 if not. See the page
            on gradient noise.
        sinks: Where rank 0 writes metrics during training, such as ``csv:metrics.csv``,
            ``tensorboard:runs/tb``, ``prometheus:9108``, ``wandb:PROJECT`` or
            ``mlflow:EXPERIMENT``, or an object with the methods of `Sink`. Give several as a list,
            or as text separated by commas. ``None`` uses
            ``EVENSTRIDE_SINKS``, if set. See the page on metrics.
        alert_below: Fraction of a worker's best sustained speed below which the log names the
            worker; 0 for never. ``None`` uses ``EVENSTRIDE_ALERT_BELOW``, if set, else 0.7.

    Raises:
        ConfigError: There are several processes but no process group, the global batch does not
            fit the bounds, a setting is invalid, or the ranks disagree.
        WorkerLost: Some rank did not create its `Stride` within the group's timeout.

    Example:
        >>> import torch, evenstride
        >>> stride = evenstride.Stride(global_batch=4)
        >>> data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(10, 1))
        >>> net = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        >>> for (x,) in stride.loader(data):
        ...     stride.scale(net(x).square().mean()).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> stride.epoch
        1
    """

    def __init__(
        self,
        global_batch: int | Literal["auto"],
        *,
        bounds: tuple[int, int] | None = None,
        seed: int = 0,
        policy: str | Policy[Any] | None = None,
        sync: str | SyncMode | None = None,
        engine: Literal["auto", "none"] = "auto",
        process_group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        min_share: int = 1,
        max_share: int | None = None,
        quantum: int | None = None,
        memory_fraction: float | None = 0.9,
        trace: str | os.PathLike[str] | None = None,
        noise_every: int | None = None,
        sinks: str | Sink | Sequence[str | Sink] | None = None,
        alert_below: float | None = None,
    ) -> None:
        settings, environment, group = settle(
            process_group,
            global_batch,
            bounds,
            seed=seed,
            policy=policy,
            sync=sync,
            min_share=min_share,
            max_share=max_share,
            quantum=quantum,
            memory_fraction=memory_fraction,
            trace=trace,
            noise_every=noise_every,
            sinks=sinks,
            alert_below=alert_below,
            engine=engine,
        )
        team, lead = form_team(settings, group, shard_group)
        self._session = RankSession(team, lead, settings, environment)
        self._hooks = self._session.step.optimizers.listen()
        let_threads_finish_at_exit()
        self._pid = os.getpid()
        atexit.register(self._close_at_exit)

    def loader(
        self,
        dataset: Any,
        *,
        train: bool = True,
        shuffle: bool = True,
        drop_last: bool = False,
        max_micro_batch: int | None = None,
        micro_batches: int | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        cost_fn: CostFn | None = None,
        partition: str | None = None,
        global_batch: int | None = None,
        seeded: bool = True,
        cold_prefetch: bool = False,
        check_data: bool = True,
        max_steps: int | None = None,
        bucketed: bool = False,
        **options: Unpack[DataLoaderOptions],
    ) -> DataLoader[Any]:
        """Return the loader of this rank's mini-batches; a collective call.

        The loader is a `torch.utils.data.DataLoader` whose batches have this rank's share of
        samples, so their size differs between ranks and changes over time. ``len(loader)`` is the
        number of steps of an epoch, equal on every rank. A `Stride` has one training loader and
        any number of evaluation loaders. Between two epochs a new training loader may replace the
        old one, for a data set that has grown.

        Args:
            dataset: Map-style data set with a length, the same on every rank; `Shards`; `Stream`;
                or an `IterableDataset`, which is read as a `Stream`. For training without epochs
                also a function of a number of samples that returns a batch of so many. It draws
                them with the global random generators. The ranks draw the same global batch, and
                each keeps its rows.
            train: ``False`` for evaluation: each sample once over all ranks, without padding, in
                the order of the data set.
            shuffle: Training only. ``False`` keeps the order of the data set.
            drop_last: Training only. Leave out the last, incomplete *global* batch.
            max_micro_batch: Largest micro-batch of this rank, in samples. A larger share comes as
                several micro-batches; use `accumulate` then. With ``cost_fn`` it is the largest
                cost of a micro-batch (in tokens, for example) instead.
            micro_batches: Training only. Number of micro-batches of every rank in a full step,
                instead of their largest size; use `accumulate` then. For loops in which the ranks
                must have equally many batches, because they count them or call collectives for
                each. A short step at the end of an epoch has fewer, in proportion. A rank with
                fewer samples than that runs placeholders for the rest, like a rank without a share.
            weight_fn: Training only. Returns the weight of a (micro-)batch, such as its number of
                tokens, if the loss is a mean over something other than samples. The ranks sum
                the weights once per step.
            cost_fn: Training only. Cost of a sample, such as its number of tokens: an array with
                one number per sample, or a function of the sample's index. The array is much
                faster: each rank calls the function for every sample of the global batch. Costs
                instead of counts are then proportional to the shares. This changes which rank
                trains a sample, but not the step in which it is trained, nor its weight.
            partition: Training only. ``epoch`` gives each rank one part of the data set for a
                whole epoch, for data on local disks. Parts are cut from one permutation by
                ``seed``, or from the data set's own order with ``shuffle=False``. Each epoch cuts
                it by the shares in force at its start, which then stay fixed. Which samples a step
                trains depends on the split. If a state saved within an epoch is restored with
                another number of ranks, they split what the parts have left step by step. ``step``
                splits each global batch. ``None`` is ``epoch`` with the policy ``dbs``, where the
                data can be cut into parts, and otherwise ``step``.
            global_batch: Evaluation only. Samples per step over all ranks; ``None`` for that of
                the `Stride`.
            seeded: Seed torch, numpy and random for each sample, so that augmentation does not
                depend on the split. Costs about 8 us per sample. ``False`` also lets the data set
                use its own batched access.
            cold_prefetch: Training only. Let loader processes prefetch from the first step on. The
                first split is then found later.
            check_data: Compare a few samples between the ranks, which must all have the same data.
                Takes about 50 ms with several ranks, or longer if loading one sample does.
            max_steps: Training only. Steps of the whole training, restarts included, after which
                the loop ends, also within an epoch.
            bucketed: Training only, with ``cost_fn``. Each rank orders its samples of a step by
                cost, so that a micro-batch has samples of similar length and little padding.
                ``max_micro_batch`` then limits the cost of a micro-batch whose samples are all
                padded to the longest. The samples of a step stay the same.
            **options: Options of `torch.utils.data.DataLoader`, except ``batch_size``,
                ``sampler`` and ``batch_sampler``.

        Raises:
            ConfigError: The data set has no length or no samples, the ranks disagree or have
                different data, an option is invalid, or a training loader exists already.
        """
        dataset = as_source(dataset)
        if not train:
            refuse_for_evaluation(
                drop_last=drop_last,
                micro_batches=micro_batches,
                weight_fn=weight_fn,
                cost_fn=cost_fn,
                max_steps=max_steps,
                bucketed=bucketed,
            )
            return self._session.evaluation.loader(
                dataset,
                global_batch,
                max_micro_batch,
                options,
                seeded=seeded,
                check_data=check_data,
            )
        refuse_for_training(global_batch)
        asked = LoaderOptions(
            shuffle=shuffle,
            drop_last=drop_last,
            weight_fn=weight_fn,
            max_micro_batch=max_micro_batch,
            micro_batches=micro_batches,
            seeded=seeded,
            cold_prefetch=cold_prefetch,
            by_epoch=by_epoch(partition, cost_fn),
            check_data=check_data,
            max_steps=max_steps,
            bucketed=bucketed,
        )
        return self._session.loaders.make(dataset, asked, options, cost_fn)

    def watch(
        self,
        model: ModelT,
        *,
        drift_check: int | None = None,
        compress: str | None = None,
        check_loss: bool = True,
    ) -> ModelT:
        """Return the same model, now timed; its collectives count as waiting. A collective call.

        The ranks compare engines and devices, and raise the same error on each.

        Args:
            model: `DistributedDataParallel`, FSDP2, or any wrapper that averages gradients over
                the ranks.
            drift_check: Steps between two comparisons of the ranks' weights; 0 for none. If they
                differ, the weights of rank 0 are broadcast, and `summary` counts it. ``None``
                means 100 if the ranks compute on devices of different kinds, which round
                differently, and 0 if not. Optimizer states are not compared. Not available for
                sharded models.
            compress: ``bf16`` sends gradients as bfloat16. This halves the traffic and rounds to 8
                bits. It replaces DDP's communication hook and works over any backend.
            check_loss: Check that the first loss is the mean that `scale` expects.

        Raises:
            ConfigError: Nothing averages the model's gradients over several ranks (see
                ``Stride(engine=)``). The engine's gradient cannot be made exact (`DataParallel`,
                FSDP1, DeepSpeed, FSDP2 over devices of different kinds). The ranks would wait for
                each other in different backends. A rank's device lacks a needed feature.
        """
        self._session.watcher.watch(model, drift_check, compress, check_loss=check_loss)
        return model

    def sync_batch_norm(self, net: ModelT) -> ModelT:
        """Return the same module, whose batch norm now uses statistics of all ranks' samples.

        Each sample counts once for any split, so the result is that of one process on the global
        batch. It also works on CPU, where `torch.nn.SyncBatchNorm` does not. Call it on every
        rank, before wrapping the module.

        Each layer needs two small collectives per step. Therefore all ranks must run the same
        number of batches in each step.

        Args:
            net: Any module. Its `torch.nn.BatchNorm1d`, ``2d``, ``3d`` and
                `torch.nn.SyncBatchNorm` layers are changed in place.

        Raises:
            ConfigError: A layer is lazy, is parametrized or defines its own forward pass; the
                ranks disagree; or the training loader may split shares into different numbers of
                micro-batches. `loader` raises the last one, too. Nothing was changed.
        """
        self._session.norms.convert(net)
        return net

    def scale(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Return ``loss * W * n_k / N``, whose averaged gradient is exact for any split.

        ``W`` is the number of ranks, ``n_k`` this rank's samples in the batch, and ``N`` the
        samples of the step over all ranks. Call it once for every loss of a batch. It composes
        with GradScaler, clipping and communication hooks. Log the unscaled loss. The mean of the
        scaled losses of all ranks is the loss of the global batch.

        Args:
            loss: Mean over the samples (or tokens) of this rank's batch; a tensor of one element.
            weight: Weight of the batch if the mean is not over samples: its number of tokens or
                its sum of class weights, for example. Every rank must then give one. Not with
                micro-batches or a ``weight_fn``.
            reduction: ``sum`` for a loss that adds up, over all ranks and micro-batches, to the
                loss of the global batch: a sum over samples, or a sum divided by a count over all
                ranks. It is multiplied by ``W`` alone.

        Returns:
            A tensor of the same shape as ``loss``. If this rank has a share of 0, its value and
            its gradients are exactly 0.

        Raises:
            ScaleError: Called outside the loop; the loss was scaled before or has several
                elements; the weight is negative or not finite; or the first loss is not a mean
                over the batch (see `watch`).
            UsageError: Called during the capture of a CUDA graph, or after the gradients of an
                earlier micro-batch were zeroed.

        Source:
            Weighted gradients as in Dynamic Batching (ACSOS 2020, arXiv 2305.12213, sec. III);
            see `evenstride.core.gradients.weighting.loss_factor`.
        """
        return self._session.step.scaling.scale(loss, weight, reduction)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Postpone the engine's all-reduce to the last micro-batch of the step.

        Put the forward pass, `scale` and the backward pass inside.

        Args:
            model: Model that was given to `watch`.

        Raises:
            UsageError: Called outside the loop, or ``model`` has no way to postpone its
                all-reduce.
        """
        with self._session.step.accumulation.accumulate(model):
            yield

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Repeat a batch in smaller micro-batches if it does not fit into memory.

        Put the forward and backward pass inside, with `accumulate` within it::

            for x, y in loader:
                with stride.guard(), stride.accumulate(model):
                    stride.scale(F.cross_entropy(model(x), y)).backward()
                if stride.synced:
                    optimizer.step(); optimizer.zero_grad()

        An out-of-memory error of the *forward* pass does not leave the context: the loader yields
        the same samples again as smaller micro-batches. The same holds for a backward pass whose
        all-reduce was postponed: the loader then yields all samples of the step again. The
        gradient stays exact. For the failed batch, `synced` is ``False`` and `samples` is 0. The
        micro-batches of this rank keep the smaller size.

        The first batch of a clearly larger size runs as two micro-batches, a large one and a small
        one, so that it can be repeated. Buffers that a forward pass updates, such as batch norm
        statistics, may see samples twice.

        Raises:
            OutOfMemory: Memory ran out in a backward pass that synchronises, or with a batch that
                cannot be split (a single sample, a sharded model, outside of `accumulate`).
        """
        with self._session.memory.guard():
            yield

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for other ranks, not as work.

        Put collectives of the training step inside, if it has any: each takes as long as the
        slowest rank needs, and would make all ranks look equally slow.
        """
        with self._session.state.clock.waiting():
            yield

    @property
    def synced(self) -> bool:
        """Whether this is the last micro-batch of the step, so that the optimizer must step."""
        return self._session.step.batch.synced

    @property
    def samples(self) -> int:
        """Samples of the current batch; 0 for a worker with a share of 0, and outside the loop."""
        return self._session.step.batch.read_samples()

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the latest step, in rank order."""
        return self._session.state.latest_shares()

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0; increases when a loop reaches its end."""
        return self._session.state.progress.epoch

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers; with ``"auto"`` it may change when an epoch ends."""
        return self._session.state.progress.global_batch

    @property
    def step(self) -> int:
        """Steps committed since the start of training, over all epochs and restarts."""
        progress = self._session.state.progress
        return progress.earlier + progress.step

    @overload
    def mean(self, total: float, count: float | Tensor, name: str | None = None) -> float: ...

    @overload
    def mean(
        self, total: Tensor, count: float | Tensor, name: str | None = None
    ) -> float | Tensor: ...

    def mean(
        self, total: float | Tensor, count: float | Tensor, name: str | None = None
    ) -> float | Tensor:
        """Return the sum of ``total`` over all ranks divided by that of ``count``; collective.

        The ranks communicate through the store of the process group, not through the engine's
        collectives.

        Args:
            total: Sum over this rank's samples, a number or a tensor of any shape.
            count: Number of samples (or tokens) in that sum; may be 0.
            name: Name under which the trace records the mean, such as ``loss``; the same on every
                rank. ``None`` records nothing.

        Returns:
            A float; for a tensor of several elements, a float64 tensor of the same shape on the
            CPU. NaN if the count over all ranks is 0.

        Raises:
            ConfigError: The name is not a string, or was given for a tensor of several elements.
            RanksDisagree: Some rank continued without this call, or made it at another place of
                the script, with another name or with another shape.
            WorkerLost: Some rank is lost.
        """
        return self._session.reports.mean(total, count, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as plain values, the same on every rank.

        A step is included once its optimizer step is done, or once the ``update`` of its gradient
        scaler is done, even if the scaler skipped the step. Batches that were drawn but not
        trained are not included. The state can be loaded with any number of workers.

        Raises:
            StepInFlight: Called between the backward pass of a step and its optimizer step.
        """
        return self._session.loaders.save()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Call it on every rank with the same state, outside the loop.

        Raises:
            ConfigError: The state belongs to another seed, global batch or data set.
            LoaderBusy: Called inside the training loop.
        """
        self._session.loaders.load(state)

    def summary(self) -> Summary:
        """Return a summary of the run so far; complete on rank 0 only. Not collective."""
        return self._session.reports.summary()

    def close(self) -> None:
        """Stop the control threads and close the trace; else this happens when the program ends."""
        atexit.unregister(self._close_at_exit)
        for hook in self._hooks:
            hook.remove()
        self._session.close(at_exit=False)

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:  # a fork of this process has none of its threads
            self._session.close(at_exit=True)
