"""A model's parameters as one flat buffer, so that what is pulled lands in the model without another copy."""

from __future__ import annotations

import torch

from paceline.model.layout import Layout, Tensor


class Flat:
    """The parameters that an optimizer trains, one after the other in `weights`, and their gradients in `gradient`.

    On the CPU in float32 the parameters become views of `weights`, and gradients are gathered into views of `gradient`.
    Elsewhere the two are staging buffers on the host, and parameters are copied from them and gradients into them.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}  # a tied one has its first name
        self.parameters: list[torch.nn.Parameter] = []
        tensors: list[Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                name = names.get(parameter, f"group {number}, parameter {len(tensors)}")
                tensors.append(
                    Tensor(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), number)
                )
                self.parameters.append(parameter)
        if not tensors:
            raise ValueError("The optimizer has no parameter to train; give it model.parameters().")
        self.layout = Layout(tuple(tensors))
        self.weights = torch.empty(self.layout.size)
        self.gradient = torch.zeros(self.layout.size)
        self._weight_views = self._views(self.weights)
        self._gradient_views = self._views(self.gradient)
        self._in_place = [
            parameter.device.type == "cpu" and parameter.dtype == torch.float32 for parameter in self.parameters
        ]
        for parameter, view, in_place in zip(self.parameters, self._weight_views, self._in_place, strict=True):
            view.copy_(parameter.detach())
            if in_place:
                parameter.data = view

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.layout.offsets[:-1], self.parameters, strict=True)
        ]

    def weights_bytes(self) -> memoryview:
        return self.weights.numpy().data.cast("B")

    def gradient_bytes(self) -> memoryview:
        return self.gradient.numpy().data.cast("B")

    def scatter(self) -> None:
        """Bring pulled weights into the parameters that are not views of them."""
        with torch.no_grad():
            for parameter, view, in_place in zip(self.parameters, self._weight_views, self._in_place, strict=True):
                if not in_place:
                    parameter.copy_(view)

    def gather(self) -> None:
        """Bring the gradients together, and clear the parameters' own. A parameter without one counts as zero."""
        for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
