"""Every value that crosses a process, one type per stage of the loop.

    Prompt -> RolloutGroup -> ScoredGroup -> Sample -> MicroBatch -> TrainBatch -> WeightUpdate

Legend: G samples of a group, C completion tokens, T sample tokens (prompt + completion), L packed length,
S sequences packed into one micro-batch.

Conventions, relied on everywhere:

* Index ``t`` describes token ``t``. Prompt and padding positions have mask False and value 0. The shift between a
  logit and the token it predicts happens in one place, ``algorithms/logprobs.py``.
* Token ids travel end to end. Text is for verifiers and people; nothing is ever tokenised twice.
* An error is never a reward: a verifier that fails gives ``reward=None`` and says why; the sample is masked, counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised once, with what a verifier needs to judge an answer."""

    id: str  # stable: derived from the source and the row, not from the order
    token_ids: tuple[int, ...]
    text: str  # what token_ids decode from, after the template
    answer: Any  # JSON value; never None for a verifier that needs a gold answer
    verifier: str | None = None  # overrides the recipe's verifiers for this row
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # other columns of the row, for verifiers


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to be sampled. ``group_id`` is its place in submission order, and with the seed fixes its tokens."""

    group_id: int
    epoch: int
    prompt: Prompt
    seed: int  # of sample 0; sample i uses seed + i


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``start:end`` of a completion were sampled from weight version ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: tuple[int, ...]  # [C], the stop token included when the model emitted one
    logprobs: tuple[float, ...]  # [C], behaviour policy, after temperature
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # cover 0:C without gaps, ascending


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    request: GroupRequest
    completions: tuple[Completion, ...]  # [G]
    seconds: float  # from submission to the engine to the last token
    engine: str  # name of the rollout worker

    @property
    def group_id(self) -> int:
        return self.request.group_id

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """What a verifier may see of one completion. All of it survives JSON: it travels to a child process as a line."""

    id: str  # names the sample in messages and slow lists: "prompt id/index"
    prompt: str
    completion: str
    finish_reason: FinishReason
    answer: Any  # JSON value
    tokens: int = 0  # length of the completion, the stop token included
    verifier: str | None = None  # the row's own choice
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verifiers said of one completion. ``reward is None`` means: no verdict, and ``error`` says why."""

    reward: float | None
    correct: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)  # reward per verifier, before weights
    error: str | None = None
    seconds: float = 0.0
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    rollout: RolloutGroup
    verdicts: tuple[Verdict, ...]  # [G]

    def __post_init__(self) -> None:
        if len(self.verdicts) != len(self.rollout.completions):
            raise ValueError(
                f"{len(self.verdicts)} verdicts for {len(self.rollout.completions)} completions "
                f"(group {self.rollout.group_id})"
            )

    @property
    def group_id(self) -> int:
        return self.rollout.group_id

    @property
    def rewards(self) -> list[float]:
        """[G], NaN for a sample that must not count: no verdict, a reward that is no number, aborted."""
        return [
            float(v.reward)
            if v.reward is not None and math.isfinite(v.reward) and c.finish_reason != "abort"
            else math.nan
            for v, c in zip(self.verdicts, self.rollout.completions, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trained sequence. A sample that must not train has a loss_mask without a True."""

    group_id: int
    index: int  # 0..G-1
    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T] True on the completion tokens that train
    behavior_logprobs: FloatArray  # [T] 0 where the mask is False
    advantages: FloatArray  # [T] 0 where the mask is False

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "loss_mask": len(self.loss_mask),
            "behavior_logprobs": len(self.behavior_logprobs),
            "advantages": len(self.advantages),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"arrays of one sample differ in length: {lengths} (group {self.group_id}, {self.index})")


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward pass eats: S sequences packed end to end, no padding between them.

    An empty micro-batch (``len(segment_lengths) == 0``) is a rank's turn with nothing to do: it still runs one forward
    and backward pass, on a dummy token, because ZeRO-3 gathers parameters in lockstep.
    """

    token_ids: IntArray  # [L]
    position_ids: IntArray  # [L] restarts at 0 in each sequence
    segment_lengths: IntArray  # [S], sum is L
    loss_mask: BoolArray  # [L]
    behavior_logprobs: FloatArray  # [L]
    advantages: FloatArray  # [L]
    group_ids: IntArray  # [S]
    sample_indices: IntArray  # [S]

    @property
    def is_empty(self) -> bool:
        return len(self.segment_lengths) == 0


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """One optimizer update. Divisors are global counts, so any split gives the same gradient."""

    shards: tuple[tuple[MicroBatch, ...], ...]  # [ranks][micro], every rank the same number of micro-batches
    loss_tokens: int  # True positions of the loss masks, over all ranks
    loss_sequences: int  # sequences with at least one True position, over all ranks

    @property
    def ranks(self) -> int:
        return len(self.shards)

    def of_rank(self, rank: int) -> RankBatch:
        return RankBatch(self.shards[rank], self.loss_tokens, self.loss_sequences)


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """One rank's share of one optimizer update, with the divisors of the whole update."""

    micro: tuple[MicroBatch, ...]
    loss_tokens: int
    loss_sequences: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a publication, under its Hugging Face name."""

    name: str
    dtype: str  # torch name without the prefix, e.g. "bfloat16"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One finished publication: every live engine now samples from ``version``."""

    version: int
    tensors: int
    bytes: int
    engines: int
    seconds: float  # gather + pause + send + verify
    gather_seconds: float
    send_seconds: float
    pause_seconds: float  # longest time that one engine was not generating
    checksum_ok: bool | None  # None: not verified this time
    digest: str | None = None  # of all tensors, when verified: equal weights have equal digests


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands between two steps. ``step`` is also the weight version."""

    step: int = 0
    next_group: int = 0  # first group id that has not been trained or dropped; everything below is done
    samples_trained: int = 0
    tokens_trained: int = 0
    seconds: float = 0.0  # of training, over all resumes
    wandb_id: str | None = None
    prompts: str = ""  # fingerprint of the training prompts: a place in other data means nothing
    # Below ``decided`` it is settled which groups are sampled; those of ``resting`` (>= next_group) are passed over.
    decided: int = 0
    resting: tuple[int, ...] = ()
    difficulty: dict[str, Any] = field(default_factory=dict)  # of algorithms/difficulty.py, as JSON
    buffered: tuple[ScoredGroup, ...] = ()  # finished, not yet trained
