"""Accuracy on Flower's simulation engine: FedAvg, FedBuff and FL-R²SP side by side, by round and by time.

    pip install ".[flower,plot]" "flwr[simulation]"           # in an environment of its own
    python benchmarks/flower_accuracy.py [--seeds 0 1 2] [--results docs/results/flower.json]
        [--plot docs/pictures/flower.png]

Each seed is one `flwr run examples/flower` with 32 nodes: another partition of the digits, and other initial weights.
The curves of seeds that --results has already are kept. Without --seeds, nothing is run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import ROOT
from benchmarks.output import Output

BIN = Path(sys.executable).parent
PORT = 39191  # of the superlink
NODES = 32
#: The policies, and their names in the table.
POLICIES = {
    "fedavg": "Flower's FedAvg",
    "fedbuff": "`fedbuff`",
    "fl-r2sp:groups=4": "`fl-r2sp:groups=4`",
    "fl-r2sp:groups=4,filter=false": "`fl-r2sp:groups=4,filter=false`",
}
ROUNDS = (6, 12, 24, 48)
GOAL = 0.9
Curves = dict[str, list[tuple[float, float]]]  # policy → seconds and accuracy after each round


@contextmanager
def superlink(folder: Path) -> Iterator[dict[str, str]]:
    """Run a superlink with the simulation engine. Yield the environment for `flwr`."""
    connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{PORT}"\ninsecure = true\n'
    (folder / "config.toml").write_text(connection)
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    command = [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--port", str(PORT)]
    with subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno()) as server:
        try:
            while not _is_up():
                if server.poll() is not None:
                    raise SystemExit("flower-superlink ended; see the log on standard error.")
                time.sleep(0.5)
            yield environment
        finally:
            server.terminate()


def _is_up() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
            return True
    except urllib.error.URLError:
        return False


def curves_of(seed: int, policies: list[str], rounds: int, environment: dict[str, str], folder: Path) -> Curves:
    """Run the example with a seed, and return its curves."""
    results = folder / f"{seed}.json"
    settings = f"policies='{';'.join(policies)}' num-rounds={rounds} seed={seed} results='{results}'"
    command = [str(BIN / "flwr"), "run", str(ROOT / "examples" / "flower"), "--stream", "--run-config", settings]
    subprocess.run(
        [*command, "--federation-config", f"num-supernodes={NODES}"],
        env=environment,
        stdout=sys.stderr.fileno(),
        check=True,
    )
    if not results.exists():
        raise SystemExit("The run failed; see the log on standard error.")
    return dict(json.loads(results.read_text()))


def rows_of(found: dict[str, Curves], policies: list[str]) -> list[list[str]]:
    """Return the table: for each policy, means over the seeds, and the range of the last accuracy."""
    rows = []
    for policy in policies:
        curves = [each[policy] for each in found.values() if policy in each]
        last = [curve[-1][1] for curve in curves]
        reached = [next((seconds for seconds, accuracy in curve if accuracy >= GOAL), None) for curve in curves]
        rows.append(
            [
                POLICIES.get(policy, policy),
                *(f"{mean(curve[at][1] for curve in curves):.1%}" for at in ROUNDS if at < len(curves[0])),
                f"{min(last):.1%} to {max(last):.1%}",
                f"{mean(curve[-1][0] for curve in curves):.0f}",
                " ".join(f"{seconds:.0f}" if seconds else "–" for seconds in reached),
            ]
        )
    return rows


def draw(found: dict[str, Curves], policies: list[str], file: Path) -> None:
    """Draw the mean accuracy over rounds and over time. A band shows the range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    by_round, by_time = figure.subplots(1, 2, sharey=True)
    for number, policy in enumerate(policies):
        curves = [each[policy] for each in found.values() if policy in each]
        rounds = range(len(curves[0]))
        accuracies = [[curve[at][1] for curve in curves] for at in rounds]
        means = [mean(each) for each in accuracies]
        seconds = [mean(curve[at][0] for curve in curves) for at in rounds]
        style: dict[str, Any] = {"color": f"C{number}", "label": POLICIES.get(policy, policy).replace("`", "")}
        by_round.plot(rounds, means, **style)
        lowest, highest = [min(each) for each in accuracies], [max(each) for each in accuracies]
        by_round.fill_between(rounds, lowest, highest, alpha=0.15, lw=0)
        by_time.plot(seconds, means, **style)
    by_round.set(xlabel="round", ylabel="test accuracy", ylim=(0.5, 1))
    by_time.set(xlabel="seconds")
    by_time.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=ROUNDS[-1])
    parser.add_argument("--results", type=Path, help="a JSON file to read and to extend")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if not (BIN / "flwr").exists():
        raise SystemExit(f"There is no Flower in {BIN}: install it and run this with its Python, as --help shows.")
    found: dict[str, Curves] = {}
    if given.results and given.results.exists():
        found = json.loads(given.results.read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.seeds:
            with superlink(folder) as environment:
                for seed in given.seeds:
                    curves = curves_of(seed, given.policies, given.rounds, environment, folder)
                    found[str(seed)] = found.get(str(seed), {}) | curves
                    if given.results:
                        given.results.write_text(json.dumps(found, indent=1) + "\n")
    headings = ["", *(f"after {at}" for at in ROUNDS if at <= given.rounds)]
    headings += ["range", "seconds", f"seconds to {GOAL:.0%}"]
    Output(None).table(f"{NODES} nodes, seeds {', '.join(found)}", headings, rows_of(found, given.policies))
    if given.plot:
        draw(found, given.policies, given.plot)


if __name__ == "__main__":
    main()
