"""A training script whose step takes a given time and whose model has a given size, for benchmarks of `advise`.

    paceline advise --link 1Gbit benchmarks/sleeping_model.py --megabytes 5 --seconds 0.05

It sleeps instead of computing, so that many workers fit on few cores. The model is real, and so are its gradients.
"""

import argparse
import time

import torch
from torch.utils.data import TensorDataset

import paceline

INPUTS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=5.0, help="the size of the model")
    parser.add_argument("--seconds", type=float, default=0.1, help="the time of a step")
    parser.add_argument("--samples", type=int, default=32_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Linear(INPUTS, int(arguments.megabytes * 1e6 / 4 / (INPUTS + 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(arguments.samples, 1))
    with paceline.join(model, optimizer) as session:
        for (samples,) in session.batches(data, 32, 1):
            begin = time.perf_counter()
            loss = model(samples.mean(0).expand(1, INPUTS)).square().mean()
            loss.backward()
            time.sleep(max(0.0, arguments.seconds - (time.perf_counter() - begin)))
            session.step(loss)


if __name__ == "__main__":
    main()
