"""Classify the handwritten digits that come with paceline, with Keras on TensorFlow."""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import paceline.arrays as arrays


def load(file):
    with np.load(file) as digits:
        return (digits["images"].reshape(-1, 8, 8, 1) / 16).astype(np.float32), digits["labels"].astype(np.int32)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="a file with images and labels")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1408)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", help="a file for the weights")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)

    images, labels = load(args.data)
    n = args.samples  # to train on; the rest is for testing
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    session = arrays.join(model.trainable_variables, f"sgd:lr={args.lr},momentum=0.9")

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        return loss, grads

    for epoch in range(args.epochs):
        for x, y in session.batches((images[:n], labels[:n]), args.batch_size):
            loss, grads = train_step(x, y)
            session.step(grads, loss)
        print(f"epoch {epoch}: loss {loss:.3f}")

    session.finish()
    predicted = model(images[n:], training=False)
    accuracy = (np.argmax(predicted, 1) == labels[n:]).mean()
    print(f"accuracy on the rest: {accuracy:.1%}")
    if args.save and session.is_main:
        np.savez(args.save, *model.get_weights())


if __name__ == "__main__":
    main()
