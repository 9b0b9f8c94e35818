"""The packed product on several threads.

Import only after the fork: numba starts its threads when it loads this, and they do not survive it.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from splitserve.model.gemm import EDGE, Floats, multiply_panels
from splitserve.model.simd import parallel_kernel
from splitserve.model.tiles import PANEL


@parallel_kernel("void(float32[::1], float32[::1], float32[::1], int64, int64, int64, int64)")
def multiply_parallel(
    x: Floats,
    packed: Floats,
    out: Floats,
    num_rows: int,
    num_in: int,
    num_out: int,
    num_parts: int,
) -> None:
    """All of out [num_rows, num_out], its panels divided into `num_parts`: the same bits."""
    num_panels = (num_out + PANEL - 1) // PANEL
    for part in prange(num_parts):
        first = num_panels * part // num_parts
        last = num_panels * (part + 1) // num_parts
        edge = np.empty(EDGE, np.float32)
        multiply_panels(x, packed, out, edge, num_rows, num_in, num_out, first, last)
