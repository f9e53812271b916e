"""A reward model as a Ray actor: one copy of the model, on a GPU when it was given one.

score(texts) of many groups ─► RewardBatcher ─► forward passes of `batch` texts ─► one number or reason per text
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from grpo_dist.verifiers.reward_model import RewardModelOptions
from grpo_dist.verifiers.reward_scorer import RewardBatcher, Said


class RewardWorker:
    """Created with its options; ``ready`` loads the model."""

    def __init__(self, options: RewardModelOptions, device: str) -> None:
        self.batcher = RewardBatcher(options, device)

    async def ready(self) -> dict[str, Any]:
        """Load the model. Raises RecipeError when it cannot be, or is no reward model."""
        import ray

        await self.batcher.load()
        return {
            "node": str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            "pid": os.getpid(),
            "model": self.batcher.options.path,
        }

    async def score(self, texts: Sequence[str]) -> list[Said]:
        return await self.batcher.score(texts)

    async def ping(self) -> int:
        return os.getpid()

    async def stop(self) -> None:
        return
