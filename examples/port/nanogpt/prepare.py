"""Write a small text of sums as train.bin, val.bin and meta.pkl, one number for each character.

python examples/port/nanogpt/prepare.py runs/sums
"""

import argparse
import pickle
import random
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="the folder to write to")
parser.add_argument("--lines", type=int, default=4000)
arguments = parser.parse_args()

random.seed(1337)
pairs = [(random.randrange(100), random.randrange(100)) for _ in range(arguments.lines)]
text = "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)
characters = sorted(set(text))
numbers = {character: number for number, character in enumerate(characters)}
tokens = np.array([numbers[character] for character in text], dtype=np.uint16)

arguments.folder.mkdir(parents=True, exist_ok=True)
cut = len(tokens) * 9 // 10
tokens[:cut].tofile(arguments.folder / "train.bin")
tokens[cut:].tofile(arguments.folder / "val.bin")
(arguments.folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(characters), "characters": characters}))
print(f"{cut:,} tokens to train on, {len(tokens) - cut:,} to validate, {len(characters)} different characters")
