"""What the learner computes otherwise on a GPU than on a CPU: varlen attention, and a head that multiplies half-precision
inputs straight into fp32. Each against the definition in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms.logprobs import completion_logprobs, plain_logprobs
from grpo_dist.config import ModelSection
from grpo_dist.data.batching import build_batch
from grpo_dist.learner.attention import VARLEN, Segments, choose_attention, varlen_attention
from grpo_dist.learner.model import Packed, load_model, replace_head, token_logits, token_logprobs
from tests.gpu.learner.ranks import needs, samples
from tests.unit.test_attention import by_definition

pytestmark = [pytest.mark.gpu, needs(1)]

GPU = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (7, 1, 12, 3), (300, 1, 511, 64)])
def test_varlen_attention_is_block_diagonal_and_causal(
    lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    total, width = sum(lengths), 64
    q = torch.randn(1, 4, total, width, device=GPU).to(dtype).requires_grad_()
    k, v = (torch.randn(1, kv_heads, total, width, device=GPU).to(dtype).requires_grad_() for _ in range(2))
    scale = width**-0.5
    out, _ = varlen_attention(torch.nn.Module(), q, k, v, None, scaling=scale, segments=Segments.of(lengths, GPU))
    assert out.shape == (1, total, 4, width)
    exact = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    wanted = by_definition(*exact, lengths, scale)
    assert (out[0].cpu().double() - wanted).abs().max() < 4 * ROUNDING[dtype] * wanted.abs().max()
    pull = torch.randn(total, 4, width)
    ours = torch.autograd.grad((out[0].float() * pull.to(GPU)).sum(), (q, k, v))
    theirs = torch.autograd.grad((wanted * pull).sum(), exact)
    for found, right in zip(ours, theirs, strict=True):
        assert (found.cpu().double() - right).norm() < 8 * ROUNDING[dtype] * right.norm()


@pytest.mark.parametrize("dtype", HALF)
def test_a_sequence_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    """Packed between others it has the values that it has alone."""
    torch.manual_seed(1)
    lengths = (200, 33, 90)
    q, k, v = (torch.randn(1, 4, sum(lengths), 64, device=GPU, dtype=dtype) for _ in range(3))
    packed, _ = varlen_attention(torch.nn.Module(), q, k, v, None, scaling=0.125, segments=Segments.of(lengths, GPU))
    part = slice(200, 233)
    alone, _ = varlen_attention(
        torch.nn.Module(), q[:, :, part], k[:, :, part], v[:, :, part], None, scaling=0.125,
        segments=Segments.of((33,), GPU),
    )  # fmt: skip
    assert (packed[:, part].float() - alone.float()).abs().max() < 2 * ROUNDING[dtype]


def test_a_whole_model_packed_is_the_model_one_by_one(tiny_model: Path) -> None:
    """bf16 with varlen attention and our head, against plain logits of each sequence alone; and fp32 with segments."""
    for dtype, largest, average in (("bfloat16", 0.25, 2e-2), ("float32", 1e-3, 1e-4)):
        model = load_model(ModelSection(path=str(tiny_model), dtype=dtype), GPU).to(GPU)
        name = choose_attention("auto", GPU, getattr(torch, dtype))
        assert model.config._attn_implementation == name
        assert (name == VARLEN) == (dtype == "bfloat16")
        head = replace_head(model, 1.0, 16)
        batch = samples(12)
        (micro,) = build_batch(batch, ranks=1, micro_batch_tokens=10_000).shards[0]
        together = Packed.of(micro, GPU)
        with torch.no_grad():
            found = token_logprobs(model, head, together)[0]
            alone = []
            for sample in sorted(batch, key=lambda s: (s.group_id, s.index)):
                (single,) = build_batch([sample], ranks=1, micro_batch_tokens=1).shards[0]
                one = Packed.of(single, GPU)
                logits = token_logits(model, one)
                alone.append(plain_logprobs(logits, one.token_ids, one.segment_lengths)[0] * one.mask)
        gap = (found.double() - torch.cat(alone)).abs()
        assert gap.max() < largest
        assert gap.mean() < average


# --- head -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_multiplied_into_fp32(dtype: torch.dtype) -> None:
    """out_dtype: the product keeps what a half-precision result would round away. Also inside autocast."""
    torch.manual_seed(2)
    a, b = torch.randn(64, 576, device=GPU, dtype=dtype), torch.randn(576, 512, device=GPU, dtype=dtype)
    exact = a.double() @ b.double()
    with torch.autocast("cuda", dtype=dtype), torch.autocast("cuda", enabled=False):
        wide = torch.mm(a, b, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().max() < 1e-3
    assert ((a @ b).double() - exact).abs().max() > 5 * (wide - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_logprobs_on_a_gpu_against_fp64(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(256, 576).to(dtype), (torch.randn(49_152, 576) / 24).to(dtype)
    ids, lengths, mask = torch.randint(49_152, (256,)), torch.tensor([200, 56]), torch.ones(256, dtype=torch.bool)
    mask[[0, 200]] = False
    on_gpu = [t.to(GPU) for t in (hidden, weight, ids, lengths, mask)]
    found, entropy = completion_logprobs(*on_gpu, temperature=0.7, chunk_tokens=100)
    exact, exact_entropy = plain_logprobs(hidden.double() @ weight.double().T, ids, lengths, 0.7)
    assert found.dtype == torch.float32
    # Tensor cores add up in fp32 but in blocks: some units in the last place more than a CPU's 2e-6.
    assert (found.cpu() - exact * mask).abs().max() < 2e-5
    assert (entropy.cpu() - exact_entropy * mask).abs().max() < 4e-5


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gradients_of_the_head_against_fp64(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    hidden, weight = torch.randn(300, 64).to(dtype), (torch.randn(9000, 64) / 8).to(dtype)
    ids, lengths, mask = torch.randint(9000, (300,)), torch.tensor([300]), torch.arange(300) > 0
    pull = torch.randn(300)
    ours = [t.to(GPU).requires_grad_() for t in (hidden, weight)]
    found = completion_logprobs(*ours, ids.to(GPU), lengths.to(GPU), mask.to(GPU), chunk_tokens=37)[0]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    right = plain_logprobs(exact[0] @ exact[1].T, ids, lengths)[0]
    grads = torch.autograd.grad((found * pull.to(GPU)).sum(), ours)
    for grad, wanted in zip(grads, torch.autograd.grad((right * mask * pull).sum(), exact), strict=True):
        assert grad.dtype == dtype
        limit = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]  # (p - y) is rounded before the product
        assert (grad.cpu().double() - wanted).norm() < limit * wanted.norm()


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.25), (torch.bfloat16, 0.34)])
def test_memory_of_the_head(dtype: torch.dtype, share: float) -> None:
    """Peak above the inputs, forward and backward, 2,048 tokens, vocabulary 49,152, hidden 576."""
    tokens, width, vocabulary = 2048, 576, 49_152
    hidden = torch.randn(tokens, width, device=GPU, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=GPU) / 24).to(dtype).requires_grad_()
    ids, mask = torch.randint(vocabulary, (tokens,), device=GPU), torch.arange(tokens, device=GPU) > 0
    lengths = torch.tensor([tokens], device=GPU)

    def plain() -> Tensor:
        logp = torch.log_softmax((hidden[:-1] @ weight.T).float(), -1)
        return logp.gather(1, ids[1:, None]).sum()

    def chunked() -> Tensor:
        return completion_logprobs(hidden, weight, ids, lengths, mask, need_entropy=False)[0].sum()

    def peak(way: Callable[[], Tensor]) -> int:
        way().backward()  # libraries take their work spaces
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way().backward()
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        hidden.grad = weight.grad = None
        return used

    assert peak(chunked) <= share * peak(plain)
