"""One digest for a tensor, computed alike where it is sent and where it is received.

Covers dtype, shape and raw bytes. It finds transfers that went wrong, not forgeries: xxh3 (128 bits) runs at memory
speed, where a cryptographic hash would cost seconds per publication of a large model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """Hex digest of dtype, shape and bytes, on any device, contiguous or not."""
    digest = xxhash.xxh3_128()
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    host = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(host.view(torch.uint8).numpy().data)  # numpy has no bfloat16: bytes are what counts
    return digest.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest for a whole model, from those of its tensors by name."""
    return xxhash.xxh3_128("".join(f"{name}={digests[name]};" for name in sorted(digests)).encode()).hexdigest()
