"""Log-probabilities and entropies of sampled tokens, from hidden states, without a [tokens, vocabulary] tensor.

    hidden (L, H) -> rows that predict a trained token -> chunks of rows -> logits, log-sum-exp -> (L,)

* The only place with the shift between a logit and the token it predicts: the hidden state at t - 1 predicts token t.
* Only positions with mask True go through the head. Logits of one chunk exist at a time; the backward pass computes
  them again from the saved log-sum-exp.
* Logits, their scaling by the temperature and all sums are fp32 whatever the model's dtype (fp64 for fp64 inputs).
* ``HeadLogprobs`` saves the weight as it is given. Under ZeRO-3 that is the parameter itself, which DeepSpeed's hooks
  empty after the forward and gather again before the backward pass.

Left out: heads with a bias, soft-capped or scaled logits. Whoever loads a model refuses those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_UPCAST_ROWS = 8192  # rows of a half-precision weight that exist in fp32 at a time, where no mixed GEMM exists


def completion_logprobs(
    hidden: Tensor,  # (L, H)
    weight: Tensor,  # (V, H)
    token_ids: Tensor,  # (L,)
    segment_lengths: Tensor,  # (S,), sum L
    mask: Tensor,  # (L,) bool
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    need_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log p(token t | its sequence so far), entropy of that distribution), each (L,), 0 where the mask is False.

    Without ``need_entropy`` the entropy is all 0. Raises ValueError if the mask asks for the first token of a sequence.
    """
    length = hidden.shape[0]
    if not token_ids.shape[0] == mask.shape[0] == length:
        raise ValueError(f"hidden has {length} rows, token_ids {token_ids.shape[0]}, mask {mask.shape[0]} entries")
    rows, positions, targets = predicting_rows(hidden, token_ids, segment_lengths, mask)
    logprobs, entropy = head_logprobs(
        rows, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, need_entropy=need_entropy
    )
    blank = logprobs.new_zeros(length)
    return blank.index_put((positions,), logprobs), blank.index_put((positions,), entropy)


def predicting_rows(
    hidden: Tensor, token_ids: Tensor, segment_lengths: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states that predict the masked tokens (N, H), their tokens' positions (N,), those tokens (N,))."""
    positions = mask.nonzero(as_tuple=True)[0]
    if positions.numel():
        starts = (segment_lengths.cumsum(0) - segment_lengths).to(mask.device)
        if bool(mask[starts].any()):
            raise ValueError("the mask asks for the first token of a sequence, which nothing predicts")
    return hidden[positions - 1], positions, token_ids[positions]


def head_logprobs(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,)
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    need_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) of each row, (N,), fp32. Row n of ``hidden`` predicts ``targets[n]``: no shift here.

    May stand in for the forward of a language-model head, also under ZeRO-3. With no rows it still uses the weight.
    """
    return HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk_tokens, need_entropy
    )


class HeadLogprobs(torch.autograd.Function):
    """p = softmax(h W^T / T). Forward saves the log-sum-exp of each row; backward computes a chunk's p again from it.

    d log p(y) / dz_j = [j = y] - p_j,   d entropy / dz_j = -p_j (log p_j + entropy),   z = h W^T / T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int, need_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(hidden.dtype)
        logprobs = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        entropy, lse = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        room = _room(hidden, weight, chunk)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, scale, room)
            logprobs[part], lse[part], entropy[part] = _values(logits, targets[part], need_entropy)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.scale, ctx.chunk, ctx.need_entropy = scale, chunk, need_entropy
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # One fp32 sum over all chunks, cast once: a bf16 sum would lose small contributions.
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.need_entropy:
            grad_entropy = None
        if grad_logprobs is not None or grad_entropy is not None:
            room = _room(hidden, weight, ctx.chunk)
            for start in range(0, hidden.shape[0], ctx.chunk):
                part = slice(start, start + ctx.chunk)
                grad = _logits(hidden[part], weight, ctx.scale, room).sub_(lse[part, None])  # (C, V)
                upstream = (_cut(g, part) for g in (grad_logprobs, grad_entropy))
                _gradient_in_place(grad, targets[part], entropy[part], *upstream)
                if ctx.scale != 1.0:
                    grad.mul_(ctx.scale)
                if grad_hidden is not None:
                    grad_hidden[part] = _times_weight(grad, weight).to(hidden.dtype)
                if grad_weight is not None:
                    _add_outer(grad_weight, grad, hidden[part])
                del grad  # before the next chunk's logits are made
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def plain_logprobs(
    logits: Tensor, token_ids: Tensor, segment_lengths: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same values from a whole (L, V) logits tensor in fp64: the plain way, for tests and self-checks.

    First tokens of sequences get 0.
    """
    logp = torch.log_softmax(logits.double() / temperature, -1)
    before = logp.roll(1, 0)  # row t now holds the distribution over token t
    logprobs = before.gather(1, token_ids[:, None]).squeeze(1)
    entropy = -(before.exp() * before).sum(1)
    first = torch.zeros_like(token_ids, dtype=torch.bool)
    first[segment_lengths.cumsum(0) - segment_lengths] = True
    return logprobs.masked_fill(first, 0.0), entropy.masked_fill(first, 0.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cut(grad: Tensor | None, part: slice) -> Tensor | None:
    return None if grad is None else grad[part]


def _room(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor | None:
    """(C, V) memory that every chunk's logits are written to: on a CPU, fresh memory costs a page fault for each 4 KiB.
    CUDA's allocator hands out the last chunk's anyway."""
    if hidden.is_cuda:
        return None
    return hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0], dtype=_wide(hidden.dtype))


def _values(logits: Tensor, targets: Tensor, need_entropy: bool) -> tuple[Tensor, Tensor, Tensor | float]:
    """(log p(target), log-sum-exp, entropy) of each row. Overwrites ``logits``."""
    top = logits.amax(1)
    shifted = logits.sub_(top[:, None])
    picked = shifted.gather(1, targets[:, None]).squeeze(1)
    if not need_entropy:
        log_total = shifted.exp_().sum(1).log()
        return picked - log_total, log_total + top, 0.0
    powers = shifted.exp()
    total = powers.sum(1)
    entropy = total.log() - powers.mul_(shifted).sum(1) / total  # H = log sum exp z - sum p z
    return picked - total.log(), total.log() + top, entropy


def _gradient_in_place(
    logp: Tensor, targets: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> None:
    """``logp`` becomes the gradient of the logits."""
    coefficient = torch.zeros_like(entropy) if grad_logprobs is None else -grad_logprobs
    if grad_entropy is None:
        logp.exp_().mul_(coefficient[:, None])
    else:
        slope = (logp + entropy[:, None]).mul_(-grad_entropy[:, None]).add_(coefficient[:, None])
        logp.exp_().mul_(slope)
    if grad_logprobs is not None:
        logp.scatter_add_(1, targets[:, None], grad_logprobs[:, None].to(logp.dtype))


def _mixed_gemm(tensor: Tensor) -> bool:
    """Whether half-precision inputs can be multiplied straight into fp32 (tensor cores); CPUs cannot."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def _logits(hidden: Tensor, weight: Tensor, scale: float, room: Tensor | None) -> Tensor:
    """(C, V) logits in fp32 (or fp64), already divided by the temperature; in ``room`` if there is one."""
    wide = _wide(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if _mixed_gemm(weight):
            return torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=torch.float32).mul_(scale)
        hidden = hidden.to(wide)
        logits = hidden.new_empty(len(hidden), len(weight)) if room is None else room[: len(hidden)]
        step = len(weight) if weight.dtype == wide else CPU_UPCAST_ROWS
        for start in range(0, len(weight), step):
            rows = weight[start : start + step].to(wide)
            torch.mm(hidden, rows.t(), out=logits[:, start : start + len(rows)])
        return logits if scale == 1.0 else logits.mul_(scale)


def _times_weight(grad: Tensor, weight: Tensor) -> Tensor:
    """(C, V) x (V, H) in fp32."""
    with torch.autocast(grad.device.type, enabled=False):
        if _mixed_gemm(weight):
            return torch.mm(grad.to(weight.dtype), weight, out_dtype=torch.float32)
        if weight.dtype == grad.dtype:
            return torch.mm(grad, weight)
        out = grad.new_zeros(grad.shape[0], weight.shape[1])
        for start in range(0, weight.shape[0], CPU_UPCAST_ROWS):
            rows = weight[start : start + CPU_UPCAST_ROWS].to(grad.dtype)
            out.addmm_(grad[:, start : start + rows.shape[0]], rows)
        return out


def _add_outer(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total (V, H) += grad^T (V, C) x hidden (C, H), in fp32."""
    with torch.autocast(grad.device.type, enabled=False):
        if _mixed_gemm(hidden):
            total.add_(torch.mm(grad.to(hidden.dtype).t(), hidden, out_dtype=torch.float32))
        else:
            total.addmm_(grad.t(), hidden.to(total.dtype))
