"""Training time of two workers on this machine, against one plain process, for the same number of samples.

python benchmarks/overhead.py [--repeats 3] [--width 128] [trainer] [loop] [steps]

`steps` compares small steps with those of PyTorch's DDP (`steps.py`). The rest of this file is about the others.

The model is a tiny BERT (2 layers, 128 wide by default, sequences of 64 tokens). `trainer` is the Hugging Face recipe
before and after porting (examples/port/huggingface). `loop` is a plain PyTorch loop over the same model.

Only training counts: `train_runtime`, as Trainer reports it, or the time from the first batch of the loop to the end of
the last step. Imports, the start of processes and the creation of the model are left out. Of two workers, the slower
one counts. All ways alternate in one run, and the best time of each counts.

The plain process has torch's default number of threads. `paceline run` shares the cores among its workers. In the last
row, OMP_NUM_THREADS gives each worker all cores, as paceline did before it shared them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks import steps

ROOT = Path(__file__).parents[1]
PORT = ROOT / "examples/port/huggingface"
SAMPLES, BATCH, LENGTH, LAYERS = 1024, 16, 64, 2
TRAINER = (
    *("--max_train_samples", str(SAMPLES), "--max_eval_samples", "16", "--max_seq_length", str(LENGTH)),
    *("--num_hidden_layers", str(LAYERS), "--per_device_train_batch_size", str(BATCH)),
    *("--num_train_epochs", "1", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "1"),
)
PATTERN = {"trainer": r"'train_runtime': '?([0-9.]+)", "loop": r"seconds: ([0-9.]+)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 4096], help="hidden units of `steps`")
    parser.add_argument("--policies", nargs="+", default=["bsp", "asp", "r2sp"], help="of `steps`")
    parser.add_argument("ways", nargs="*", default=["trainer", "loop", "steps"], help="trainer, loop, steps")
    args = parser.parse_args()
    if args.ways == ["run-loop"]:
        run_loop(args.width)
        return
    if plain_ways := [way for way in args.ways if way != "steps"]:
        compare_with_plain(plain_ways, args.repeats, args.width)
    if "steps" in args.ways:
        steps.compare(args.hidden, args.policies, args.repeats)


def compare_with_plain(names: list[str], repeats: int, width: int) -> None:
    """Print the training times of scripts in two workers and in one plain process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"{SAMPLES} samples, batches of {BATCH}, on {cores} cores; seconds of training, best of {repeats}\n")
    print("| script | way | seconds | × plain |")
    print("|---|---|---|---|")
    for name in names:
        every_core = {"OMP_NUM_THREADS": str(cores)}
        ways: dict[str, tuple[list[str], dict[str, str]]] = {
            "one plain process": (plain(name, width), {}),
            "paceline run --workers 2": (ported(name, width), {}),
            f"the same with OMP_NUM_THREADS={cores}": (ported(name, width), every_core),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(repeats):
            for way, (command, variables) in ways.items():
                best[way] = min(best[way], seconds(name, command, variables))
        reference = best["one plain process"]
        for way, value in best.items():
            print(f"| {name} | {way} | {value:.2f} | {value / reference:.2f} |", flush=True)


def plain(name: str, width: int) -> list[str]:
    """Return the command of one plain process."""
    return [sys.executable, *script(name, "before.py", width)]


def ported(name: str, width: int) -> list[str]:
    """Return the command of two workers."""
    return [sys.executable, "-m", "paceline", "run", "--workers", "2", *script(name, "after.py", width)]


def script(name: str, recipe: str, width: int) -> list[str]:
    if name == "trainer":
        return [str(PORT / recipe), *TRAINER, "--hidden_size", str(width)]
    return [__file__, "--width", str(width), "run-loop"]


def seconds(name: str, command: list[str], variables: dict[str, str]) -> float:
    """Run a command, and return the training time of its slowest worker."""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as folder:
        where = ["--output_dir", folder] if name == "trainer" else []
        ran = subprocess.run(
            [*command, *where], env=environment | variables, capture_output=True, text=True, check=False
        )
    found = re.findall(PATTERN[name], ran.stdout + ran.stderr)
    if ran.returncode or not found:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
    return max(map(float, found))


def run_loop(width: int) -> None:
    """Train the tiny BERT in a plain loop: in a job if there is one, and else without paceline."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(0, 100, (SAMPLES, LENGTH))
    loader: Any = DataLoader(TensorDataset(tokens, ((tokens < 10).sum(1) >= 2).long()), BATCH, shuffle=True)
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
    )
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "PACELINE_CONNECT" in os.environ:
        import paceline

        loader = paceline.join(model, optimizer).loader(loader, 1)
    began = time.perf_counter()
    for inputs, labels in loader:
        optimizer.zero_grad()
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
    print(f"seconds: {time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
