"""`Stride`: the one object a training script talks to."""

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
from evenstride.runtime.loading.loader_options import CostFn, DataLoaderOptions, LoaderOptions
from evenstride.runtime.rank_session import RankSession
from evenstride.runtime.run_start import form_team, settle
from evenstride.runtime.sinks.snapshot import Sink
from evenstride.runtime.telemetry.summary import Summary
from evenstride.runtime.usage_errors import (
    by_epoch,
    in_flight,
    refuse_for_evaluation,
    refuse_for_training,
)

ModelT = TypeVar("ModelT", bound=nn.Module)


class Stride:
    """Balanced, exact data-parallel training over the ranks of a process group.

    Every rank makes it, with the same arguments (limits of shares apart) and after
    ``init_process_group``; it compares them and raises alike on every rank. With one process
    it does nothing but hand out the batches.

    Args:
        global_batch: ``B``, samples per step over all workers; kept at every step. ``auto``: chosen
            anew where an epoch ends, from the lower bound on, or ``EVENSTRIDE_GLOBAL_BATCH``.
        bounds: of ``auto``: the smallest batch and the largest.
        seed: of the order of the samples and of the randomness of their loading.
        policy: how the shares are set: ``adaptive`` (the default), ``uniform``, ``static``,
            ``static:20,100``, ``dynamic-batching``; or an object of your own with the methods of
            `Policy`, the same on every rank. ``EVENSTRIDE_POLICY`` sets it where the script does
            not.
        sync: how the workers' steps become those of one model: by the engine's all-reduce (``bsp``,
            the default); by parameter servers (``bsp-ps(servers=2)``, ``asp``,
            ``ssp(staleness=3)``); ``local-sgd(every=8)`` averages weights, ``delayed`` applies
            gradients a step late. Also takes a mode of `evenstride.core.sync_modes`, such as
            ``LocalSgd(every=8)``. ``EVENSTRIDE_SYNC`` sets it where the script does not.
        engine: ``none`` if the script averages the gradients over the ranks itself, after
            ``backward`` and before ``optimizer.step``; then `watch` takes a bare module, too.
            ``auto`` (the default) expects an engine that does so, such as
            `DistributedDataParallel`, and refuses to train on several ranks without one.
        process_group: the ranks the engine averages over; ``None`` means all.
        shard_group: with HSDP, the ranks that hold this rank's replica together:
            ``mesh["shard"].get_group()``. They wait for each other in every layer, so they get
            equal shares (but for one sample) and are balanced against the other groups as one
            worker; ``static:20,100`` then has one share per group. ``None``: every rank is
            balanced by itself, which is right for DDP and for FSDP2 over all ranks.
        min_share: fewest samples of *this* rank in a full step, at least 1.
        max_share: most samples of *this* rank in a step, for its memory; ``None`` for no limit.
        quantum: shares of *this* rank are multiples of it, but for one rank that takes what is left
            of the global batch, and for the tail of an epoch. With micro-batches of that size,
            ``loader(max_micro_batch=quantum)``, all of them have the same shape.
        memory_fraction: part of its memory that a rank's share may fill, as far as the memory per
            sample is known from peaks of the steps before; ``None`` to let shares grow whatever
            they take. Not with micro-batches, which are as large as ``max_micro_batch`` says.
        trace: folder or ``.jsonl`` file the leader records the run in; else ``EVENSTRIDE_TRACE``.
        noise_every: measure the noise of every so-many-th step's gradient, from which follows how
            large a batch is worth its time; 0 for none. ``None`` leaves it to ``EVENSTRIDE_NOISE``,
            else none. See the page on gradient noise.
        sinks: where rank 0 tells what it knows while it trains, such as ``csv:metrics.csv``,
            ``tensorboard:runs/tb`` or ``prometheus:9108``, or an object with the methods of
            `Sink`; several as a list, or texts with commas. ``None`` leaves it to
            ``EVENSTRIDE_SINKS``, else nowhere. See the page on metrics.
        alert_below: part of the best speed it has kept, below which the log names a worker; 0 for
            never. ``None`` leaves it to ``EVENSTRIDE_ALERT_BELOW``, else 0.7.

    Raises:
        ConfigError: there are several processes but no process group, the global batch does
            not fit the bounds, the policy is unknown, or the ranks disagree.
        WorkerLost: some rank did not come within the group's timeout.

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
        quantum: int = 1,
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
        atexit.register(self._close_at_exit)

    def loader(
        self,
        dataset: Any,
        *,
        train: bool = True,
        shuffle: bool = True,
        drop_last: bool = False,
        max_micro_batch: int | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        cost_fn: CostFn | None = None,
        partition: str = "step",
        global_batch: int | None = None,
        seeded: bool = True,
        cold_prefetch: bool = False,
        check_data: bool = True,
        **options: Unpack[DataLoaderOptions],
    ) -> DataLoader[Any]:
        """Return a loader of this rank's part of the data; every rank must call it.

        Args:
            dataset: map-style, with a length, the same on every rank; or `Shards`.
            train: false for evaluation: each sample once over all ranks, no padding, in the
                data set's order. There is one training loader per `Stride`, and any number of
                the others. Between two epochs another training loader may take its place, for
                data that has grown.
            shuffle: training only; false keeps the data set's order.
            drop_last: training only; leave out the last, incomplete *global* batch.
            max_micro_batch: most samples in one batch of this rank; larger shares come as
                several batches, to be used with `accumulate`. With ``cost_fn`` the most that a
                batch may cost (tokens, say) rather than a number of samples.
            weight_fn: training only; weight of a (micro-)batch, such as its number of tokens,
                over which the loss is a mean. ``None`` counts samples.
            cost_fn: training only; what a sample costs, such as its number of tokens: a function
                of its index, or an array with a number for each (much quicker: a function is
                called for every sample of the global batch on every rank). Each step's samples
                are then dealt out so that costs, not counts, are in proportion to the shares.
                It changes who trains a sample, never when, and not what it weighs.
            partition: training only; ``epoch`` lets each rank keep to a contiguous part of the
                data set for a whole epoch, for data on local disks. The parts are cut anew at
                each epoch, in proportion to the shares then, which stay until its end. Which
                samples a step trains then depends on the split, and a state saved in mid-epoch
                goes on with as many ranks only.
            global_batch: evaluation only; samples per step over all ranks, the `Stride`'s own
                if ``None``.
            seeded: load each sample under random seeds of its own (torch, numpy, random), so
                that augmentation does not depend on the split. Costs about 8 us per sample;
                false also allows the data set's own batched access.
            cold_prefetch: training only; let worker processes prefetch from the start, at the
                price of finding the first split later.
            check_data: compare a few samples between the ranks, which must all hold the same
                data. Takes about 50 ms with several ranks, more if a single sample takes longer.
            **options: those of `torch.utils.data.DataLoader`, except ``batch_size``,
                ``sampler`` and ``batch_sampler``.

        Raises:
            ConfigError: the data set has no length or is empty, the ranks disagree or hold
                different data, an option cannot be, or there is a training loader already.
        """
        if not train:
            refuse_for_evaluation(drop_last=drop_last, weight_fn=weight_fn, cost_fn=cost_fn)
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
            seeded=seeded,
            cold_prefetch=cold_prefetch,
            by_epoch=by_epoch(partition, cost_fn),
            check_data=check_data,
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
        """Return the same model, its passes now timed without the collectives in them.

        Every rank must call it; they compare engine and devices, and refuse alike what cannot be.

        Args:
            model: `DistributedDataParallel`, or any wrapper that averages gradients over the
                ranks.
            drift_check: steps between two comparisons of the ranks' weights; where they differ,
                rank 0's are broadcast, which is counted in `summary`. ``None`` means every 100
                steps where ranks compute on devices of several kinds, which round differently,
                and never where they do not; 0 means never. Not for sharded models. Optimizer
                states are not compared.
            compress: ``bf16`` to send gradients as bfloat16, which halves the traffic of slow
                links and rounds to 8 bits; for DDP, over any backend, in place of its hook.
            check_loss: look at the first loss, whether it is the mean that `scale` takes it for.

        Raises:
            ConfigError: nothing averages the model's gradients over several ranks (see
                ``Stride(engine=)``), the engine is one whose gradient cannot be made exact
                (`DataParallel`, FSDP1, DeepSpeed, FSDP2 over devices of several kinds), the ranks
                would wait for each other in different backends, or a rank's device lacks what is
                asked of it.
        """
        self._session.watcher.watch(model, drift_check, compress, check_loss=check_loss)
        return model

    def sync_batch_norm(self, net: ModelT) -> ModelT:
        """Return the same module, its batch norm now with statistics over all ranks' samples.

        Each sample counts once whatever the split, so the result is that of one process on the
        union batch; on CPU, too, where `torch.nn.SyncBatchNorm` refuses. Every rank must call it,
        before it wraps the module. It takes two small collectives per layer and step, so all
        ranks must run the same number of batches in each step.

        Args:
            net: any module; its `torch.nn.BatchNorm1d`, ``2d``, ``3d`` and
                `torch.nn.SyncBatchNorm` are changed in place.

        Raises:
            ConfigError: a layer is lazy, parametrized or has a forward pass of its own, or the
                ranks disagree, or the training loader may cut shares into different numbers of
                micro-batches (`loader` refuses that likewise); nothing was changed.
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
        """Return ``loss * W * n_k / N``, whose averaged gradient is exact whatever the split.

        Call it once for every loss of a batch. It composes with GradScaler, clipping and
        communication hooks. Log the unscaled loss; the mean of all ranks' scaled ones is
        the loss of the whole global batch.

        Args:
            loss: mean over the samples (or tokens) of this rank's batch, a scalar.
            weight: what the mean is over, if not samples (tokens, or class weights, say); every
                rank must then give one. Not with micro-batches or a ``weight_fn``.
            reduction: ``sum`` for a loss that adds up over all ranks and micro-batches to that of
                the global batch: a sum over samples, or a sum divided by a count over all ranks.
                It is then multiplied by ``W`` alone.

        Raises:
            ScaleError: outside the loop, for a loss scaled before or of other than one element,
                a weight that is negative or not finite, or a first loss that is no mean over the
                batch (see `watch`).

        Source:
            Weighted gradients as in Dynamic Batching (ACSOS 2020, arXiv 2305.12213, sec. III);
            see `evenstride.core.gradients.weighting.loss_factor`.
        """
        return self._session.step.scaling.scale(loss, weight, reduction)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Hold back the engine's synchronisation until the step's last micro-batch.

        Put forward pass, `scale` and backward pass inside.

        Raises:
            UsageError: outside the loop, or ``model`` cannot hold back its synchronisation.
        """
        with self._session.step.accumulation.accumulate(model):
            yield

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Go on when a batch does not fit into memory.

        Put forward and backward pass inside, with `accumulate` within it::

            for x, y in loader:
                with stride.guard(), stride.accumulate(model):
                    stride.scale(F.cross_entropy(model(x), y)).backward()
                if stride.synced:
                    optimizer.step(); optimizer.zero_grad()

        An out-of-memory error of the *forward* pass is swallowed: `synced` is false, `samples` is
        0, and the loader yields the same samples again as smaller micro-batches, so that the
        gradient stays exact. This rank's batches remain that small. So is one of a backward pass
        whose synchronisation was held back; all of the step's samples come again then. Shares
        that grow are run like that first, which takes one more small micro-batch.

        Buffers that a forward pass updates (batch norm's statistics) may see samples twice.

        Raises:
            OutOfMemory: the memory ended in a backward pass that synchronises, or with a batch
                that cannot be cut (a single sample, a sharded model, outside of `accumulate`).
        """
        with self._session.memory.guard():
            yield

    @property
    def synced(self) -> bool:
        """Whether the batch in hand is the step's last, so that the optimizer is due."""
        return self._session.step.batch.synced

    @property
    def samples(self) -> int:
        """Samples of the batch in hand that count: 0 for a worker left out, and after the loop."""
        return self._session.step.batch.read_samples()

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the latest step, in rank order."""
        return self._session.state.latest_shares()

    @property
    def epoch(self) -> int:
        """The current epoch; the next one as soon as a loop has ended it."""
        return self._session.state.progress.epoch

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers; one that changes is known when the loop has ended."""
        return self._session.state.progress.global_batch

    @property
    def step(self) -> int:
        """Steps committed since the very beginning, over all epochs and restarts."""
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
        """Return the sum of all ranks' ``total`` over the sum of their ``count``; collective.

        The ranks meet through the process group's store, so no collective of the engine takes part.

        Args:
            total: this rank's sum, a number or a tensor.
            count: how many samples (or tokens) it is over, 0 included.
            name: to record it under in the trace, such as ``loss``; every
                rank gives the same.

        Returns:
            A float, or for a tensor of several elements one of the same shape, in float64.

        Raises:
            ConfigError: a tensor of several elements has a name, or the name is no text.
            RanksDisagree: some rank went on without calling it, or called it at another place of
                the script, under another name, or for a tensor of another shape.
            WorkerLost: some rank is gone.
        """
        return self._session.reports.mean(total, count, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: plain values, the same on every rank.

        A step is part of it as soon as its optimizer step is done, or its gradient scaler's
        ``update``, also where that left the step out. Batches drawn and not trained are not. It
        can be loaded at any number of workers.

        Raises:
            StepInFlight: between a step's backward pass and its optimizer step.
        """
        batch = self._session.step.batch
        if batch.mid_step or batch.unstepped:
            raise in_flight(self.step)
        return self._session.state.progress.save()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; every rank must load the same, outside the loop.

        Raises:
            ConfigError: the state is of another seed, global batch or data set.
        """
        self._session.loaders.load(state)

    def summary(self) -> Summary:
        """Return what the run came to so far; complete on rank 0. Not collective."""
        return self._session.reports.summary()

    def close(self) -> None:
        """End the control threads and close the trace; otherwise done when the program ends."""
        atexit.unregister(self._close_at_exit)
        for hook in self._hooks:
            hook.remove()
        self._session.close(at_exit=False)

    def _close_at_exit(self) -> None:
        self._session.close(at_exit=True)
