"""One digest for a tensor, computed alike where it is sent and where it is received.

Covers dtype, shape and raw bytes. It finds transfers that went wrong, not forgeries: xxh3 (128 bits) runs at memory
speed, where a cryptographic hash would cost seconds per publication of a large model.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """Hex digest of dtype, shape and bytes, on any device, contiguous or not."""
    digest = xxhash.xxh3_128()
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    host = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(host.view(torch.uint8).numpy())  # numpy has no bfloat16: bytes are what counts
    return digest.hexdigest()
