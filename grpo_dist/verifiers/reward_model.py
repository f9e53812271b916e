"""``reward_model``: a Hugging Face sequence classifier scores prompt and completion.

The model is too large for the judging processes, so the process that owns the pool loads it, once (reward_scorer.py).
It is asked for all completions of a call at once, and what it said is attached to each item; this function reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from grpo_dist.config import VerifierUse
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Part, RangedOptions, register

KEY = "reward_model"  # of VerifyItem.extra: {path: score | {"error": text}}


class RewardModelOptions(RangedOptions):
    path: str = Field(description="Model folder or hub name of a sequence classifier with one output.")
    squash: Literal["sigmoid", "none"] = Field(
        "sigmoid", description="How its output becomes a number: 1/(1+e^-x), or as it is."
    )
    max_tokens: int = Field(4096, gt=0, description="Longer texts are an error, never cut.")
    batch: int = Field(16, gt=0, description="Texts in one forward pass.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of the weights.")


def reward_models(uses: Sequence[VerifierUse]) -> list[RewardModelOptions]:
    """The reward models of a recipe, each once."""
    models: dict[str, RewardModelOptions] = {}
    for use in uses:
        if use.name == "reward_model":
            one = RewardModelOptions.model_validate(use.options)
            models[one.path] = one
    return list(models.values())


@register("reward_model", RewardModelOptions)
def reward_model(item: VerifyItem, options: RewardModelOptions) -> Part:
    said: Any = item.extra.get(KEY, {}).get(options.path)
    if isinstance(said, dict):
        raise RuntimeError(str(said["error"]))
    if not isinstance(said, float):
        raise RuntimeError(f"the reward model {options.path} was not asked, found {found(said)}: the pool attaches it")
    return Part(said)
