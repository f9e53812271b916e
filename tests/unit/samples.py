"""Small scored groups and samples for tests of pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_dist.types import (
    Completion,
    FinishReason,
    GroupRequest,
    Prompt,
    RolloutGroup,
    Sample,
    ScoredGroup,
    Verdict,
    VersionSpan,
)


def completion(
    length: int = 3, *, finish: FinishReason = "stop", versions: Sequence[tuple[int, int, int]] | None = None
) -> Completion:
    spans = [(0, 0, length)] if versions is None and length else versions or []
    return Completion(
        token_ids=tuple(range(10, 10 + length)),
        logprobs=tuple(-0.1 * (i + 1) for i in range(length)),
        text="x" * length,
        finish_reason=finish,
        versions=tuple(VersionSpan(*s) for s in spans),
    )


def group(
    rewards: Sequence[float | None],
    *,
    group_id: int = 0,
    prompt: str = "p",
    completions: Sequence[Completion] | None = None,
    verdicts: Sequence[Verdict] | None = None,
) -> ScoredGroup:
    request = GroupRequest(group_id=group_id, epoch=0, prompt=Prompt(prompt, (1, 2), "?", "a"), seed=0)
    return ScoredGroup(
        rollout=RolloutGroup(
            request=request,
            completions=tuple(completions or [completion() for _ in rewards]),
            seconds=1.0,
            engine="engine0",
        ),
        verdicts=tuple(verdicts or [Verdict(r, error=None if r is not None else "broken") for r in rewards]),
    )


def sample(tokens: int, trained: int, *, group_id: int = 0, index: int = 0, advantage: float = 1.0) -> Sample:
    """``tokens`` tokens of which the last ``trained`` train."""
    mask = np.arange(tokens) >= tokens - trained
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=np.arange(tokens, dtype=np.int64) + 100 * index,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
    )
