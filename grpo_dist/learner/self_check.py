"""Start-up checks of one learner rank on a few tokens: seconds, on the real engine, before anything is trained.

    packing   log-probabilities of three packed sequences equal those of each alone, from plain logits: finds attention
              that leaks between sequences, soft-capped or scaled logits that our head would skip, a wrong shift
    gradient  a batch of one trained token on rank 0 alone; what DeepSpeed stored must be that token's gradient, once:
              finds an averaging factor that is not the number of ranks

All ranks run both (every forward pass gathers in lockstep) and all raise when one of them finds a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_dist.algorithms.logprobs import plain_logprobs
from grpo_dist.errors import SelfCheckError
from grpo_dist.learner.model import Packed
from grpo_dist.types import MicroBatch

if TYPE_CHECKING:
    from grpo_dist.learner.zero3 import Zero3Policy

# Largest difference of a log-probability. Half precision: three bf16 forward passes of one model differ by some 1e-2.
PACKING_LIMIT = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
GRADIENT_LIMIT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}  # relative


def run(policy: Zero3Policy) -> dict[str, float]:
    """Raises SelfCheckError naming the check that failed; returns the measured differences."""
    found = {"packing": packing_difference(policy), "gradient": gradient_error(policy)}
    dtype = policy.spec.model.dtype
    limits = {"packing": PACKING_LIMIT[dtype], "gradient": GRADIENT_LIMIT[dtype]}
    worst = torch.tensor([found[name] for name in limits], dtype=torch.float64).nan_to_num(nan=torch.inf)
    on_device = worst.to(policy.device)
    torch.distributed.all_reduce(on_device, op=torch.distributed.ReduceOp.MAX)
    for (name, limit), value in zip(limits.items(), on_device.tolist(), strict=True):
        if not value <= limit:
            raise SelfCheckError(
                f"start-up self-check '{name}' failed: {_MEANING[name]} differ by {value:.3g}, allowed {limit:g}"
            )
    return dict(zip(limits, on_device.tolist(), strict=True))


_MEANING = {
    "packing": "log-probabilities of packed sequences and of each sequence alone (from the model's plain logits)",
    "gradient": "the gradient of one token and what DeepSpeed accumulated for it (relative)",
}


@torch.no_grad()
def packing_difference(policy: Zero3Policy) -> float:
    """max |packed, through our head - one by one, from plain logits| over all predicted tokens."""
    vocabulary = policy.engine.module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in (7, 2, 12)]
    packed = Packed.of(_micro(sequences), policy.device)
    ours = policy.logprobs_with_gradient(packed)
    alone = []
    for ids in sequences:
        one = Packed.of(_micro([ids]), policy.device)
        logits = policy.plain_logits(one)
        alone.append(plain_logprobs(logits, one.token_ids, one.segment_lengths, policy.spec.temperature)[0])
    return float((ours.double() - torch.cat(alone)).abs().max())


def gradient_error(policy: Zero3Policy) -> float:
    """|stored - expected| / |expected| of the smallest parameter's gradient, one token trained, on rank 0 alone."""
    parameter = policy.smallest_parameter()
    seen: list[Tensor] = []
    # Sees this rank's own gradient, before DeepSpeed averages anything.
    handle = parameter.register_hook(lambda grad: seen.append(grad.detach().clone()))  # type: ignore[no-untyped-call]
    ids = torch.arange(1, 4)
    micro = _micro([ids], trained=1)
    packed = Packed.of(micro, policy.device)
    try:
        policy.engine.set_gradient_accumulation_boundary(True)
        value = policy.logprobs_with_gradient(packed).sum() * (1.0 if policy.spec.rank == 0 else 0.0)
        # Without DeepSpeed's loss scale: one token's gradient, times 65,536, is more than fp16 holds.
        policy.engine.backward(value * policy.spec.world / policy.loss_scale, scale_wrt_gas=False)
    finally:
        handle.remove()
    stored = policy.full_gradient(parameter).flatten().double()
    policy.engine.optimizer.zero_grad()
    own = torch.stack([g.flatten().double() for g in seen]).sum(0).to(stored.device) / policy.spec.world
    torch.distributed.all_reduce(own)  # the other ranks' are zero
    return float((stored - own).norm() / own.norm())


def _micro(sequences: list[Tensor], trained: int | None = None) -> MicroBatch:
    """Packed sequences; every token but the first of each trains, or only the last ``trained`` of them."""
    masks = []
    for ids in sequences:
        mask = torch.ones(len(ids), dtype=torch.bool)
        mask[0 if trained is None else slice(len(ids) - trained)] = False
        masks.append(mask)
    tokens = torch.cat(sequences)
    blank = torch.zeros(len(tokens)).numpy()
    lengths = torch.tensor([len(s) for s in sequences])
    return MicroBatch(
        token_ids=tokens.numpy(),
        position_ids=torch.cat([torch.arange(len(s)) for s in sequences]).numpy(),
        segment_lengths=lengths.numpy(),
        loss_mask=torch.cat(masks).numpy(),
        behavior_logprobs=blank,
        advantages=blank,
        group_ids=torch.arange(len(sequences)).numpy(),
        sample_indices=torch.zeros_like(lengths).numpy(),
    )
