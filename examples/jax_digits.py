"""Train a small network on the handwritten digits that come with paceline, with JAX. A worker needs no torch.

python examples/jax_digits.py                                               # alone
paceline run --workers 2 --policy r2sp examples/jax_digits.py               # two workers; their server needs torch
paceline work --connect HOST:PORT examples/jax_digits.py                    # a worker where torch is not installed
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import paceline.arrays as arrays
from paceline.workloads import digits


def new_params(seed: int) -> dict[str, np.ndarray]:
    """Return weights with the names, shapes and order of torch's Sequential(Linear, ReLU, Linear)."""
    random = np.random.default_rng(seed)
    shapes = {"0.weight": (128, 64), "0.bias": (128,), "2.weight": (10, 128), "2.bias": (10,)}
    scales = {name: 1 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.0 for name, shape in shapes.items()}
    return {name: (scales[name] * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def scores(params, x):
    hidden = jax.nn.relu(x @ params["0.weight"].T + params["0.bias"])
    return hidden @ params["2.weight"].T + params["2.bias"]


@jax.jit
@jax.value_and_grad
def loss_and_gradients(params, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], axis=1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    images, labels, test_images, test_labels = digits.load()
    x, test_x = ((each.reshape(-1, 64) / 255).astype(np.float32) for each in (images, test_images))
    y = labels.astype(np.int32)

    params = new_params(arguments.seed)
    with arrays.join(params, f"sgd:lr={arguments.lr},momentum=0.9") as session:
        for inputs, targets in session.batches((x, y), arguments.batch_size, arguments.epochs, arguments.seed):
            loss, gradients = loss_and_gradients(session.params, inputs, targets)
            session.step(gradients, loss)

        session.finish()  # wait for the other workers, and pull the final weights
        if session.is_main:
            accuracy = float((scores(session.params, test_x).argmax(1) == test_labels).mean())
            session.log(accuracy=accuracy)
            print(f"accuracy on the test set: {accuracy:.1%}")


if __name__ == "__main__":
    main()
