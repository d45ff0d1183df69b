"""Synchronization policies: pure state machines that decide which workers may proceed, when, and with what batch."""

from paceline.policies.contract import (
    Add,
    Apply,
    Cancel,
    Decision,
    Discard,
    Grant,
    Keep,
    Policy,
    Stream,
    Turn,
    Update,
    WakeAt,
    WorkerId,
)
from paceline.policies.options import PolicyError, Range
from paceline.policies.registry import (
    is_same_policy,
    make,
    names,
    policy_class,
    policy_options,
    register,
    split_list,
    with_mean_weights,
    without_mean_weights,
)
from paceline.policies.snapshot import load, save

__all__ = [
    "Add",
    "Apply",
    "Cancel",
    "Decision",
    "Discard",
    "Grant",
    "Keep",
    "Policy",
    "PolicyError",
    "Range",
    "Stream",
    "Turn",
    "Update",
    "WakeAt",
    "WorkerId",
    "is_same_policy",
    "load",
    "make",
    "names",
    "policy_class",
    "policy_options",
    "register",
    "save",
    "split_list",
    "with_mean_weights",
    "without_mean_weights",
]
