"""Figures and texts of the tests of TensorFlow, also for pytest, without TensorFlow."""

from __future__ import annotations

SAMPLES, BATCH, EPOCHS = 44, 10, 2
SHARES = (3, 7)
POLICY = "static:3,7"
CUT_AFTER = 7  # steps, in the second epoch

# Facts that each text must have.
FACTS: dict[str, tuple[str, ...]] = {
    "MirroredStrategy": ("MirroredStrategy", "MultiWorkerMirroredStrategy"),
    "CentralStorageStrategy": ("CentralStorage", "MultiWorkerMirroredStrategy"),
    "TPUStrategy": ("TPUStrategy", "MultiWorkerMirroredStrategy"),
    "ParameterServerStrategy": ("ParameterServerStrategy", "MultiWorkerMirroredStrategy"),
    "a scope": ("strategy=strategy",),
    "an open batch": ("'auto'", "number of samples"),
    "a mode": ("asp", "leave it out"),
    "noise": ("noise_every",),
    "an engine": ("engine",),
    "a batched pipeline": ("batch()", "unbatch()"),
    "a sharded pipeline": ("shard()",),
    "a shuffled pipeline": ("seed=epoch",),
    "a shuffled pipeline without a seed": ("a seed",),
    "a random mix": ("sample_from_datasets()", "a seed"),
    "an order by chance": ("deterministic=False",),
    "a distributed data set": ("DistributedDataset",),
    "arrays that do not fit": ("rows",),
    "processes for a pipeline": ("num_workers", "num_parallel_calls"),
    "micro-batches": ("max_micro_batch", "max_share"),
    "a collator of rows": ("collate_fn", "__getitem__"),
    "a model that is not built": ("keras.Input",),
    "a model outside of the scope": ("strategy.scope()",),
    "a synchronized batch norm": ("synchronized",),
    "another optimizer": ("keras.optimizers", "average"),
    "a reduction": ("'median'",),
    "two readings of a step": ("not averaged",),
    "a batch fetched in a function": ("tf.function", "train_step(batch)"),
    "a step outside of the loop": ("outside the training loop",),
    "both ways to average": ("average()", "of each", "none"),
    "fit": ("model.fit()", "GradientTape"),
    "a loop without the strategy": ("strategy.run",),
    "a scaled loss": ("scale()", "watch()"),
    "a broken TF_CONFIG": ("TF_CONFIG",),
    "a TF_CONFIG of others": ("TF_CONFIG", "RANK"),
}
