"""Train a small convolutional network on the handwritten digits that come with paceline, with Keras 3.

KERAS_BACKEND=jax python examples/keras_digits.py                           # alone; or KERAS_BACKEND=tensorflow
paceline run --workers 2 --policy r2sp examples/keras_digits.py             # two workers; their server needs torch
paceline work --connect HOST:PORT examples/keras_digits.py                  # a worker where torch is not installed
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from keras import layers

import paceline.arrays as arrays
from paceline.workloads import digits

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step_of_tensorflow(model, session):
    """Return a function that makes one step. Its statistics, those of batch norm, are in the model's variables."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def loss_and_gradients(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    def step(x, y):
        loss, gradients = loss_and_gradients(x, y)
        session.step(gradients, loss)

    return step


def step_of_jax(model, session):
    """Return a function that makes one step. Functions of JAX change no variables, so they return the statistics."""
    import jax

    @jax.jit
    def loss_and_gradients(params, statistics, x, y):
        def loss_of(params):
            predicted, changed = model.stateless_call(params, statistics, x, training=True)
            return cross_entropy(y, predicted), changed

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    def step(x, y):
        (loss, statistics), gradients = loss_and_gradients(session.params, session.statistics, x, y)
        session.step(gradients, loss, statistics=statistics)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    keras.utils.set_random_seed(arguments.seed)

    images, labels, test_images, test_labels = digits.load()
    x, test_x = ((each.reshape(-1, 8, 8, 1) / 255).astype(np.float32) for each in (images, test_images))
    y = labels.astype(np.int32)

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.1),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    optimizer = f"sgd:lr={arguments.lr},momentum=0.9"
    with arrays.join(model.trainable_variables, optimizer, statistics=model.non_trainable_variables) as session:
        step = (step_of_jax if keras.backend.backend() == "jax" else step_of_tensorflow)(model, session)
        for inputs, targets in session.batches((x, y), arguments.batch_size, arguments.epochs, arguments.seed):
            step(inputs, targets)

        session.finish()  # wait for the other workers, and pull the final weights
        if session.is_main:
            predicted = np.asarray(model(test_x, training=False)).argmax(1)
            accuracy = float((predicted == test_labels).mean())
            session.log(accuracy=accuracy)
            print(f"accuracy on the test set: {accuracy:.1%}")


if __name__ == "__main__":
    main()
