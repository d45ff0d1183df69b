"""Initial weights of networks with rectified layers."""

from __future__ import annotations

from torch import nn

LAST_STD = 0.01  # standard deviation of the last layer's weights


def he_initialized(model: nn.Module, last: nn.Linear) -> nn.Module:
    """Draw the weights of all layers as He et al. (2015) do, from torch's global generator, and set biases to 0.

    Signals then keep their size from layer to layer, so that a deep network without normalization learns under plain
    SGD from the first step. Torch's default weights shrink signals by a factor of about 2 in each layer.

    The weights of the `last` layer are small, so that the first predictions are nearly uniform. Confident predictions
    would cause large first gradients, for which many learning rates are too high.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module is last:
                nn.init.normal_(module.weight, std=LAST_STD)
            else:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
