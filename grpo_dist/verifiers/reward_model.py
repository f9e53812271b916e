"""``reward_model``: a Hugging Face sequence classifier scores prompt and completion.

The model is too large for the judging processes, so it lives elsewhere, once (reward_scorer.py), and is asked for many
completions at a time. What it said is attached to each item; this function reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Part, RangedOptions, register

KEY = "reward_model"  # of VerifyItem.extra: {path: output | {"error": text}}


class RewardModelOptions(RangedOptions):
    path: str = Field(description="Model folder or hub name of a sequence classifier with one output.")
    squash: Literal["sigmoid", "none"] = Field(
        "sigmoid", description="How its output becomes a number: 1/(1+e^-x), or as it is."
    )
    max_tokens: int = Field(4096, gt=0, description="Longer texts are an error, never cut.")
    batch: int = Field(16, gt=0, description="Texts in one forward pass.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of the weights.")


def reward_models(uses: Sequence[VerifierUse]) -> dict[str, RewardModelOptions]:
    """The reward models of a recipe by path. Raises RecipeError when one is to be loaded in two ways."""
    models: dict[str, RewardModelOptions] = {}
    for use in uses:
        if use.name != "reward_model":
            continue
        try:
            one = RewardModelOptions.model_validate(use.options)
        except ValidationError as error:
            raise RecipeError(f"reward_model: {error.errors()[0]['msg']}, got {use.options}") from error
        first = models.setdefault(one.path, one)
        for key in ("max_tokens", "batch", "dtype"):
            if getattr(first, key) != getattr(one, key):
                raise RecipeError(
                    f"reward_model {one.path} is used twice with different {key} "
                    f"({getattr(first, key)} and {getattr(one, key)}); it is loaded once"
                )
    return models


@register("reward_model", RewardModelOptions)
def reward_model(item: VerifyItem, options: RewardModelOptions) -> Part:
    said: Any = item.extra.get(KEY, {}).get(options.path)
    if isinstance(said, dict):
        raise RuntimeError(str(said["error"]))
    if not isinstance(said, float):
        raise RuntimeError(f"the reward model {options.path} was not asked, found {found(said)}")
    return Part(_sigmoid(said) if options.squash == "sigmoid" else said)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
