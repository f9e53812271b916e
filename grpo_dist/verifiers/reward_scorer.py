"""A loaded reward model: texts in, numbers out. On the CPU of the process that owns the pool.

torch and transformers are imported when a model is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.reward_model import KEY, RewardModelOptions

Said = float | dict[str, str]  # a score, or {"error": why}


class RewardScorer:
    """Raises what transformers raises when the model cannot be loaded, ValueError for one with several outputs."""

    def __init__(self, options: RewardModelOptions) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.options = options
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options.path)
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(
            options.path, dtype=getattr(torch, options.dtype)
        )
        if self.model.config.num_labels != 1:
            raise ValueError(f"{options.path} has {self.model.config.num_labels} outputs, a reward model has 1")
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id
        self.model.eval()

    def ready(self) -> bool:
        return True

    def score(self, texts: Sequence[str]) -> list[Said]:
        """One number per text, or {"error": why}."""
        encoded = self.tokenizer(list(texts))["input_ids"]
        limit = self.options.max_tokens
        scores: list[Said] = [
            {"error": f"{len(ids)} tokens, more than the reward model's {limit}" if ids else "no tokens"}
            for ids in encoded
        ]
        short = sorted((i for i, ids in enumerate(encoded) if 0 < len(ids) <= limit), key=lambda i: len(encoded[i]))
        for start in range(0, len(short), self.options.batch):
            rows = short[start : start + self.options.batch]
            for row, value in zip(rows, self._forward([encoded[row] for row in rows]), strict=True):
                scores[row] = value
        return scores

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        pad = self.model.config.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
        return [float(value) for value in (torch.sigmoid(logits) if self.options.squash == "sigmoid" else logits)]


def texts_of(items: Sequence[VerifyItem]) -> list[str]:
    """What a reward model reads: the prompt as the policy saw it, and the completion."""
    return [item.prompt + item.completion for item in items]


def attached(items: Sequence[VerifyItem], said: Mapping[str, Sequence[Said]]) -> list[VerifyItem]:
    """The items with what each model said of them, where the verifier `reward_model` looks for it."""
    return [
        replace(item, extra=item.extra | {KEY: {path: scores[i] for path, scores in said.items()}})
        for i, item in enumerate(items)
    ]
