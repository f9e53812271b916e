"""Attention over packed sequences against the definition, and the models that it would be wrong for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpo_dist.errors import UserError
from grpo_dist.learner.attention import (
    SEGMENT,
    VARLEN,
    Segments,
    choose_attention,
    refuse_unsupported,
    segment_attention,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def by_definition(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """softmax(scale q k^T) v over tokens of the same sequence that are not later; (L, heads, D), in fp64."""
    q, k, v = q[0].double(), k[0].double(), v[0].double()
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    allowed = (segment[:, None] == segment[None, :]) & (place[None, :] <= place[:, None])
    scores = (scale * q @ k.transpose(1, 2)).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (7, 1, 12, 3), (70, 1, 41)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_segment_attention_is_block_diagonal_and_causal(lengths: tuple[int, ...], kv_heads: int) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(1, 4, total, 8, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, total, 8, requires_grad=True) for _ in range(2))
    where = Segments.of(lengths, CPU)
    out, weights = segment_attention(torch.nn.Module(), q, k, v, None, scaling=0.3, segments=where)
    wanted = by_definition(q, k, v, lengths, 0.3)
    assert weights is None
    assert out.shape == (1, total, 4, 8)
    assert (out[0] - wanted).abs().max() < 2e-6
    pull = torch.randn(total, 4, 8)
    ours = torch.autograd.grad((out[0] * pull).sum(), (q, k, v))
    theirs = torch.autograd.grad((wanted * pull).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_segments_as_each_kernel_wants_them() -> None:
    where = Segments.of((3, 1, 4), CPU)
    assert where.bounds.tolist() == [0, 3, 4, 8]
    assert where.bounds.dtype == torch.int32
    assert where.longest == 4


def test_calls_that_packed_attention_cannot_honour() -> None:
    q = torch.randn(1, 2, 4, 8)
    where, module = Segments.of((4,), CPU), torch.nn.Module()
    with pytest.raises(UserError, match="does not hand keyword arguments"):
        segment_attention(module, q, q, q, None)
    with pytest.raises(UserError, match="attention mask"):
        segment_attention(module, q, q, q, torch.ones(1, 4), segments=where)
    for key in ("sliding_window", "softcap", "s_aux"):
        with pytest.raises(UserError, match=key):
            segment_attention(module, q, q, q, None, segments=where, **{key: 3})
    segment_attention(module, q, q, q, None, segments=where, sliding_window=None, dropout=0.0)
    module.is_causal = False
    with pytest.raises(UserError, match="not causal"):
        segment_attention(module, q, q, q, None, segments=where)
    with pytest.raises(ValueError, match="3 packed tokens declared"):
        segment_attention(torch.nn.Module(), q, q, q, None, segments=Segments.of((3,), CPU))


def test_choice_follows_device_and_dtype() -> None:
    assert choose_attention("auto", CPU, torch.float32) == SEGMENT
    assert choose_attention("auto", CPU, torch.bfloat16) == SEGMENT
    assert choose_attention("auto", GPU, torch.bfloat16) == VARLEN
    assert choose_attention("auto", GPU, torch.float32) == SEGMENT  # the kernel is half precision only
    assert choose_attention("segment", GPU, torch.bfloat16) == SEGMENT
    assert choose_attention("eager", CPU, torch.float32) == "eager"
    with pytest.raises(UserError, match="needs a GPU"):
        choose_attention("varlen", CPU, torch.bfloat16)


def test_models_with_other_than_full_causal_attention_are_refused() -> None:
    refuse_unsupported(Qwen3Config())
    refuse_unsupported(LlamaConfig())
    refuse_unsupported(Qwen2Config(sliding_window=4096, use_sliding_window=False))
    with pytest.raises(UserError, match="sliding_attention"):
        refuse_unsupported(Qwen2Config(sliding_window=8, use_sliding_window=True, max_window_layers=1))
    with pytest.raises(UserError, match="sliding window of 4096"):
        refuse_unsupported(MistralConfig(sliding_window=4096))
    refuse_unsupported(MistralConfig(sliding_window=None))
    with pytest.raises(UserError, match="linear_attention"):
        refuse_unsupported(SimpleNamespace(model_type="hybrid", layer_types=["linear_attention", "full_attention"]))  # type: ignore[arg-type]
