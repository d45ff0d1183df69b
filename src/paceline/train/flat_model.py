"""A model as one flat buffer, so that what is pulled lands in the model without another copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parameter import is_lazy

from paceline.model.half_precision import WIDTH
from paceline.model.layout import DTYPES, STATISTICS, WHOLE, Layout, Tensor

LARGEST_HALF = torch.finfo(torch.float16).max
SAMPLED = 1024  # elements of each tensor that does not travel that are looked at


class FlatModel:
    """The parameters that an optimizer trains, one after the other, and behind them the model's running statistics.

    `weights` is float32 on the host, where pulls land. Contiguous float32 parameters on the CPU become views of it, and
    others are copied from it (`scatter`). `gradient` is what is pushed, in the type that crosses the wire.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: str = "float32",
        buffers: bool = True,
        apart: bool = False,
    ) -> None:
        """apart: what is pulled does not touch the parameters before `scatter`."""
        if gradients not in WIDTH:
            raise ValueError(f"Gradients are sent as {', '.join(WIDTH)}, not as {gradients!r:.80}.")
        self.wire = gradients
        tensors = self._find_parameters(model, optimizer)
        self._statistics = list(_statistics(model)) if buffers else []
        tensors += [
            Tensor(name, tuple(owner[key].shape), _name(owner[key].dtype), STATISTICS)
            for name, owner, key in self._statistics
        ]
        self.layout = Layout(tuple(tensors))
        #: What does not travel but must be alike everywhere: frozen parameters, and tensors that no average is of.
        self.fixed = _digest(model, {tensor.name for tensor in tensors}, buffers)
        self._trained = self.layout.offsets[len(self.parameters)]  # where statistics begin
        devices = {parameter.device for parameter in self.parameters} | {
            owner[key].device for _, owner, key in self._statistics
        }
        self._cuda = [device for device in devices if device.type == "cuda"]
        #: Where several ranks add up their gradients: on the GPU if the model is on one, else on the host.
        self.device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self.weights = torch.empty(self.layout.size, pin_memory=bool(self._cuda))
        self.gradient = torch.zeros(self.layout.size, dtype=getattr(torch, gradients), pin_memory=bool(self._cuda))
        # A stream of its own for copies, so that they do not wait for what is computed next.
        self._copying = torch.cuda.Stream(self._cuda[0]) if len(self._cuda) == 1 else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._weight_views = self._views(self.weights)
        self._gradient_views = self._views(self.gradient)
        for parameter, view in zip(self.parameters, self._weight_views, strict=False):
            view.copy_(parameter.detach())
            if not apart and _can_be_a_view(parameter):
                parameter.data = view
        for (_, owner, key), view in zip(self._statistics, self._weight_views[len(self.parameters) :], strict=True):
            view.copy_(owner[key].detach())

    def _find_parameters(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        names = {parameter: name for name, parameter in model.named_parameters()}  # a tied one has its first name
        self.parameters: list[torch.nn.Parameter] = []
        tensors: list[Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                name = names.get(parameter, f"group {number}, parameter {len(tensors)}")
                if is_lazy(parameter):
                    raise ValueError(f"{name!r} has no shape yet; run one batch through the model before you join.")
                if _name(parameter.dtype) not in DTYPES:
                    raise ValueError(f"{name!r} is {parameter.dtype}; paceline trains {', '.join(DTYPES)}.")
                tensors.append(Tensor(name, tuple(parameter.shape), _name(parameter.dtype), number))
                self.parameters.append(parameter)
        if not any(parameter.numel() for parameter in self.parameters):
            raise ValueError(
                "The optimizer has no parameter to train; give it model.parameters() that require gradients."
            )
        if not any(parameter in names for parameter in self.parameters):
            raise ValueError("The optimizer trains none of this model's parameters; make it from model.parameters().")
        return tensors

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[offset : offset + tensor.size].view(tensor.shape)
            for offset, tensor in zip(self.layout.offsets[:-1], self.layout.tensors, strict=True)
        ]

    def weights_bytes(self) -> memoryview:
        return self.weights.numpy().data.cast("B")

    def gradient_bytes(self) -> memoryview:
        return self.gradient.view(torch.uint8).numpy().data

    def scatter(self) -> None:
        """Bring pulled weights into the parameters that are not views of them, and into the statistics."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._weight_views, strict=False):
                if parameter.data_ptr() != view.data_ptr():  # Looked at each time: the model may have been moved.
                    parameter.copy_(view, non_blocking=True)
            for (_, owner, key), view in zip(self._statistics, self._weight_views[len(self.parameters) :], strict=True):
                _bring(view, owner[key])

    def gather(self) -> None:
        """Bring gradients and statistics together, to be pushed. A parameter without a gradient counts as zero."""
        self._fill(self._gradient_views, self.gradient)

    def gather_weights(self) -> None:
        """Bring the model itself together, to be pushed."""
        for parameter, view in zip(self.parameters, self._gradient_views, strict=False):
            _copy(parameter.detach(), view)
        self._fill_statistics(self._gradient_views, self.gradient)

    def add_up(self, flat: torch.Tensor) -> None:
        """The same, but into a float32 tensor of this size on `device`, to be added up with other ranks'."""
        self._fill(self._views(flat), flat)

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a flat tensor, the parameters' part and the statistics'."""
        return flat[: self._trained], flat[self._trained :]

    def take_over(self, flat: torch.Tensor) -> None:
        """What was added up is to be pushed."""
        _copy(flat, self.gradient)
        self._wait()

    def gather_one(self, index: int) -> None:
        """Bring one parameter's gradient to where it is pushed from; see `wait_for_copies`."""
        stream = self._copying
        if stream is None:
            self._fill_one(index, self._gradient_views[index])
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # which computes it
        with torch.cuda.stream(stream):
            self._fill_one(index, self._gradient_views[index])
        gradient = self.parameters[index].grad
        if gradient is not None:
            gradient.record_stream(stream)
        self._copied = stream.record_event()

    def gather_statistics(self) -> None:
        """Bring statistics to where they are pushed from."""
        self._fill_statistics(self._gradient_views, self.gradient)

    def wait_for_copies(self) -> None:
        """Until what was brought one by one is there."""
        if self._copied:
            self._copied.synchronize()

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
                f"The gradient of {self.layout.tensors[index].name!r} is sparse, and only dense ones are sent; "
                "make its layer with sparse=False."
            )
        else:
            _copy(gradient.detach(), view)

    def _fill_statistics(self, views: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        for (name, owner, key), view in zip(self._statistics, views[len(self.parameters) :], strict=True):
            if owner[key].shape != view.shape:
                raise ValueError(f"The shape of {name!r} has changed since the session began; pass buffers=False.")
            _copy(owner[key].detach(), view)
        self._wait()
        # A batch that overflowed may have spoilt the statistics, and its gradient was skipped. What was pulled is good.
        _, statistics = self.split(flat)
        if not statistics.isfinite().all():
            pulled = self.split(self.weights)[1].to(statistics.device, statistics.dtype)
            torch.where(statistics.isfinite(), statistics, pulled, out=statistics)

    def _wait(self) -> None:
        """Copies from a GPU are under way until it says otherwise."""
        for device in self._cuda:
            torch.cuda.synchronize(device)


def _statistics(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """The buffers that are part of state_dict() and numbers: name, and where each is found (it may be replaced)."""
    seen = set[int]()
    for prefix, module in model.named_modules():
        owner: dict[str, torch.Tensor] = module._buffers
        for key, tensor in owner.items():
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if is_lazy(tensor):
                raise ValueError(f"{name!r} has no shape yet; run one batch through the model before you join.")
            if _name(tensor.dtype) in (*DTYPES, *WHOLE) and tensor.layout == torch.strided:
                seen.add(id(tensor))
                yield name, owner, key


def _digest(model: torch.nn.Module, travel: set[str], buffers: bool) -> str:
    """Of what is in state_dict() and does not travel: equal if workers have the same, as far as a sample can tell."""
    fixed: dict[str, torch.Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if name not in travel
    }
    if buffers:
        fixed |= {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and name not in travel
        }
    tied = {id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in travel}
    digest = hashlib.sha256()
    for name in sorted(fixed):
        tensor = fixed[name].detach()
        if id(fixed[name]) in tied or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        flat = tensor.reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _can_be_a_view(parameter: torch.nn.Parameter) -> bool:
    """Others keep their own memory: their format (channels last, say) may be what makes them quick."""
    plain = type(parameter.data) is torch.Tensor and parameter.is_contiguous()
    return plain and parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy and convert. What float16 cannot hold becomes its largest number; NaN and infinity stay what they are."""
    if into.dtype == torch.float16 and source.dtype != torch.float16:
        source = torch.where(source.isinf(), source, source.clamp(-LARGEST_HALF, LARGEST_HALF))
    if source.device != into.device:
        source = source.to(into.dtype)  # there, so that no more than is needed crosses the bus
    into.copy_(source, non_blocking=True)


def _bring(pulled: torch.Tensor, statistic: torch.Tensor) -> None:
    """Take over a statistic. Where float32 cannot tell it from what is there, what is there is more exact."""
    if statistic.dtype == torch.float32:
        statistic.copy_(pulled, non_blocking=True)
        return
    here = pulled.to(statistic.device)
    same = statistic.to(torch.float32) == here
    if not statistic.is_floating_point():
        here = here.round()
    statistic.copy_(torch.where(same, statistic, here.to(statistic.dtype)))
