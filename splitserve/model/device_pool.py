"""KV blocks as a torch tensor in a model's own dtype, in the host's segment or on a device.

On the CPU the tensor is the segment, seen as that dtype. On a device the blocks exist twice, and
this is who may rely on which copy:

- what a step computes is on the device alone; the segment's bytes of that block are stale;
- before a lease's blocks are digested and offered, `to_host` makes the segment's bytes those of the
  device. Leased blocks are not written, so they stay equal for as long as a peer may read them;
- a fetch arrives in the segment, is proved there, and `to_device` copies it before its blocks may
  be used in a step.

Both copies run on the connector's threads and have happened when the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitserve.errors import ConfigError
from splitserve.kv.format import KVFormat


class DevicePool:
    """`tensor` is [blocks, layers, K|V, kv heads, block size, D] on the device.

    blocks: uint8 [num_blocks, block_bytes], the segment. is_staged: the tensor is apart from it; so
    it is on every device but `cpu`, also on `cpu:0`, which tests use.
    """

    def __init__(
        self,
        blocks: npt.NDArray[np.uint8],
        kv_format: KVFormat,
        device: str = "cpu",
    ) -> None:
        dtype: torch.dtype = getattr(torch, kv_format.dtype)
        shape = (len(blocks), *kv_format.block_shape)
        self._host = torch.from_numpy(blocks).view(dtype).view(shape)
        self.is_staged = device != "cpu"
        self.tensor = _allocated(shape, dtype, device) if self.is_staged else self._host

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Bring the segment's bytes of these blocks up to the device's."""
        if self.is_staged:
            for block in block_ids:
                self._host[block].copy_(self.tensor[block])

    def to_device(self, block_ids: Sequence[int]) -> None:
        """Bring the device's copy of these blocks up to the segment's bytes."""
        if self.is_staged:
            for block in block_ids:
                self.tensor[block].copy_(self._host[block])


def _allocated(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's out-of-memory errors are
        size = np.prod(shape) * dtype.itemsize / 2**20
        raise ConfigError(
            f"A KV pool of {size:.0f} MiB can't be allocated on {device}: {error}",
            advice="Lower --kv-memory.",
        ) from error
