"""A model as one flat buffer, so that pulled weights arrive in the model without another copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parameter import is_lazy

from paceline.model.half_precision import WIDTH
from paceline.model.layout import DTYPES, STATISTICS, WHOLE, Layout, Tensor

LARGEST_HALF = torch.finfo(torch.float16).max
DIGEST_ELEMENTS = 1024  # elements of each tensor that enter the digest of what is not sent


class FlatModel:
    """The parameters that an optimizer trains, one after another, followed by the model's running statistics.

    `weights` is a float32 buffer on the host that receives pulls. Contiguous float32 parameters on the CPU become views
    of it; `scatter` copies it to all others. `gradient` is the buffer that is pushed, in the type that is sent.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: str = "float32",
        buffers: bool = True,
        apart: bool = False,
    ) -> None:
        """apart: no parameter is a view of `weights`, so that a pull changes the model only in `scatter`."""
        if gradients not in WIDTH:
            raise ValueError(f"Gradients can be sent as {', '.join(WIDTH)}; got {gradients!r:.80}.")
        self.wire = gradients
        tensors = self._find_parameters(model, optimizer)
        self._statistics = list(_statistics(model)) if buffers else []
        tensors += [
            Tensor(name, tuple(owner[key].shape), _name(owner[key].dtype), STATISTICS)
            for name, owner, key in self._statistics
        ]
        self.layout = Layout(tuple(tensors))
        #: A digest of the tensors that are not sent but must be equal in all workers: frozen parameters, and buffers
        #: that cannot be averaged.
        self.fixed = _digest(model, {tensor.name for tensor in tensors}, buffers)
        self._statistics_start = self.layout.offsets[len(self.parameters)]
        devices = {parameter.device for parameter in self.parameters} | {
            owner[key].device for _, owner, key in self._statistics
        }
        self._cuda = [device for device in devices if device.type == "cuda"]
        #: The device on which several ranks add their gradients: the model's GPU if it is on one, else the CPU.
        self.device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self.weights = torch.empty(self.layout.size, pin_memory=bool(self._cuda))
        self.gradient = torch.zeros(self.layout.size, dtype=getattr(torch, gradients), pin_memory=bool(self._cuda))
        # Copies have their own stream, so that they do not wait for the computation that follows.
        self._copy_stream = torch.cuda.Stream(self._cuda[0]) if len(self._cuda) == 1 else None  # type: ignore[no-untyped-call]
        self._last_copy: torch.cuda.Event | None = None
        self._kept: torch.Tensor | None = None  # parameters that `keep_parameters` has noted
        self._weight_views = self._views(self.weights)
        self._gradient_views = self._views(self.gradient)
        for parameter, view in zip(self.parameters, self._weight_views, strict=False):
            view.copy_(parameter.detach())
            if not apart and _can_be_a_view(parameter):
                parameter.data = _own_storage(view)
        for (_, owner, key), view in zip(self._statistics, self._weight_views[len(self.parameters) :], strict=True):
            view.copy_(owner[key].detach())

    def _find_parameters(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        names = {parameter: name for name, parameter in model.named_parameters()}  # a tied parameter has its first name
        self.parameters: list[torch.nn.Parameter] = []
        tensors: list[Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                name = names.get(parameter, f"group {number}, parameter {len(tensors)}")
                if is_lazy(parameter):
                    raise ValueError(f"{name!r} has no shape yet; run one batch through the model before joining.")
                if _name(parameter.dtype) not in DTYPES:
                    raise ValueError(f"{name!r} is {parameter.dtype}; paceline can train {', '.join(DTYPES)}.")
                tensors.append(Tensor(name, tuple(parameter.shape), _name(parameter.dtype), number))
                self.parameters.append(parameter)
        if not any(parameter.numel() for parameter in self.parameters):
            raise ValueError(
                "The optimizer has no parameter to train; create it with model.parameters() that require gradients."
            )
        if not any(parameter in names for parameter in self.parameters):
            raise ValueError("The optimizer trains none of this model's parameters; create it with model.parameters().")
        return tensors

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[offset : offset + tensor.size].view(tensor.shape)
            for offset, tensor in zip(self.layout.offsets[:-1], self.layout.tensors, strict=True)
        ]

    def weights_bytes(self) -> memoryview:
        """Return the buffer that receives pulls."""
        return self.weights.numpy().data.cast("B")

    def gradient_bytes(self) -> memoryview:
        """Return the buffer that is pushed."""
        return self.gradient.view(torch.uint8).numpy().data

    def scatter(self) -> None:
        """Copy pulled weights to the parameters that are not views of them, and to the statistics."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._weight_views, strict=False):
                if parameter.data_ptr() != view.data_ptr():  # checked each time: the model may have been moved
                    parameter.copy_(view, non_blocking=True)
        self._scatter_statistics()

    @torch.no_grad()
    def _scatter_statistics(self) -> None:
        for (_, owner, key), view in zip(self._statistics, self._weight_views[len(self.parameters) :], strict=True):
            _update_statistic(view, owner[key])

    @property
    def parameter_elements(self) -> int:
        """The number of elements of all parameters, without the statistics."""
        return self._statistics_start

    def store(self) -> None:
        """Copy the parameters and the statistics of the model to `weights`, as if they had been pulled."""
        for parameter, view in zip(self.parameters, self._weight_views, strict=False):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
        for (_, owner, key), view in zip(self._statistics, self._weight_views[len(self.parameters) :], strict=True):
            view.copy_(owner[key].detach())

    def change_counts(self) -> list[int]:
        """Return torch's count of the changes of each parameter."""
        return [parameter._version for parameter in self.parameters]

    def differs_from_weights(self, index: int) -> bool:
        """Return whether a parameter differs from `weights`. A view of them does not."""
        parameter, view = self.parameters[index], self._weight_views[index]
        if parameter.data_ptr() == view.data_ptr():
            return False
        return not torch.equal(parameter.detach().cpu(), view.to(parameter.dtype))

    def gather(self) -> None:
        """Copy gradients and statistics to the buffer that is pushed. A parameter without a gradient counts as zero."""
        self._fill(self._gradient_views, self.gradient)

    def gather_weights(self) -> None:
        """Copy the weights and statistics themselves to the buffer that is pushed."""
        for parameter, view in zip(self.parameters, self._gradient_views, strict=False):
            _copy(parameter.detach(), view)
        self._fill_statistics(self._gradient_views, self.gradient)

    def gather_difference(self) -> None:
        """Copy the pulled weights less the present ones to the buffer that is pushed: the server subtracts them.

        Statistics are copied as values, because the server averages them.
        """
        self.gather_weights()
        pulled, _ = self.split(self.weights)
        pushed, _ = self.split(self.gradient)
        torch.sub(pulled, pushed, out=pushed)

    def keep_parameters(self) -> None:
        """Take note of the parameters as they are now, for `add_received`."""
        if self._kept is None:
            self._kept = torch.empty(self.layout.size, pin_memory=bool(self._cuda))
        for parameter, view in zip(self.parameters, self._views(self._kept), strict=False):
            view.copy_(parameter.detach())

    def approach_parameters(self, share: float, kept: bool) -> None:
        """Move `weights` by this share of the way to the parameters, or to those that `keep_parameters` noted."""
        ends = self._views(self._kept) if kept and self._kept is not None else self.parameters
        for view, end in zip(self._weight_views, ends, strict=False):
            view.lerp_(end.detach().to(view.device, view.dtype), share)

    def add_received(self) -> None:
        """Add to the parameters by how much the pulled weights differ from those that `keep_parameters` noted.

        So steps that were made meanwhile go on from the pulled weights. Pulled statistics replace those of the model.
        """
        assert self._kept is not None
        torch.sub(self.weights, self._kept, out=self._kept)
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._views(self._kept), strict=False):
                parameter.add_(view.to(parameter.device, parameter.dtype))
        self._scatter_statistics()

    def gather_into(self, flat: torch.Tensor) -> None:
        """Copy gradients and statistics to a float32 tensor of this size on `device`, to be summed over the ranks."""
        self._fill(self._views(flat), flat)

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part of a flat tensor that holds the parameters, and the part that holds the statistics."""
        return flat[: self._statistics_start], flat[self._statistics_start :]

    def set_gradient(self, flat: torch.Tensor) -> None:
        """Copy this tensor, the sum over the ranks, to the buffer that is pushed."""
        _copy(flat, self.gradient)
        self._wait_for_gpus()

    def gather_one(self, index: int) -> None:
        """Start to copy one parameter's gradient to the buffer that is pushed. `wait_for_copies` waits for the end."""
        stream = self._copy_stream
        if stream is None:
            self._fill_one(index, self._gradient_views[index])
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # the stream that computes the gradient
        with torch.cuda.stream(stream):
            self._fill_one(index, self._gradient_views[index])
        gradient = self.parameters[index].grad
        if gradient is not None:
            gradient.record_stream(stream)
        self._last_copy = stream.record_event()

    def gather_statistics(self) -> None:
        """Copy the statistics to the buffer that is pushed."""
        self._fill_statistics(self._gradient_views, self.gradient)

    def wait_for_copies(self) -> None:
        """Wait until the copies that `gather_one` started have ended."""
        if self._last_copy:
            self._last_copy.synchronize()

    def _fill(self, views: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        for index, view in enumerate(views[: len(self.parameters)]):
            self._fill_one(index, view)
        self._fill_statistics(views, flat)

    def _fill_one(self, index: int, view: torch.Tensor) -> None:
        gradient = self.parameters[index].grad
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:
            raise ValueError(
                f"The gradient of {self.layout.tensors[index].name!r} is sparse, but only dense gradients can be sent; "
                "create its layer with sparse=False."
            )
        else:
            _copy(gradient.detach(), view)

    def _fill_statistics(self, views: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        for (name, owner, key), view in zip(self._statistics, views[len(self.parameters) :], strict=True):
            if owner[key].shape != view.shape:
                raise ValueError(f"The shape of {name!r} has changed since the session began; pass buffers=False.")
            _copy(owner[key].detach(), view)
        self._wait_for_gpus()
        # An overflow may have spoiled the statistics, although its gradient was skipped. The pulled ones are finite.
        _, statistics = self.split(flat)
        if statistics.numel() and not statistics.isfinite().all():
            pulled = self.split(self.weights)[1].to(statistics.device, statistics.dtype)
            torch.where(statistics.isfinite(), statistics, pulled, out=statistics)

    def _wait_for_gpus(self) -> None:
        """Wait until the copies from the GPUs have ended."""
        for device in self._cuda:
            torch.cuda.synchronize(device)


def _statistics(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """Yield the name, the owner and the key of every numeric buffer in state_dict().

    The owner and key are needed because a module may replace its buffer with another tensor.
    """
    seen = set[int]()
    for prefix, module in model.named_modules():
        owner: dict[str, torch.Tensor] = module._buffers
        for key, tensor in owner.items():
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if is_lazy(tensor):
                raise ValueError(f"{name!r} has no shape yet; run one batch through the model before joining.")
            if _name(tensor.dtype) in (*DTYPES, *WHOLE) and tensor.layout == torch.strided:
                seen.add(id(tensor))
                yield name, owner, key


def _digest(model: torch.nn.Module, sent: set[str], buffers: bool) -> str:
    """Return a digest of the tensors in state_dict() that are not sent.

    It is equal in two workers if the tensors are equal, as far as a sample of their elements shows.
    """
    fixed: dict[str, torch.Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if name not in sent
    }
    if buffers:
        fixed |= {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and name not in sent
        }
    tied = {id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in sent}
    digest = hashlib.sha256()
    for name in sorted(fixed):
        tensor = fixed[name].detach()
        if id(fixed[name]) in tied or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        flat = tensor.reshape(-1)
        some = flat[:: max(1, flat.numel() // DIGEST_ELEMENTS)].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _can_be_a_view(parameter: torch.nn.Parameter) -> bool:
    """Return whether the parameter can be a view of the flat buffer without losing its memory format.

    Other parameters keep their own memory, because their format (channels last, for example) may make them fast.
    """
    plain = type(parameter.data) is torch.Tensor and parameter.is_contiguous()
    return plain and parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory with a storage of its own.

    Libraries that save models take tensors of one storage for tied ones, and would leave out all but the first.
    """
    return torch.from_numpy(view.numpy())


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy and convert. A value too large for float16 becomes its largest number; NaN and infinity stay."""
    if into.dtype == torch.float16 and source.dtype != torch.float16:
        source = torch.where(source.isinf(), source, source.clamp(-LARGEST_HALF, LARGEST_HALF))
    if source.device != into.device:
        source = source.to(into.dtype)  # converted before the copy, so that fewer bytes cross the bus
    into.copy_(source, non_blocking=True)


def _update_statistic(pulled: torch.Tensor, statistic: torch.Tensor) -> None:
    """Copy a pulled statistic to the model. An element that is equal in float32 keeps its more exact value."""
    if statistic.dtype == torch.float32:
        statistic.copy_(pulled, non_blocking=True)
        return
    pulled = pulled.to(statistic.device)
    same = statistic.to(torch.float32) == pulled
    if not statistic.is_floating_point():
        pulled = pulled.round()
    statistic.copy_(torch.where(same, statistic, pulled.to(statistic.dtype)))
