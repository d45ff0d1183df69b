"""Distributed training that stays fast when the network, or a mix of unequal machines, is the bottleneck."""

__version__ = "0.1.0"
