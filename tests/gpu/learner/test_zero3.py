"""One ZeRO-3 update over NCCL against a plain PyTorch loop on the CPU: gradients, options, what is staged and saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.data.batching import build_batch
from grpo_dist.metrics import merge_stats, stat_values
from grpo_dist.types import Sample
from tests.gpu.learner.ranks import needs, run_ranks, samples

pytestmark = [pytest.mark.gpu, needs(1), pytest.mark.timeout(600)]

GRADIENT_LIMIT = {"float32": 1e-5, "bfloat16": 5e-2}  # relative, over all parameters


def plain_gradients(path: Path, batch: Sequence[Sample]) -> dict[str, np.ndarray]:
    """min(ratio A, clip(ratio) A) over the trained tokens, one sequence at a time, in fp64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    count = sum(int(s.loss_mask.sum()) for s in batch)
    for s in batch:
        ids, mask, advantages = torch.tensor(s.token_ids), torch.tensor(s.loss_mask), torch.tensor(s.advantages)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        ratio = (logp - torch.tensor(s.behavior_logprobs)[1:]).exp()
        surrogate = torch.minimum(ratio * advantages[1:], ratio.clamp(0.8, 1.2) * advantages[1:])
        (-(surrogate * mask[1:]).sum() / count).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def relative(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    assert found.keys() == wanted.keys()
    difference = sum(((found[n].astype(np.float64) - wanted[n]) ** 2).sum() for n in wanted)
    return float(np.sqrt(difference / sum((wanted[n] ** 2).sum() for n in wanted)))


def gradients(policy: Any) -> list[dict[str, np.ndarray]]:
    """Full gradients by name at three token budgets; nothing is stepped."""
    found = []
    for tokens in (40, 200, 4000):
        batch = build_batch(samples(64), ranks=policy.spec.world, micro_batch_tokens=tokens)
        micro = batch.shards[policy.spec.rank]
        for k, one in enumerate(micro):
            policy.engine.set_gradient_accumulation_boundary(k == len(micro) - 1)
            policy._backward(one, batch.loss_tokens, batch.loss_sequences)
        found.append(
            {n: policy.full_gradient(p).float().cpu().numpy() for n, p in policy.engine.module.named_parameters()}
        )
        policy.engine.optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (1, "float32"),
        (1, "bfloat16"),
        pytest.param(2, "float32", marks=needs(2)),
        pytest.param(2, "bfloat16", marks=needs(2)),
        pytest.param(4, "float32", marks=needs(4)),
    ],
)
def test_gradient_is_that_of_the_plain_loop(world: int, dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    wanted = plain_gradients(tiny_model, samples(64))
    for answer in run_ranks(world, tiny_model, tmp_path, gradients, dtype=dtype):
        for found in answer:
            assert relative(found, wanted) < GRADIENT_LIMIT[dtype]


def life(policy: Any) -> dict[str, Any]:
    """Self-check, twenty updates on one batch, weights staged, state saved and its files counted."""
    checks = policy.self_check()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    batch = build_batch(samples(32), ranks=policy.spec.world, micro_batch_tokens=200)
    losses, norms = [], []
    for _ in range(20):
        values = stat_values(merge_stats([policy.update([batch.of_rank(policy.spec.rank)])]))
        losses.append(values["train/loss"])
        norms.append(values["train/grad_norm"])
    staged = policy.stage(20)
    kept = {i.name: staged.tensors[i.name].float().numpy().copy() for i in staged.infos} if staged else None
    with policy.gather(list(policy.engine.module.parameters())):
        module = {n: p.detach().float().cpu().numpy().copy() for n, p in policy.engine.module.named_parameters()}
    return {
        "checks": checks,
        "losses": losses,
        "norms": norms,
        "staged": kept,
        "module": module,
        "stream": stream is None or torch.cuda.current_stream() == stream,
    }


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, {"dtype": "float32"}),
        (1, {"dtype": "bfloat16"}),
        (1, {"dtype": "bfloat16", "gradient_checkpointing": True, "zero": {"offload_optimizer": True}}),
        pytest.param(2, {"dtype": "bfloat16"}, marks=needs(2)),
        pytest.param(4, {"dtype": "bfloat16"}, marks=needs(4)),
    ],
)
def test_updates_lower_the_loss_and_what_is_staged_is_the_module(
    world: int, keys: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    first, *others = run_ranks(world, tiny_model, tmp_path, life, **keys)
    for answer in (first, *others):
        assert all(np.isfinite(answer["losses"]))
        assert all(norm > 0 for norm in answer["norms"])
        assert answer["norms"] == first["norms"]  # the norm is global
        assert answer["stream"], "a gather or an update left another current stream behind"
    totals = np.sum([answer["losses"] for answer in (first, *others)], axis=0)
    assert totals[-1] < totals[0]
    assert set(first["checks"]) >= {"packing", "gradient"}
    assert first["staged"].keys() == first["module"].keys()
    for name, tensor in first["module"].items():
        assert np.array_equal(first["staged"][name], tensor), name
    assert all(answer["staged"] is None for answer in others)


def save_and_go_on(policy: Any) -> dict[str, Any]:
    """Three updates, a save, two more; and the same two from the save, in a new policy of the same process group."""
    from grpo_dist.learner.zero3 import Zero3Policy

    batch = build_batch(samples(32), ranks=policy.spec.world, micro_batch_tokens=200).of_rank(policy.spec.rank)
    folder = Path(policy.spec.model.path).parent / f"saved-{policy.spec.world}-{policy.spec.model.dtype}"
    for _ in range(3):
        policy.update([batch])
    policy.save(folder)
    going_on = [stat_values(policy.update([batch]))["train/loss"] for _ in range(2)]
    again = Zero3Policy(policy.spec)
    again.load(folder)
    return {"went_on": going_on, "resumed": [stat_values(again.update([batch]))["train/loss"] for _ in range(2)]}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=needs(2))])
def test_a_checkpoint_continues_where_it_was_saved(world: int, tiny_model: Path, tmp_path: Path) -> None:
    for answer in run_ranks(world, tiny_model, tmp_path, save_and_go_on, dtype="bfloat16"):
        assert answer["resumed"] == pytest.approx(answer["went_on"], rel=1e-3)
