"""A mark that skips a test where a lab cannot be built."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest

from paceline.lab.namespaces import Lab, LabError


def can_build() -> bool:
    """Return whether a lab can be built on this machine."""
    if multiprocessing.parent_process():
        return True  # a process on a host of a lab imports this module too, and need not check again
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    try:
        with Lab({"a": 1e6}):
            return True
    except LabError:
        return False


built = pytest.mark.skipif(not can_build(), reason="network namespaces need Linux and root")
