"""The weights that networks of rectified layers begin with."""

from __future__ import annotations

from torch import nn

LAST = 0.01  # deviation of the last layer's weights


def rectified(model: nn.Module, last: nn.Linear) -> nn.Module:
    """Draw the weights of all layers as He et al. (2015) do, from torch's global generator; biases are 0.

    Signals keep their size from layer to layer then, so that a deep network without normalization learns under plain
    SGD from the first step. Torch's own weights shrink them, by a factor of about 2 in each layer. The `last` layer's
    are small, so that the first guess is that all classes are alike: a network that begins with strong opinions takes
    its first steps in all directions at once, and many a learning rate is too high for that.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module is last:
                nn.init.normal_(module.weight, std=LAST)
            else:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
