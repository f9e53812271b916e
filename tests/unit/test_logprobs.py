"""Log-probabilities and entropies of sampled tokens: exact, chunked, differentiable, cheap in memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from grpo_dist.algorithms.logprobs import completion_logprobs, head_logprobs, plain_logprobs

LENGTHS = torch.tensor([5, 1, 4, 7])


def packed(dtype: torch.dtype = torch.float64, vocabulary: int = 11, width: int = 6) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    length = int(LENGTHS.sum())
    hidden, weight = torch.randn(length, width, dtype=dtype), torch.randn(vocabulary, width, dtype=dtype)
    token_ids = torch.randint(vocabulary, (length,))
    mask = torch.rand(length) < 0.7
    mask[LENGTHS.cumsum(0) - LENGTHS] = False
    return hidden.requires_grad_(), weight.requires_grad_(), token_ids, mask


def test_temperature_scales_the_logits() -> None:
    # Logits [2, 1, 0, -1] at T = 0.5: log softmax([4, 2, 0, -2])[0] = -0.1454; without T -0.4402.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    target = torch.tensor([0])
    half, _ = head_logprobs(hidden, weight, target, temperature=0.5)
    one, _ = head_logprobs(hidden, weight, target, temperature=1.0)
    assert half.item() == pytest.approx(-math.log(1 + math.exp(-2) + math.exp(-4) + math.exp(-6)), abs=1e-6)
    assert half.item() == pytest.approx(-0.145, abs=1e-3)
    assert one.item() == pytest.approx(-0.440, abs=1e-3)


def test_the_hidden_state_before_a_token_predicts_it() -> None:
    # Two sequences, [3, 1, 2] and [0, 2]. The state of token t says "next is (id + 1) % 4" with certainty.
    token_ids, lengths = torch.tensor([3, 0, 1, 1, 2]), torch.tensor([3, 2])
    hidden = torch.eye(4)[(token_ids + 1) % 4] * 50
    mask = torch.tensor([False, True, True, False, True])
    logprobs, entropy = completion_logprobs(hidden, torch.eye(4), token_ids, lengths, mask)
    assert torch.allclose(logprobs, torch.zeros(5), atol=1e-6)
    assert torch.allclose(entropy, torch.zeros(5), atol=1e-6)


def test_first_token_of_a_sequence_cannot_train() -> None:
    hidden, weight, token_ids, mask = packed()
    mask[5] = True
    with pytest.raises(ValueError, match="first token"):
        completion_logprobs(hidden, weight, token_ids, LENGTHS, mask)


def test_arrays_of_other_lengths_are_refused() -> None:
    hidden, weight, token_ids, mask = packed()
    with pytest.raises(ValueError, match="hidden has 17 rows, token_ids 16"):
        completion_logprobs(hidden, weight, token_ids[:-1], LENGTHS, mask)


@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_equals_the_plain_way_in_value_and_gradient(chunk: int, temperature: float) -> None:
    hidden, weight, token_ids, mask = packed()
    logprobs, entropy = completion_logprobs(
        hidden, weight, token_ids, LENGTHS, mask, temperature=temperature, chunk_tokens=chunk
    )
    plain, plain_entropy = plain_logprobs(hidden @ weight.T, token_ids, LENGTHS, temperature)
    assert torch.allclose(logprobs, plain * mask, atol=1e-12)
    assert torch.allclose(entropy, plain_entropy * mask, atol=1e-12)
    upstream = torch.randn(len(token_ids), dtype=torch.float64)
    ours = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    theirs = torch.autograd.grad((plain * mask * upstream).sum(), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, token_ids, mask = packed()

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return completion_logprobs(h, w, token_ids, LENGTHS, mask, temperature=0.8, chunk_tokens=3)

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_without_entropy_it_is_zero_and_costs_no_gradient() -> None:
    hidden, weight, token_ids, mask = packed()
    with_it, _ = completion_logprobs(hidden, weight, token_ids, LENGTHS, mask)
    without, entropy = completion_logprobs(hidden, weight, token_ids, LENGTHS, mask, need_entropy=False)
    assert torch.equal(with_it, without)
    assert not entropy.any()
    (grad,) = torch.autograd.grad((without + entropy).sum(), (hidden,))
    (expected,) = torch.autograd.grad(with_it.sum(), (hidden,))
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_to_train_yields_a_zero_that_can_be_back_propagated(rows: int) -> None:
    weight = torch.randn(7, 3, requires_grad=True)
    hidden = torch.randn(rows, 3, requires_grad=True)
    lengths = torch.tensor([rows] if rows else [], dtype=torch.int64)
    mask = torch.zeros(rows, dtype=torch.bool)
    logprobs, entropy = completion_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.int64), lengths, mask)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    assert not weight.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_against_fp64_is_fp32_rounding_whatever_the_dtype(dtype: torch.dtype) -> None:
    """A bf16 log-softmax is off by up to 0.08; here the inputs may be bf16, the arithmetic is fp32."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(64, 32).to(dtype), (torch.randn(20_000, 32) / 4).to(dtype)
    token_ids = torch.randint(20_000, (64,))
    lengths, mask = torch.tensor([64]), torch.arange(64) > 0
    logprobs, entropy = completion_logprobs(hidden, weight, token_ids, lengths, mask, temperature=0.7, chunk_tokens=24)
    plain, plain_entropy = plain_logprobs(hidden.double() @ weight.double().T, token_ids, lengths, 0.7)
    assert logprobs.dtype == torch.float32
    assert (logprobs - plain).abs().max() < 2e-6
    assert (entropy - plain_entropy).abs().max() < 4e-6


def test_half_precision_gradients_are_summed_in_fp32() -> None:
    torch.manual_seed(2)
    hidden = torch.randn(300, 16).bfloat16().requires_grad_()
    weight = (torch.randn(9000, 16) / 4).bfloat16().requires_grad_()
    token_ids, lengths, mask = torch.randint(9000, (300,)), torch.tensor([300]), torch.arange(300) > 0
    logprobs, _ = completion_logprobs(hidden, weight, token_ids, lengths, mask, chunk_tokens=7)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    wide = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    plain, _ = plain_logprobs(wide[0] @ wide[1].T, token_ids, lengths)
    for grad, exact in zip(grads, torch.autograd.grad(plain.sum(), wide), strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - exact).norm() / exact.norm() < 3e-3  # one rounding to bf16


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    logprobs, entropy = head_logprobs(hidden, weight, torch.tensor([0, 1]))
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    grads = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in grads)


def test_under_nonreentrant_checkpointing_values_and_gradients_are_the_same() -> None:
    hidden, weight, token_ids, mask = packed(torch.float32)

    def head(h: Tensor) -> Tensor:
        return completion_logprobs(torch.tanh(h), weight, token_ids, LENGTHS, mask, chunk_tokens=4)[0].sum()

    plain = torch.autograd.grad(head(hidden), (hidden, weight))
    again = torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again, (hidden, weight)), strict=True):
        assert torch.equal(a, b)


def test_a_weight_emptied_after_the_forward_and_refilled_before_the_backward_works() -> None:
    """What ZeRO-3 does to a parameter between the two passes: its storage goes and comes back, the object stays."""
    hidden, weight, token_ids, mask = packed(torch.float32)
    expected = torch.autograd.grad(completion_logprobs(hidden, weight, token_ids, LENGTHS, mask)[0].sum(), (weight,))[0]
    parameter = torch.nn.Parameter(weight.detach().clone())
    loss = completion_logprobs(hidden, parameter, token_ids, LENGTHS, mask)[0].sum()
    whole = parameter.data
    parameter.data = torch.empty(0)
    parameter.data = whole.clone()
    loss.backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, expected)


def test_no_tensor_of_tokens_by_vocabulary_is_made() -> None:
    """The largest tensor of the forward and backward pass is one chunk's logits or the weight's gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    tokens, vocabulary, width, chunk = 512, 2000, 8, 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    ids, mask = torch.randint(vocabulary, (tokens,)), torch.arange(tokens) > 0
    with Watch():
        logprobs, _ = completion_logprobs(hidden, weight, ids, torch.tensor([tokens]), mask, chunk_tokens=chunk)
        logprobs.sum().backward()
    assert max(sizes) == chunk * vocabulary
