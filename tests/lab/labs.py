"""Where there can be no lab, its tests are skipped, and that is said."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest

from paceline.lab.namespaces import Lab, LabError


def can_build() -> bool:
    if multiprocessing.parent_process():
        return True  # this is imported by what runs in a lab, which has no time for this
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    try:
        with Lab({"a": 1e6}):
            return True
    except LabError:
        return False


built = pytest.mark.skipif(not can_build(), reason="network namespaces need Linux and root")
