"""AdamW's parameter groups: matrices decay, vectors (norms, biases) do not. Pure torch.

A norm's scale or a bias that shrinks towards 0 changes what the model computes without making it any simpler, so common
recipes leave them out. Embeddings are matrices and decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo_dist.config import OptimizerSection


def parameter_groups(model: torch.nn.Module, wanted: OptimizerSection) -> list[dict[str, Any]]:
    """Trained parameters only; the group that decays comes first, and a group without parameters is left out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if _dimensions(p) > 1]
    vectors = [p for p in trained if _dimensions(p) <= 1]
    assert matrices, "a model without a matrix to train"
    groups: list[dict[str, Any]] = [{"params": part} for part in (matrices, vectors) if part]
    set_constants(groups, wanted)
    return groups


def set_constants(groups: Sequence[dict[str, Any]], wanted: OptimizerSection) -> None:
    """The recipe's betas, eps and decay, in groups that ``parameter_groups`` made; also after loading a checkpoint."""
    for k, group in enumerate(groups):
        decay = wanted.weight_decay if k == 0 else 0.0
        group.update(betas=(wanted.beta1, wanted.beta2), eps=wanted.eps, weight_decay=decay)


def _dimensions(parameter: Any) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # a ZeRO-3 shard is flat; its full shape counts
