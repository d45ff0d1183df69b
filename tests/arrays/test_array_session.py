"""Training with arrays over a real server: the result of one process, jobs with torch workers, and faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
import paceline.arrays as arrays
from arrays.perceptron import alone, data, flat, params, student, value_and_grad
from paceline.observe.trace import Arrived
from paceline.serve.environment import CONNECT, PROBE, RANKS
from train.jobs import Job, job
from train.test_incarnations import give_up

ROOT = Path(__file__).parents[2]
OPTIMIZERS = ("sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9,weight_decay=0.001", "adam:lr=0.01")


def torch_model() -> Any:
    """Return torch's form of the network, with the same weights."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in params().items()})
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("streamed", [False, True])
def test_bsp_by_the_mean_equals_one_process_on_the_joint_batch(optimizer: str, streamed: bool) -> None:
    x, y = data(24)
    with job("bsp:weights=mean", shards=2, workers=2, streamed=streamed) as running:
        results = running.work(student(optimizer, x[:16], y[:16], 10), student(optimizer, x[16:], y[16:], 10))
    for result in results:
        np.testing.assert_allclose(result, alone(optimizer, x, y, 10), rtol=1e-5, atol=1e-6)


def epochs_of(optimizer: str, x: Any, y: Any, count: int = 4, **options: Any) -> Any:
    """Return a worker that trains on the batches of the session, and returns its weights."""

    def run(address: str) -> Any:
        with arrays.join(params(), optimizer, connect=address, **options) as session:
            for inputs, labels in session.batches((x, y), batch_size=8, epochs=count):
                loss, gradients = value_and_grad(session.params, inputs, labels)
                session.step(gradients, loss)
        return flat(session.params)

    return run


@pytest.mark.parametrize(
    "policy", ["bsp", "asp", "ssp", "r2sp", "ksync:k=2", "fl-r2sp:groups=2,moves=model", "r2sp:tune_batches=true"]
)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_every_policy_trains_and_counts_each_sample_once_an_epoch(policy: str, wire: str) -> None:
    x, y = data(96)
    with job(policy, shards=2, workers=4) as running:
        results = running.work(*[epochs_of("sgd:lr=0.05", x, y, gradients=wire)] * 4)
        running.finish()
        samples: Any = running.coordinator.samples
        assert samples.all_done and samples.trained == 96 * 4
    before = value_and_grad(params(), x, y)[0]
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert loss_of(results[0], x, y) < before


@pytest.mark.parametrize("in_job", [True, False])
def test_a_loop_over_epochs_may_ask_for_batches_in_each(in_job: bool) -> None:
    x, y = data(24)
    counts = []
    with (
        job("asp") as running,
        arrays.join(params(), "sgd:lr=0.01", connect=running.address if in_job else None) as session,
    ):
        for _ in range(3):
            counts.append(0)
            for inputs, labels in session.batches((x[:], y), batch_size=10):
                counts[-1] += len(labels)
                session.step(value_and_grad(session.params, inputs, labels)[1])
        with pytest.raises(ValueError, match="All epochs have the same samples; there were 24, and now 4"):
            session.batches(x[:4], batch_size=2)
    assert counts == [24, 24, 24]


def loss_of(weights: Any, x: Any, y: Any) -> float:
    ends = np.cumsum([value.size for value in params().values()])[:-1]
    parts = zip(params().items(), np.split(weights, ends), strict=True)
    return value_and_grad({name: part.reshape(value.shape) for (name, value), part in parts}, x, y)[0]


# A step takes about a millisecond here. With its default patience, R²SP would cancel late workers on a busy machine,
# and their samples would be trained on again.


@pytest.mark.parametrize("policy", ["bsp:weights=mean", "r2sp:patience=10000"])
def test_a_torch_worker_trains_the_same_model_in_the_same_job(policy: str) -> None:
    """A whole round of both equals one process, and all samples count once: both shuffle alike."""
    x, y = data(64)
    seen: list[Any] = []

    def with_torch(address: str) -> Any:
        model = torch_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dataset = torch.utils.data.TensorDataset(torch.arange(64), torch.from_numpy(x), torch.from_numpy(y))
        with paceline.join(model, optimizer, connect=address) as session:
            for numbers, inputs, labels in session.batches(dataset, batch_size=8, epochs=2):
                seen.extend(numbers.tolist())
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                session.step(loss)
        return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy()

    def with_arrays(address: str) -> Any:
        tree = {
            "second": (params()["2.weight"], params()["2.bias"]),
            "first": (params()["0.weight"], params()["0.bias"]),
        }
        names = {"first.0": "0.weight", "first.1": "0.bias", "second.0": "2.weight", "second.1": "2.bias"}
        with arrays.join(tree, "sgd:lr=0.1,momentum=0.9", names=names, connect=address) as session:

            def weights() -> dict[str, Any]:
                (w, b), (w0, b0) = session.params["second"], session.params["first"]
                return {"0.weight": w0, "0.bias": b0, "2.weight": w, "2.bias": b}

            for numbers, inputs, labels in session.batches((np.arange(64), x, y), batch_size=8, epochs=2):
                seen.extend(numbers.tolist())
                loss, by_name = value_and_grad(weights(), inputs, labels)
                first, second = (by_name["0.weight"], by_name["0.bias"]), (by_name["2.weight"], by_name["2.bias"])
                session.step({"first": first, "second": second}, loss)
            session.finish()
            return flat(weights())

    with job(policy, shards=2, workers=2) as running:
        results = running.work(with_torch, with_arrays)
    np.testing.assert_array_equal(results[0], results[1])
    assert sorted(seen) == sorted([*range(64)] * 2)
    if policy.startswith("bsp"):
        expected = one_process(x, y)
        np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-6)


def one_process(x: Any, y: Any) -> Any:
    """Return the weights of one process that takes two batches of 8 at once, in the order of the job."""
    from paceline.arrays.batches import order_of

    with arrays.join(params(), "sgd:lr=0.1,momentum=0.9") as session:
        for epoch in range(2):
            for rows in np.split(order_of(64, 0)(epoch), 4):
                session.step(value_and_grad(session.params, x[rows], y[rows])[1])
        return flat(session.params)


def test_another_tree_is_refused_like_another_torch_model() -> None:
    with job("asp") as running, arrays.join(params(), "sgd:lr=0.1", connect=running.address):
        with pytest.raises(ConnectionError) as by_arrays:
            arrays.join({**params(), "0.bias": np.zeros(9, np.float32)}, "sgd:lr=0.1", connect=running.address)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        model[0].bias = torch.nn.Parameter(torch.zeros(9))
        with pytest.raises(ConnectionError) as by_torch:
            paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), connect=running.address)
        with pytest.raises(ConnectionError, match=r"momentum is 0 here and 0\.9 there"):
            arrays.join(params(), "sgd:lr=0.1,momentum=0.9", connect=running.address)
    sentences = [str(by_arrays.value), str(by_torch.value)]
    assert sentences[0] == sentences[1]
    assert "the shape of '0.bias' is (8,) here and (9,) there" in sentences[0]


def test_a_gradient_that_is_not_finite_is_refused_as_that_of_torch() -> None:
    def with_arrays(running: Job) -> None:
        with arrays.join(params(), "sgd:lr=0.1", connect=running.address) as session:
            spoiled = {**params(), "0.bias": np.full(8, np.nan, np.float32)}
            session.step(spoiled, batch_size=8)

    def with_torch(running: Job) -> None:
        model = torch_model()
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), connect=running.address) as session:
            for name, parameter in model.named_parameters():
                parameter.grad = torch.full_like(parameter, torch.nan if name == "0.bias" else 0.0)
            session.step(batch_size=8)

    sentences = []
    for work in (with_arrays, with_torch):
        with job("asp") as running, pytest.raises(ConnectionError) as refused:
            work(running)
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1]
    assert "NaN or infinity" in sentences[0]


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_worker_that_is_given_up_comes_back_and_every_sample_counts_once(when: str) -> None:
    x, y = data(24)
    batches = 0
    with job("asp") as running:
        with arrays.join(params(), "sgd:lr=0.01", connect=running.address) as session:
            for inputs, labels in session.batches((x, y), batch_size=4, epochs=2):
                batches += 1
                if when == "before the step" and batches in (2, 7):
                    give_up(running)
                session.step(value_and_grad(session.params, inputs, labels)[1])
                if when == "after the step" and batches in (2, 7):
                    give_up(running)
        running.finish()
        samples: Any = running.coordinator.samples
        assert samples.all_done and samples.trained == 48
        counted = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert sum(counted) == 48


def test_statistics_become_the_mean_over_the_workers() -> None:
    def worker(value: float) -> Any:
        def run(address: str) -> Any:
            statistics = {"mean": np.zeros(2, np.float32), "count": np.array(0, np.int32)}
            with arrays.join(params(), "sgd:lr=0.1", statistics=statistics, connect=address) as session:
                mine = {"mean": np.full(2, value, np.float32), "count": np.array(4, np.int32)}
                session.step(params(), batch_size=8, statistics=mine)
                return session.statistics

        return run

    with job("bsp:weights=mean", workers=2) as running:
        for result in running.work(worker(1.0), worker(3.0)):
            assert result["mean"].tolist() == [2.0, 2.0]
            assert result["count"] == 4 and result["count"].dtype == np.int32


def test_the_session_knows_its_place_and_reports_metrics() -> None:
    with arrays.join(params(), "sgd:lr=0.1") as session:
        assert (session.worker, session.rank, session.world_size, session.is_main) == (0, 0, 1, True)
        assert session.granted_batch is None
        with pytest.raises(ValueError, match="The metric accuracy must be a finite number"):
            session.log(accuracy=float("nan"))
        with pytest.raises(ValueError, match="A batch has from 1 to 4 samples, all that there are; got 5"):
            session.batches(np.zeros(4), batch_size=5)
    with pytest.raises(ValueError, match="The session is over"):
        session.step(params())
    with job("asp", workers=2) as running:

        def run(address: str) -> Any:
            with arrays.join(params(), "sgd:lr=0.1", connect=address) as session:
                session.log(accuracy=0.5)
                return session.rank, session.world_size, session.is_main

        assert sorted(running.work(run, run)) == [(0, 2, True), (1, 2, False)]
    with pytest.warns(UserWarning, match="has left the job, so accuracy cannot be reported"):
        job_session = _left()
        job_session.log(accuracy=0.5)


def _left() -> arrays.ArraySession:
    with job("asp") as running, arrays.join(params(), "sgd:lr=0.1", connect=running.address) as session:
        return session


def test_a_learning_rate_is_sent_with_each_step() -> None:
    with job("asp") as running, arrays.join(params(), "sgd:lr=0.1", connect=running.address) as session:
        before = flat(session.params)
        session.learning_rate = 0.5
        ones = {name: np.ones_like(value) for name, value in params().items()}
        session.step(ones, batch_size=1)
        np.testing.assert_allclose(flat(session.params), before - 0.5, rtol=1e-6)


def test_undivided_data_is_warned_of() -> None:
    def run(address: str) -> None:
        with arrays.join(params(), "sgd:lr=0.1", connect=address) as session:
            session.step(params())

    with job("asp", workers=2) as running, pytest.warns(UserWarning, match="Divide the data by session.rank"):
        running.work(run, run)


@pytest.mark.parametrize(("variable", "sentence"), [(RANKS, "without --ranks-per-worker"), (PROBE, "paceline advise")])
def test_what_a_worker_of_arrays_cannot_do(variable: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=sentence):
        arrays.join(params(), "sgd:lr=0.1", connect="127.0.0.1:1")


def test_an_optimizer_without_a_step_in_numpy_leaves_a_job_that_mixes_models() -> None:
    with job("fl-r2sp:groups=1,moves=model") as running:
        with pytest.raises(ValueError, match="has SGD, Adam, AdamW: use one of them, or RMSprop in a job"):
            arrays.join(params(), "rmsprop:lr=0.1", connect=running.address)
        running.finish()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # `import torch` raises ImportError from now on
import paceline.arrays as arrays
from arrays.perceptron import data, flat, params, value_and_grad

x, y = data(64)
with arrays.join(params(), "sgd:lr=0.1,momentum=0.9") as session:
    for inputs, labels in session.batches((x, y), batch_size=8, epochs=2):
        loss, gradients = value_and_grad(session.params, inputs, labels)
        session.step(gradients, loss)
print(*flat(session.params).tolist())
assert sys.modules["torch"] is None and not [name for name in sys.modules if name.startswith("torch.")]
"""


@pytest.mark.core
@pytest.mark.parametrize("streamed", [False, True])
def test_a_worker_needs_no_torch(streamed: bool, tmp_path: Path) -> None:
    """A process in which torch cannot be imported trains with another one; both end with the same weights."""
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_TORCH)
    with job("r2sp", shards=2, workers=2, streamed=streamed) as running:
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
        environment = {**os.environ, CONNECT: running.address, "PYTHONPATH": path}
        processes = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        outputs = [process.communicate(timeout=120) for process in processes]
        running.finish()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""


def test_joining_with_torch_where_it_is_missing_names_the_way_without_it() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport paceline\npaceline.join"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (
        "paceline.join needs torch: pip install 'paceline[torch]'. For JAX or Keras, call paceline.arrays.join."
        in ran.stderr
    )
