"""Six scripts before and after porting: the size of the change, and that two workers equal one process.

Two workers under BSP compute the gradient of one process on both batches together. Where a script does more than
that, the test switches it off: dropout draws other random numbers, and each worker clips its own gradient. The order of
the samples must be the same too, so the reference draws it as the job does.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from examples.scripts import ROOT, Scripts

NAMES = ("mnist", "nanogpt", "huggingface", "lightning", "accelerate", "resume")
MAX_CHANGED = {"huggingface": 3, "lightning": 3}  # lines; of the others, 6
PAGES = {name: ROOT / "docs/recipes" / f"{'pytorch' if name == 'mnist' else name}.md" for name in NAMES}


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if not find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install 'paceline[recipes]'")


def before(name: str) -> str:
    return f"examples/port/{name}/before.py"


def after(name: str) -> str:
    return f"examples/port/{name}/after.py"


def difference(name: str) -> list[str]:
    """Return the output of `diff -U1` without line numbers."""
    old, new = ((ROOT / script).read_text().splitlines() for script in (before(name), after(name)))
    lines = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name: str) -> None:
    """Removed and added lines both count, and empty ones too."""
    changed = [line for line in difference(name) if line[0] in "+-"]
    assert 0 < len(changed) <= MAX_CHANGED.get(name, 6)
    assert "paceline" not in (ROOT / before(name)).read_text()
    assert f"{len(changed)} lines change" in PAGES[name].read_text()


@pytest.mark.parametrize("name", NAMES)
def test_pages_show_the_current_difference(name: str) -> None:
    for page in (PAGES[name], *([ROOT / "docs/training.md"] if name == "mnist" else [])):
        shown = re.search(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
        assert shown is not None
        assert [line.rstrip() for line in shown[1].splitlines()] == [line.rstrip() for line in difference(name)]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scripts:
    monkeypatch.chdir(tmp_path)
    return Scripts(monkeypatch)


@pytest.fixture
def order_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffle as the job and DistributedSampler do: epoch e has the permutation of the seed e."""

    def permutation(sampler: Any) -> Iterator[int]:
        epoch = sampler.epochs = getattr(sampler, "epochs", -1) + 1
        generator = torch.Generator().manual_seed(epoch)
        yield from torch.randperm(len(sampler.data_source), generator=generator).tolist()

    monkeypatch.setattr(torch.utils.data.RandomSampler, "__iter__", permutation)


def assert_equal(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(weights) == set(expected)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def loaded(path: str) -> Any:
    return torch.load(path, weights_only=False)


def write_mnist(folder: str, train: int = 512, test: int = 16) -> None:
    """Write the four files of MNIST with random images."""
    Path(folder).mkdir()
    for part, count in (("train", train), ("t10k", test)):
        pixels, labels = torch.randint(256, (count, 28, 28)), torch.arange(count) % 10
        for name, values, header in (("images-idx3", pixels, 16), ("labels-idx1", labels, 8)):
            (Path(folder) / f"{part}-{name}-ubyte").write_bytes(bytes(header) + values.byte().numpy().tobytes())


@pytest.mark.usefixtures("order_of_the_job")
def test_mnist_equals_one_process(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    write_mnist("images")
    quick = ("--data", "images", "--epochs", "1", "--lr", "0.1", "--save-model")
    scripts.alone(before("mnist"), "--batch-size", "128", *quick, "one.pt")
    scripts.together(after("mnist"), "--batch-size", "64", *quick, "two.pt")
    scripts.alone(after("mnist"), "--batch-size", "128", *quick, "alone.pt")
    assert_equal(loaded("two.pt"), loaded("one.pt"))
    assert_equal(loaded("alone.pt"), loaded("one.pt"))


@pytest.mark.slow
@needs("sklearn")
@pytest.mark.usefixtures("order_of_the_job")
def test_resume_equals_one_process_also_when_it_is_resumed(scripts: Scripts) -> None:
    scripts.alone(before("resume"), "-b", "128", "--epochs", "2", "--checkpoint", "one.tar")
    scripts.together(after("resume"), "--epochs", "1", "--checkpoint", "first.tar")
    scripts.together(after("resume"), "--epochs", "2", "--resume", "first.tar", "--checkpoint", "two.tar")
    one, two = loaded("one.tar"), loaded("two.tar")
    assert_equal(two["state_dict"], one["state_dict"])
    momentum, expected = (
        {number: state["momentum_buffer"] for number, state in each["optimizer"]["state"].items()}
        for each in (two, one)
    )
    assert_equal(momentum, expected)


@needs("sklearn")
@pytest.mark.usefixtures("order_of_the_job")
def test_checkpoints_of_one_process_and_of_a_job_are_alike(scripts: Scripts) -> None:
    scripts.alone(before("resume"), "-b", "128", "--epochs", "1", "--checkpoint", "one.tar")
    scripts.together(after("resume"), "--epochs", "2", "--resume", "one.tar", "--checkpoint", "two.tar")
    scripts.alone(after("resume"), "-b", "128", "--epochs", "2", "--resume", "one.tar", "--checkpoint", "alone.tar")
    assert_equal(loaded("two.tar")["state_dict"], loaded("alone.tar")["state_dict"])
    scripts.alone(before("resume"), "--epochs", "3", "--resume", "two.tar", "--checkpoint", "three.tar")
    assert loaded("three.tar")["epoch"] == 3


@needs("sklearn", "accelerate")
@pytest.mark.usefixtures("order_of_the_job")
@pytest.mark.filterwarnings("ignore")
def test_accelerate_equals_one_process(scripts: Scripts) -> None:
    quick = ("--cpu", "--num_epochs", "2", "--output_dir")
    scripts.alone(before("accelerate"), "--batch_size", "128", *quick, "one")
    scripts.together(after("accelerate"), "--batch_size", "64", *quick, "two")
    scripts.alone(after("accelerate"), "--batch_size", "128", *quick, "alone")
    from safetensors.torch import load_file

    assert_equal(load_file("two/model.safetensors"), load_file("one/model.safetensors"))
    assert_equal(load_file("alone/model.safetensors"), load_file("one/model.safetensors"))


class MicroBatches:
    """Replaces torch.randint in nanoGPT's get_batch: draw i of one process is made once, in the worker that it is for.

    One process makes `steps` draws for each update. Worker w of two makes the half of them that begins with w·steps/2.
    """

    def __init__(self, workers: int, steps: int) -> None:
        self.workers, self.share = workers, steps // workers
        self.made: dict[int, int] = {}  # draws of each thread, in the order in which the threads began

    def __call__(self, high: int, size: tuple[int, ...]) -> Any:
        thread = threading.get_ident()
        count = self.made[thread] = self.made.get(thread, -1) + 1
        worker = list(self.made).index(thread)
        update, step = divmod(count, self.share)
        number = (update * self.workers + worker) * self.share + step
        return torch.empty(size, dtype=torch.int64).random_(0, high, generator=torch.Generator().manual_seed(number))


NANOGPT = ("--data_dir=sums", "--max_iters=8", "--eval_interval=8", "--eval_iters=0", "--grad_clip=0.0")


@pytest.fixture
def sums(scripts: Scripts) -> None:
    scripts.alone("examples/port/nanogpt/prepare.py", "sums", "--lines", "200")


@pytest.mark.usefixtures("sums")
def test_nanogpt_equals_one_process_also_when_it_is_resumed(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", MicroBatches(workers=1, steps=4))
    scripts.alone(before("nanogpt"), *NANOGPT, "--out_dir=one")
    monkeypatch.setattr(torch, "randint", MicroBatches(workers=2, steps=4))
    scripts.together(after("nanogpt"), *NANOGPT, "--out_dir=two")
    one, two = loaded("one/ckpt.pt"), loaded("two/ckpt.pt")
    assert one["iter_num"] == two["iter_num"] == 8
    assert_equal(two["model"], one["model"])
    monkeypatch.setattr(torch, "randint", MicroBatches(workers=1, steps=4))
    resumed = (*NANOGPT, "--init_from=resume", "--max_iters=12", "--eval_interval=4")
    scripts.alone(before("nanogpt"), *resumed, "--out_dir=one")
    monkeypatch.setattr(torch, "randint", MicroBatches(workers=2, steps=4))
    scripts.together(after("nanogpt"), *resumed, "--out_dir=two")
    one, two = loaded("one/ckpt.pt"), loaded("two/ckpt.pt")
    assert one["iter_num"] == two["iter_num"] == 12
    assert_equal(two["model"], one["model"])


HUGGINGFACE = (
    *("--max_train_samples", "128", "--max_eval_samples", "16", "--hidden_dropout_prob", "0", "--max_grad_norm", "0"),
    *("--train_sampling_strategy", "sequential", "--learning_rate", "1e-3", "--report_to", "none"),
    *("--disable_tqdm", "1", "--save_steps", "4", "--num_train_epochs", "2"),
)


@needs("transformers", "accelerate")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_huggingface_equals_one_process_also_when_it_is_resumed(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file
    from transformers import Trainer

    # Both workers are threads of this process. While a Trainer loads random states, it changes a list of torch's that
    # all threads share.
    lock, load = threading.Lock(), Trainer._load_rng_state

    def load_alone(self: Any, folder: Any) -> None:
        with lock:
            load(self, folder)

    monkeypatch.setattr(Trainer, "_load_rng_state", load_alone)

    one = (*HUGGINGFACE, "--per_device_train_batch_size", "32", "--output_dir")
    two = (*HUGGINGFACE, "--per_device_train_batch_size", "16", "--output_dir")
    scripts.alone(before("huggingface"), *one, "one")
    scripts.together(after("huggingface"), *two, "two")
    scripts.alone(after("huggingface"), *one, "alone")
    assert_equal(load_file("alone/model.safetensors"), load_file("one/model.safetensors"))
    assert_equal(load_file("two/model.safetensors"), load_file("one/model.safetensors"))
    checkpoint = "two/checkpoint-4"  # in the middle: the schedule is the same, as the number of epochs is
    scripts.together(after("huggingface"), *two, "again", "--resume_from_checkpoint", checkpoint)
    assert_equal(load_file("again/model.safetensors"), load_file("one/model.safetensors"))


@needs("sklearn", "pytorch_lightning")
@pytest.mark.slow
@pytest.mark.usefixtures("order_of_the_job")
@pytest.mark.filterwarnings("ignore")
def test_lightning_equals_one_process(scripts: Scripts) -> None:
    quick = ("--max_epochs", "2", "--no_progress_bar", "--default_root_dir")
    scripts.alone(before("lightning"), "--batch_size", "128", *quick, "one")
    scripts.together(after("lightning"), "--batch_size", "64", *quick, "two")
    scripts.alone(after("lightning"), "--batch_size", "128", *quick, "alone")
    (one,), (two,), (alone,) = (list(Path(folder).rglob("*.ckpt")) for folder in ("one", "two", "alone"))
    for each in (two, alone):
        assert_equal(loaded(str(each))["state_dict"], loaded(str(one))["state_dict"])
