"""The policy as the learner runs it: a Hugging Face model whose head returns log-probabilities instead of logits.

    MicroBatch -> Packed (tensors) -> model(tokens, positions, segments) -> (2, L): log-probabilities and entropies

The language-model head is replaced in place: its forward takes the completion positions only, in chunks, in fp32
(``algorithms/logprobs.py``), so a [tokens, vocabulary] tensor never exists. It stays a module call, which is what makes
DeepSpeed gather the head's weight for it. No deepspeed import here: the same code runs on a plain model in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grpo_dist.algorithms.logprobs import completion_logprobs
from grpo_dist.config import ModelSection
from grpo_dist.errors import UserError
from grpo_dist.learner.attention import Segments, choose_attention, refuse_unsupported
from grpo_dist.types import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch on the model's device. An empty one holds a dummy sequence that trains nothing."""

    token_ids: Tensor  # (L,)
    position_ids: Tensor  # (L,)
    segment_lengths: Tensor  # (S,)
    segment_ids: Tensor  # (L,) 0..S-1
    mask: Tensor  # (L,) bool
    behavior_logprobs: Tensor  # (L,)
    advantages: Tensor  # (L,)
    segments: Segments
    is_empty: bool

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device) -> Packed:
        if micro.is_empty:  # two real tokens, so that every module runs and every value is finite
            micro = MicroBatch(
                token_ids=_zeros(2, "int64"), position_ids=torch.arange(2).numpy(),
                segment_lengths=torch.tensor([2]).numpy(), loss_mask=_zeros(2, "bool"),
                behavior_logprobs=_zeros(2, "float32"), advantages=_zeros(2, "float32"),
                group_ids=_zeros(1, "int64"), sample_indices=_zeros(1, "int64"),
            )  # fmt: skip
            packed = cls.of(micro, device)
            return cls(**{**{f: getattr(packed, f) for f in cls.__slots__}, "is_empty": True})

        def tensor(array: Any) -> Tensor:
            return torch.tensor(array).to(device, non_blocking=True)  # a copy: what came through Ray is read-only

        lengths = torch.tensor(micro.segment_lengths)
        return cls(
            token_ids=tensor(micro.token_ids),
            position_ids=tensor(micro.position_ids),
            segment_lengths=lengths.to(device),
            segment_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device),
            mask=tensor(micro.loss_mask),
            behavior_logprobs=tensor(micro.behavior_logprobs),
            advantages=tensor(micro.advantages),
            segments=Segments.of(tuple(int(n) for n in lengths), device),
            is_empty=False,
        )


def _zeros(count: int, dtype: str) -> Any:
    return torch.zeros(count, dtype=getattr(torch, dtype)).numpy()


class LogprobHead:
    """Takes the place of ``lm_head.forward``. Without a request it returns plain logits (self-checks use that)."""

    def __init__(self, module: torch.nn.Linear, temperature: float, chunk_tokens: int) -> None:
        self._module, self._temperature, self._chunk = module, temperature, chunk_tokens
        self._request: Packed | None = None
        self._entropy = True

    @contextmanager
    def asked(self, packed: Packed, *, entropy: bool = True) -> Iterator[None]:
        self._request, self._entropy = packed, entropy
        try:
            yield
        finally:
            self._request = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(1, L, H) -> (2, L) fp32, or (1, L, V) logits."""
        request, weight = self._request, self._module.weight
        if request is None:
            return torch.nn.functional.linear(hidden, weight)
        pair = completion_logprobs(
            hidden[0], weight, request.token_ids, request.segment_lengths, request.mask,
            temperature=self._temperature, chunk_tokens=self._chunk, need_entropy=self._entropy,
        )  # fmt: skip
        return torch.stack(pair)


def load_config(section: ModelSection) -> PreTrainedConfig:
    """The model's config. UserError when the folder is missing or the model cannot be trained packed."""
    try:
        config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"no model at model.path {section.path!r}: {error}") from None
    refuse_unsupported(config)
    refuse_scaled_logits(config)
    return config


# What some models do to the logits after the head, by the key of their config, with the value that means nothing.
_AFTER_THE_HEAD: dict[str, float | None] = {
    "final_logit_softcapping": None,  # Gemma 2 and later
    "logit_scale": 1.0,  # Cohere
    "logits_scaling": 1.0,  # Granite, HyperCLOVA
    "lm_head_multiplier": 1.0,  # Falcon H1
    "output_multiplier": 1.0,
}


def refuse_scaled_logits(config: PreTrainedConfig) -> None:
    """Raise UserError for a model that changes its logits after the head: ours returns log-probabilities."""
    text = config.get_text_config()
    for key, neutral in _AFTER_THE_HEAD.items():
        value = getattr(text, key, None)
        if value is not None and value != neutral:
            raise UserError(
                f"{config.model_type} has {key}: {value} in its config, which changes the logits after the head: "
                "not supported, log-probabilities would be wrong"
            )


def load_model(section: ModelSection, device: torch.device) -> PreTrainedModel:
    """The policy with our attention, ready for packed input. Partitioned at birth when a DeepSpeed config is alive."""
    dtype = DTYPES[section.dtype]
    config = load_config(section)
    model = AutoModelForCausalLM.from_pretrained(
        section.path,
        config=config,
        dtype=dtype,
        attn_implementation=choose_attention(section.attention, device, dtype),
        trust_remote_code=section.trust_remote_code,
    )
    # A cache, even an unused one, makes transformers drop the block-diagonal mask of packed sequences.
    model.config.use_cache = False
    for module in model.modules():  # rollouts know no dropout, so neither may the policy that is compared with them
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def replace_head(model: PreTrainedModel, temperature: float, chunk_tokens: int) -> LogprobHead:
    """Put a ``LogprobHead`` in place of the model's head and return it."""
    module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(module, torch.nn.Linear) or module.bias is not None:
        what = "has a bias (lm_head.bias)" if isinstance(module, torch.nn.Linear) else f"is a {type(module).__name__}"
        raise UserError(
            f"the head of {type(model).__name__} {what}: only plain linear heads without bias are supported"
        )
    head = LogprobHead(module, temperature, chunk_tokens)
    module.forward = head
    return head


def token_logprobs(model: Any, head: LogprobHead, packed: Packed, *, entropy: bool = True) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), each (L,) fp32 and 0 off the mask. ``model`` is the engine or a plain model."""
    with head.asked(packed, entropy=entropy):
        out = _forward(model, packed)
    return out[0], out[1]


def token_logits(model: Any, packed: Packed) -> Tensor:
    """(L, V) logits as the model itself makes them: the plain way, for self-checks on a few tokens."""
    return _forward(model, packed)[0]


def _forward(model: Any, packed: Packed) -> Tensor:
    out = model(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        segments=packed.segments,
        use_cache=False,
    )
    return out.logits
