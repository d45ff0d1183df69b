"""Train a GPT on the source code of Python's standard library, byte by byte.

python examples/gpt.py                                                                        # alone
paceline run --workers 4 --policy r2sp examples/gpt.py                                        # four workers
paceline run --workers 4 --policy r2sp --updates int8 examples/gpt.py --local-steps 10        # over thin links

Nothing is downloaded. The workers must have the same version of Python, because its files are the data.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import paceline

HEAD = 32  # width of an attention head
EVALUATED = 64  # windows of the validation text
SIZES = {
    "small": {"layers": 4, "width": 128, "context": 128},  # 0.8 million parameters
    "medium": {"layers": 6, "width": 384, "context": 256},  # 10.8 million parameters
}

# Data


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the modules of Python's standard library: about 4.5 MB to train on, and 0.2 MB to validate.

    The modules inside packages are left out. Every 20th module is in the second text.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not modules:
        raise SystemExit("This Python has no source code of its standard library to train on.")
    training = [module for number, module in enumerate(modules) if number % 20]
    return text_of(training), text_of(modules[::20])


def text_of(files: Sequence[Path]) -> torch.Tensor:
    """Return the bytes of these files, one after the other."""
    return torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8)


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text. The target of each byte is the byte that follows it."""

    def __init__(self, text: torch.Tensor, context: int, starts: torch.Tensor) -> None:
        self.text, self.context, self.starts = text, context, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.starts[number])
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


# The model


class Block(nn.Module):
    """A layer of a transformer: causal self-attention, and two linear layers for each place by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.attention(self.norm1(x)).unflatten(-1, (3, -1, HEAD)).movedim((2, 3), (0, 2))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    """A language model. Its tokens are bytes, and its output has a logit for each next byte."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("projection.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.bytes(x) + self.places.weight[: x.shape[1]]
        return F.linear(self.norm(self.blocks(embedded)), self.bytes.weight)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a byte, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# Training


def settings() -> argparse.Namespace:
    """Return the settings on the command line. A size that is not given is that of --size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help=f"a multiple of {HEAD}")
    parser.add_argument("--context", type=int, help="bytes that the model sees")
    parser.add_argument("--steps", type=int, default=600, help="batches of all workers together")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local-steps", type=int, help="steps of a worker between two exchanges; see docs/training.md")
    parser.add_argument("--overlap", action="store_true", help="compute while an exchange is on its way")
    parser.add_argument("--ahead", action="store_true", help="begin each round ahead of the pulled model")
    parser.add_argument("--outer", help="the server's optimizer for local steps, such as sgd:lr=0.7,momentum=0.9")
    parser.add_argument("--every", type=int, default=25, help="steps of the main worker between two validations")
    arguments = parser.parse_args()
    for name, value in SIZES[arguments.size].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.width % HEAD:
        parser.error(f"--width must be a multiple of {HEAD}; got {arguments.width}.")
    return arguments


def main() -> None:
    arguments = settings()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    text, held_out = texts()
    samples = arguments.steps * arguments.batch_size
    training = Windows(text, arguments.context, torch.randint(len(text) - arguments.context, (samples,)))
    last = len(held_out) - arguments.context - 1
    validation = Windows(held_out, arguments.context, torch.linspace(0, last, EVALUATED).long())
    test_x, test_y = default_collate([validation[number] for number in range(EVALUATED)])
    test_x, test_y = test_x.to(device), test_y.to(device)

    model = GPT(arguments.layers, arguments.width, arguments.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95))

    exchange = {name: getattr(arguments, name) for name in ("local_steps", "overlap", "ahead", "outer")}
    with paceline.join(model, optimizer, **exchange) as session:

        def validate(when: str) -> None:
            with torch.no_grad():
                loss = loss_of(model, test_x, test_y).item()
            session.log(val_loss=loss)  # for --target, --plot and the live table
            print(f"{when}: validation loss {loss:.3f}", flush=True)

        if session.is_main:
            validate("before training")
        for step, (x, y) in enumerate(session.batches(training, arguments.batch_size, seed=arguments.seed), start=1):
            loss = loss_of(model, x.to(device), y.to(device))
            loss.backward()
            session.step(loss)
            if session.is_main and step % arguments.every == 0:
                validate(f"after {step} steps")

        session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            validate("at the end")


if __name__ == "__main__":
    main()
