"""Attention over sequences packed end to end: each attends to itself only, causally, and no mask is ever built.

    segment   one scaled_dot_product_attention per sequence; any device and dtype
    varlen    torch's own variable-length FlashAttention: one call for all sequences; CUDA, half precision
    eager     transformers' own, block-diagonal from the position ids; slow, for comparisons

Registered with transformers under our names, so any model that follows its attention interface works unchanged. The
lengths travel as a keyword argument from the model call to each layer. Only plain causal attention is right here:
sliding windows, sinks and soft caps are refused, at load by the config and in each call by what the layer asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from grpo_dist.errors import UserError

SEGMENT, VARLEN = "grpo_segment", "grpo_varlen"


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the packed sequences lie: the same information as each implementation wants it."""

    lengths: tuple[int, ...]  # [S]
    bounds: Tensor  # (S + 1,) int32, cumulative, on the model's device
    longest: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Segments:
        bounds = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths, bounds.to(device, non_blocking=True), max(lengths))


def choose_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name that transformers knows our choice by.

    Raises:
        UserError: ``varlen`` was asked for where torch has no kernel for it.
    """
    kernel = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted == "varlen" and not kernel:
        raise UserError(f"model.attention 'varlen' needs a GPU and half precision, got {device.type} and {dtype}")
    if wanted == "eager":
        return "eager"
    AttentionInterface.register(SEGMENT, segment_attention)
    AttentionInterface.register(VARLEN, varlen_attention)
    return VARLEN if wanted in ("auto", "varlen") and kernel else SEGMENT


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise UserError for a model whose layers do not all attend causally to the whole sequence."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    # Models without layer_types either apply their window to every layer or have a switch for it.
    if getattr(config, "layer_types", None) or not getattr(config, "use_sliding_window", True):
        window = None
    if kinds or window is not None:
        what = ", ".join(sorted(kinds)) or f"a sliding window of {window}"
        raise UserError(
            f"{config.model_type} has layers with {what}: packed training supports full causal attention only, "
            "and would be silently wrong here"
        )


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,  # (1, heads, L, D)
    key: Tensor,  # (1, kv heads, L, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Output (1, L, heads, D)."""
    lengths = _checked(module, query, attention_mask, segments, kwargs).lengths
    grouped = query.shape[1] != key.shape[1]
    split = [torch.split(t, list(lengths), dim=2) for t in (query, key, value)]
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(*split, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,  # (1, heads, L, D)
    key: Tensor,  # (1, kv heads, L, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Output (1, L, heads, D). Not run on a GPU yet."""
    from torch.nn.attention.varlen import varlen_attn

    where = _checked(module, query, attention_mask, segments, kwargs)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (L, heads, D)
    out = varlen_attn(
        q, k, v, where.bounds, where.bounds, where.longest, where.longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None], None


def _checked(
    module: torch.nn.Module, query: Tensor, mask: Tensor | None, segments: Segments | None, kwargs: dict[str, Any]
) -> Segments:
    name = type(module).__name__
    if segments is None:
        raise UserError(f"{name} does not hand keyword arguments to its attention: use model.attention 'eager'")
    if mask is not None:
        raise UserError(f"{name} was given an attention mask, which packed attention cannot honour")
    asked = [k for k in ("sliding_window", "softcap", "s_aux", "position_bias") if kwargs.get(k) is not None]
    if asked or not getattr(module, "is_causal", True):
        what = ", ".join(asked) or "attention that is not causal"
        raise UserError(f"{name} asks for {what}: not supported in packed training")
    if query.shape[0] != 1 or query.shape[2] != sum(segments.lengths):
        raise ValueError(f"{sum(segments.lengths)} packed tokens declared, queries are {tuple(query.shape)}")
    return segments
