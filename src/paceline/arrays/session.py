"""`paceline.arrays.join`: how a script with arrays takes part in a job, or trains alone."""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from paceline.arrays.batches import ArrayData, order_of
from paceline.arrays.flat_arrays import NOTHING_FIXED, FlatArrays
from paceline.arrays.local_step import LocalStep
from paceline.model.description import Description
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.optimizer_text import parse
from paceline.serve.environment import (
    CONNECT,
    GRADIENTS,
    PROBE,
    RANKS,
    address,
    check_token,
    is_launched,
    job_token,
    worker_number,
)
from paceline.serve.wire.tls import Tls
from paceline.serve.worker import uncaught
from paceline.serve.worker.client import Client
from paceline.serve.worker.departure import Departure
from paceline.serve.worker.metrics import checked
from paceline.serve.worker.notices import notice
from paceline.serve.worker.samples_alone import SamplesAlone

UNDIVIDED = (
    "The batches of this loop do not come from session.batches, so each worker trains on all the data that its script "
    "loads. Divide the data by session.rank and session.world_size, or use session.batches."
)


def join(
    params: Any,
    optimizer: str,
    *,
    statistics: Any = None,
    names: Mapping[str, str] | None = None,
    connect: str | None = None,
    token: str | None = None,
    gradients: str | None = None,
) -> ArraySession:
    """Join the job whose server is at `connect` ("host:port") or in PACELINE_CONNECT. Without either, train alone.

    params: the weights to train: arrays of float32 in dicts, lists and tuples. Leaves with a method `assign`, such as
        the variables of Keras and TensorFlow, get the pulled weights.
    optimizer: one of torch.optim with its settings, such as "sgd:lr=0.1,momentum=0.9".
    statistics: values that are not trained but averaged over the workers, such as those of batch norm.
    names: the names of the parameters on the server, by their paths in `params`, in the order of the model on the
        server. They let a worker train the model of another framework.
    gradients: the type in which gradients cross the network: float32, bfloat16 or float16. The default is
        PACELINE_GRADIENTS, or float32 if that is not set.
    """
    server = connect or os.environ.get(CONNECT)
    if server or is_launched():
        uncaught.shorten()
    if os.environ.get(PROBE):
        raise ValueError("paceline advise times only scripts that use paceline.join; describe the cluster in a file.")
    spec = parse(optimizer)
    flat = FlatArrays(params, statistics, names, gradients or os.environ.get(GRADIENTS) or "float32")
    client = _connect(flat, spec, server, token) if server else None
    try:
        return ArraySession(flat, spec, client)
    except ValueError:  # no step in numpy for this optimizer
        if client:
            client.close()
        raise


def _connect(flat: FlatArrays, spec: OptimizerSpec, server: str, token: str | None) -> Client:
    """Join the job at this address, and pull its weights."""
    if os.environ.get(RANKS, "1") != "1":
        raise ValueError("A worker of paceline.arrays is one process: run it without --ranks-per-worker.")
    where = address(server)
    secret = token.encode() if token is not None else job_token()
    if token:
        check_token(secret, "the argument token")
    description = Description(flat.layout, spec, NOTHING_FIXED).as_json()
    number, tls, departure = worker_number(), Tls.from_environment(), Departure.at_sigterm()
    client = Client(where, description, secret, number, tls=tls, tell=notice, departure=departure)
    client.begin(flat.weights_bytes())
    flat.use_pulled()
    return client


class ArraySession:
    """The part of one process in a job, or a training run of its own."""

    def __init__(self, flat: FlatArrays, spec: OptimizerSpec, client: Client | None) -> None:
        self._flat, self._client = flat, client
        #: The learning rate of the next step. A schedule sets it.
        self.learning_rate = float(spec.settings_of_groups[0]["lr"])  # type: ignore[arg-type]
        self._local = LocalStep(spec) if client is None or client.mixes else None
        self._joins = client.joins if client else 1
        self._source = client or SamplesAlone()
        self._size = self._begun = 0  # of the data: the number of its samples, and of its epochs that have begun
        self._samples: list[tuple[int, int]] = []  # numbers and sizes of the assignments since the last step
        self._last_batch_size = 1
        self._knows_its_part = self._finished = self._closed = False
        self._pulled_at = time.perf_counter()
        atexit.register(self.close)

    @property
    def params(self) -> Any:
        """The weights as they were last pulled, in a tree like that of `join`. The arrays cannot be changed."""
        return self._flat.params

    @property
    def statistics(self) -> Any:
        """The statistics as they were last pulled, in a tree like that of `join`."""
        return self._flat.statistics

    @property
    def worker(self) -> int:
        """The number of this worker; 0 when it trains alone."""
        return self._client.worker if self._client else 0

    @property
    def is_main(self) -> bool:
        """Whether this is the one process of the job that should print, evaluate and save: worker 0."""
        return self.worker == 0

    @property
    def rank(self) -> int:
        """The number of this process in the job; 0 when it trains alone."""
        self._knows_its_part = True
        return self.worker

    @property
    def world_size(self) -> int:
        """The number of processes that the job starts with; 1 when it trains alone."""
        self._knows_its_part = True
        return self._client.workers if self._client else 1

    @property
    def granted_batch(self) -> int | None:
        """The number of samples that the policy wants in the next gradient; None: as many as the script likes.

        Batches of the session follow it.
        """
        return self._client.granted.batch_size if self._client else None

    def batches(self, data: Any, batch_size: int, epochs: int | None = None, seed: int = 0) -> Iterator[Any]:
        """Yield this worker's batches of the data. All workers together see each sample once an epoch.

        Every epoch has another order. If the policy tunes batch sizes, the batches follow it. Another call continues
        with the next epochs, so a loop over epochs may call it in each of them, with the same data.

        data: an array, or arrays in tuples, lists and dicts, all with one row for each sample. A batch is alike.
        epochs: the number of epochs; None: one, and nobody knows whether more follow.
        """
        rows = ArrayData(data)
        if batch_size < 1 or rows.size < batch_size:
            raise ValueError(f"A batch has from 1 to {rows.size} samples, all that there are; got {batch_size}.")
        if rows.size != (self._size or rows.size):
            raise ValueError(f"All epochs have the same samples; there were {self._size}, and now {rows.size}.")
        self._knows_its_part, self._size = True, rows.size
        planned = None if self._begun else epochs  # the job shows its progress by the number of epochs
        self._begun += epochs or 1
        return self._batches(rows, batch_size, self._begun, planned, seed)

    def _batches(self, rows: ArrayData, batch_size: int, epochs: int, planned: int | None, seed: int) -> Iterator[Any]:
        order = order_of(rows.size, seed)
        while True:
            samples = self._source.take(self.granted_batch or batch_size, rows.size, epochs, planned)
            if self._client and self._joins != self._client.joins:
                self._samples = []  # given up meanwhile: other workers have the samples since the last step
                self._use_pulled()
            if samples.start == samples.stop:
                return
            self._samples.append((samples.number, samples.stop - samples.start))
            yield rows.some(order(samples.epoch)[samples.start : samples.stop])

    def step(self, gradients: Any, loss: Any = None, *, batch_size: int | None = None, statistics: Any = None) -> None:
        """Push the gradients, and pull the newest weights into `params`.

        gradients: a tree like that of `join`. None in place of an array counts as zero.
        loss: recorded, and sent to policies that use it.
        batch_size: the number of samples in the gradient. It is needed if the batches do not come from the session.
        statistics: the values of this step, in a tree like that of `join`; None: they have not changed, or are in the
            variables that `join` was given.
        """
        if self._closed or self._finished:
            raise ValueError("The session is over; call step() before session.finish() and session.close().")
        flat, client = self._flat, self._client
        gathered = flat.gather(gradients, statistics)
        size = batch_size or sum(size for _, size in self._samples) or self._last_batch_size
        self._warn_if_undivided(batch_size)
        if self._local:
            count = flat.parameter_elements
            self._local.apply(flat.weights[:count], gathered[:count], self.learning_rate)
            flat.gather_weights()
        if client is None:
            flat.weights[flat.parameter_elements :] = gathered[flat.parameter_elements :]
        else:
            flat.convert()
            client.exchange(
                flat.gradient_bytes(),
                flat.weights_bytes(),
                batch_size=size,
                compute_seconds=time.perf_counter() - self._pulled_at,
                rates=(float(self.learning_rate),),
                loss=None if loss is None else float(loss),
                taken=[number for number, _ in self._samples],
                dtype=flat.wire,
            )
        self._samples, self._last_batch_size = [], size
        self._use_pulled()

    def _use_pulled(self) -> None:
        self._flat.use_pulled()
        if self._client:
            self._joins = self._client.joins
        self._pulled_at = time.perf_counter()

    def _warn_if_undivided(self, batch_size: int | None) -> None:
        """Warn once of a likely mistake: data that nobody divides."""
        if self._client and self._client.workers > 1 and self.is_main and not (self._knows_its_part or batch_size):
            self._knows_its_part = True
            warnings.warn(UNDIVIDED, stacklevel=3)

    def log(self, **metrics: Any) -> None:
        """Report metrics: `session.log(accuracy=0.98)`. The policy, `paceline watch` and the trace receive them.

        A session that trains alone checks the values and drops them.
        """
        values = checked(metrics)
        if self._client is None:
            return
        if values and self._closed:
            warnings.warn(
                f"This worker has left the job, so {', '.join(values)} cannot be reported; call session.log() before "
                "session.close(), or inside the `with` block after session.finish().",
                stacklevel=2,
            )
            return
        for name, value in values.items():
            self._client.measured(name, value)

    def finish(self) -> None:
        """End training: wait until the other workers are done too, and pull the final weights.

        Leaving the `with` block calls it. Call it yourself to evaluate the final weights inside the block.
        """
        if self._finished or self._closed:
            return
        self._finished = True
        if self._client:
            while not self._client.finish(self._flat.weights_bytes()):
                pass  # the server restored a checkpoint; this loop is over, so other workers repeat the samples
            self._use_pulled()

    def close(self) -> None:
        """Leave the job."""
        atexit.unregister(self.close)
        if not self._closed:
            self._closed = True
            if self._client:
                self._client.close()

    def __enter__(self) -> ArraySession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()
