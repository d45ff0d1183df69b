"""Convert gradients between float32 and the types with two bytes per element. Needs no torch."""

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


def narrow(source: npt.NDArray[np.float32], dtype: str, into: npt.NDArray[Any]) -> None:
    """Convert float32 to elements of type `dtype`, into an existing array of elements of that size.

    A value too large for float16 becomes its largest number; NaN and infinity stay.
    """
    if dtype == "bfloat16":  # the upper half of a float32, rounded to the nearest, and to even in the middle
        bits = source.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        np.copyto(into.view(np.uint16), np.where(np.isnan(source), np.uint32(0x7FC0), rounded), casting="unsafe")
    elif dtype == "float16":
        largest = np.finfo(np.float16).max
        np.copyto(
            into.view(np.float16), np.where(np.isinf(source), source, np.clip(source, -largest, largest)), "unsafe"
        )
    else:
        np.copyto(into.view(np.float32), source)
