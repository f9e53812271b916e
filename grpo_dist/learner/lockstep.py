"""Failures of one rank that all ranks must hear of, so that nobody waits alone in the next collective."""

from __future__ import annotations

import torch

from grpo_dist.errors import CheckpointError


def raise_together(failure: str | None) -> None:
    """Collective: exchange what went wrong (None: nothing). Every rank raises the first failure as CheckpointError."""
    every: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, failure)
    for rank, found in enumerate(every):
        if found is not None:
            raise CheckpointError(f"learner rank {rank}: {found}")
