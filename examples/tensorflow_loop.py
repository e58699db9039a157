"""A training loop of TensorFlow; numbered comments mark the lines that evenstride adds or replaces.

Start it with two workers, or with three of unequal speed on one machine:

    torchrun --nproc-per-node 2 examples/tensorflow_loop.py --checkpoint saved
    evenstride lab --speeds 1,0.5,0.25 -- examples/tensorflow_loop.py

With --strategy, the collectives of MultiWorkerMirroredStrategy sum the gradients. The data are the
handwritten digits of scikit-learn. A run with the same --checkpoint continues, with any number of
workers.
"""

import argparse
import contextlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from evenstride.integrations.tensorflow import TensorFlowLoader, TensorFlowStride, connect


def model_of() -> keras.Model:
    layers = [keras.layers.Dense(1024, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def accuracy_of(stride: TensorFlowStride, model: keras.Model, tests: TensorFlowLoader) -> float:
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    for x, y in tests:
        accuracy.update_state(y, model(x))
    return stride.result(accuracy)  # 8: over the samples of all workers


def main(args: argparse.Namespace) -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16, labels.astype(np.int64)
    connect()  # 1: the workers of torchrun, or those of TF_CONFIG
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if args.strategy else None
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of()
        rates = keras.optimizers.schedules.CosineDecay(0.05, args.epochs * 3)
        optimizer = keras.optimizers.SGD(rates, momentum=0.9, global_clipnorm=1.0)

    stride = TensorFlowStride(args.global_batch, strategy=strategy)  # 2
    # 3: instead of a tf.data.Dataset that is batched and sharded
    loader = stride.loader((images[:1500], labels[:1500]))
    tests = stride.loader((images[1500:], labels[1500:]), train=False)
    stride.watch(model, optimizer)  # 4: the optimizer now applies the exact gradient
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(input_signature=loader.element_spec)  # 5: traced once for all batch sizes
    def train_step(x: tf.Tensor, y: tf.Tensor) -> None:
        strategy.run(step, args=(x, y)) if strategy else step(x, y)

    # 6: also the position in the data
    state = tf.train.Checkpoint(model=model, optimizer=optimizer, position=stride.position)
    if args.checkpoint and (newest := tf.train.latest_checkpoint(args.checkpoint)):
        state.restore(newest)
    saves = args.checkpoint and stride.chief
    manager = tf.train.CheckpointManager(state, args.checkpoint, 2) if saves else None

    for epoch in range(stride.epoch, args.epochs):  # 7: instead of range(epochs)
        for x, y in loader:
            train_step(x, y)
            if manager and stride.step % args.save_every == 0:
                manager.save()
        right = accuracy_of(stride, model, tests)
        if stride.chief:
            print(f"epoch {epoch + 1}: accuracy {right:.3f}")
    if stride.chief:
        print(stride.summary())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", action="store_true")
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="folder that all workers share")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
