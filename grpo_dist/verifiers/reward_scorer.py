"""Loaded reward models: texts in, numbers out, and how their numbers reach the verifier ``reward_model``.

    items ─► Rewards.attach ─► ask(path, texts) ─► the items, each with what the models said of it ─► verifier pool
                                  │ in a run: the fleet's reward actors (reward_worker.py)
                                  └ in `score`, `replay`: one copy in the command's own process (local_rewards)

Calls are gathered: while a forward pass runs, texts of other calls wait and then share the next ones. torch and
transformers are imported when a model is loaded, not before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.registry import is_audited
from grpo_dist.verifiers.reward_model import KEY, RewardModelOptions, reward_models

Said = float | dict[str, str]  # the model's output, or {"error": why}
Ask = Callable[[str, Sequence[str]], Awaitable[Sequence[Said]]]  # (path, texts)

_GATHERED = 16  # batches of one round


def look_at(uses: Sequence[VerifierUse]) -> None:
    """Raises RecipeError for reward models that cannot be used, as far as is known without their weights."""
    problems = []
    for path in reward_models(uses):
        from transformers import AutoConfig, AutoTokenizer

        try:
            labels = AutoConfig.from_pretrained(path).num_labels
            AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"reward model {path} cannot be loaded: {str(error).splitlines()[0]}")
        else:
            problems += [] if labels == 1 else [f"{path} has {labels} outputs, a reward model has 1"]
    if problems:
        raise RecipeError("\n".join(problems))


class RewardScorer:
    """Raises RecipeError when the model cannot be loaded or is no reward model."""

    def __init__(self, options: RewardModelOptions, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.options, self.device = options, device
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(options.path)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                options.path, dtype=getattr(torch, options.dtype)
            )
        except (OSError, ValueError, KeyError) as error:
            raise RecipeError(f"reward model {options.path} cannot be loaded: {str(error).splitlines()[0]}") from error
        if model.config.num_labels != 1:
            raise RecipeError(f"{options.path} has {model.config.num_labels} outputs, a reward model has 1")
        if model.config.pad_token_id is None:
            pad = self.tokenizer.pad_token_id
            model.config.pad_token_id = self.tokenizer.eos_token_id if pad is None else pad
        self.model = model.to(device).eval()

    def score(self, texts: Sequence[str]) -> list[Said]:
        """One number per text, or {"error": why}; a text that cannot be scored costs only itself."""
        readable = [text.encode("utf-8", "replace").decode() for text in texts]  # a lone surrogate is in no vocabulary
        encoded = self.tokenizer(readable)["input_ids"] if readable else []
        limit = self.options.max_tokens
        scores: list[Said] = [
            {"error": f"{len(ids)} tokens, more than the reward model's {limit}" if ids else "no tokens"}
            for ids in encoded
        ]
        short = sorted((i for i, ids in enumerate(encoded) if 0 < len(ids) <= limit), key=lambda i: len(encoded[i]))
        for start in range(0, len(short), self.options.batch):
            rows = short[start : start + self.options.batch]
            for row, value in zip(rows, self._values([encoded[row] for row in rows]), strict=True):
                scores[row] = value
        return scores

    def _values(self, rows: list[list[int]]) -> list[Said]:
        try:
            return list(self._forward(rows))
        except (RuntimeError, ValueError, IndexError) as error:  # out of memory, a token that the model does not have
            if len(rows) > 1:
                return [value for row in rows for value in self._values([row])]
            return [{"error": f"the reward model failed: {type(error).__name__}: {str(error)[:200]}"}]

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        pad = self.model.config.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.device)
        with torch.inference_mode():
            return [float(v) for v in self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float()]


class RewardBatcher:
    """One model and the calls that wait for it. At most ``_GATHERED`` batches of texts go to it at a time."""

    def __init__(self, options: RewardModelOptions, device: str = "cpu") -> None:
        self.options, self.device = options, device
        self._scorer: RewardScorer | None = None
        self._turn = asyncio.Lock()
        self._waiting: deque[tuple[str, asyncio.Future[Said]]] = deque()

    async def load(self) -> None:
        async with self._turn:
            if self._scorer is None:
                self._scorer = await asyncio.to_thread(RewardScorer, self.options, self.device)

    async def score(self, texts: Sequence[str]) -> list[Said]:
        await self.load()
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in texts]
        self._waiting.extend(zip(texts, answers, strict=True))
        while not all(answer.done() for answer in answers):
            async with self._turn:  # whoever has the turn works for everybody
                await self._round()
        return [answer.result() for answer in answers]

    async def _round(self) -> None:
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), _GATHERED * self.options.batch))]
        if not taken:
            return
        assert self._scorer is not None
        try:
            said = await asyncio.shield(asyncio.to_thread(self._scorer.score, [text for text, _ in taken]))
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(taken))  # the caller at hand is gone, the others are not
            raise
        except BaseException as error:
            for _, answer in taken:
                answer.set_exception(error)
            raise
        for (_, answer), value in zip(taken, said, strict=True):
            if not answer.done():
                answer.set_result(value)


class Rewards:
    """What the reward models of a recipe say, attached to items where ``reward_model`` looks for it."""

    def __init__(self, uses: Sequence[VerifierUse], ask: Ask) -> None:
        """Raises RecipeError when one model is used with different options."""
        self.models, self._ask = reward_models(uses), ask
        self._shares = {
            path: [use.audit for use in uses if use.name == "reward_model" and use.options["path"] == path]
            for path in self.models
        }

    async def attach(self, items: Sequence[VerifyItem]) -> Sequence[VerifyItem]:
        if not self.models:
            return items
        said: list[dict[str, Said]] = [{} for _ in items]

        async def of(path: str) -> None:
            shares = self._shares[path]
            rows = [i for i, item in enumerate(items) if any(s is None or is_audited(item, s) for s in shares)]
            for row, value in zip(rows, await self._ask(path, texts_of([items[i] for i in rows])), strict=True):
                said[row][path] = value

        await asyncio.gather(*map(of, self.models))
        return [replace(item, extra=item.extra | {KEY: one}) for item, one in zip(items, said, strict=True)]


def texts_of(items: Sequence[VerifyItem]) -> list[str]:
    """What a reward model reads: the prompt as the policy saw it, and the completion."""
    return [item.prompt + item.completion for item in items]


def local_rewards(uses: Sequence[VerifierUse]) -> Rewards:
    """Reward models in this process, each loaded once on first use, on its GPU if it has one."""
    batchers: dict[str, RewardBatcher] = {}

    async def ask(path: str, texts: Sequence[str]) -> Sequence[Said]:
        if path not in batchers:
            import torch

            batchers[path] = RewardBatcher(rewards.models[path], "cuda" if torch.cuda.is_available() else "cpu")
        return await batchers[path].score(texts)

    rewards = Rewards(uses, ask)
    return rewards
