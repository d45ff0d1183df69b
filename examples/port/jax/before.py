"""Classify the handwritten digits that come with paceline, with JAX and optax."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax


def load(file):
    with np.load(file) as digits:
        return (digits["images"].reshape(-1, 64) / 16).astype(np.float32), digits["labels"].astype(np.int32)


def new_params(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, 128)) / 8, "b": jnp.zeros(128)},
        "output": {"w": jax.random.normal(second, (128, 10)) / 11, "b": jnp.zeros(10)},
    }


def predict(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


@jax.jit
@jax.value_and_grad
def loss_and_grads(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="a file with images and labels")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1408)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", help="a file for the weights")
    args = parser.parse_args()

    images, labels = load(args.data)
    n = args.samples  # to train on; the rest is for testing
    params = new_params(jax.random.key(0))
    optimizer = optax.sgd(args.lr, momentum=0.9)
    state = optimizer.init(params)

    for epoch in range(args.epochs):
        for rows in np.split(np.random.permutation(n), n // args.batch_size):
            loss, grads = loss_and_grads(params, images[rows], labels[rows])
            updates, state = optimizer.update(grads, state)
            params = optax.apply_updates(params, updates)
        print(f"epoch {epoch}: loss {loss:.3f}")

    accuracy = (predict(params, images[n:]).argmax(1) == labels[n:]).mean()
    print(f"accuracy on the rest: {accuracy:.1%}")
    if args.save:
        np.savez(args.save, *jax.tree.leaves(params))


if __name__ == "__main__":
    main()
