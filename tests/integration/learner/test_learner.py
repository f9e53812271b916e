"""The learner against a plain PyTorch loop that packs nothing, shards nothing and writes the formula down directly."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.data.batching import empty_micro_batch
from grpo_dist.errors import SelfCheckError, UserError
from grpo_dist.types import Sample
from tests.integration.learner_probe import Group, samples, with_behavior
from tests.integration.plain_learner import plain_logprobs, plain_model, relative

pytestmark = pytest.mark.ray


# --- the plain way --------------------------------------------------------------------------------------------------


def plain_loss(model: Any, batch: Sequence[Sample]) -> torch.Tensor:
    """-sum over trained tokens of min(ratio A, clip(ratio) A), over their number."""
    total, count = torch.zeros(()), sum(int(s.loss_mask.sum()) for s in batch)
    for s in batch:
        mask = torch.tensor(s.loss_mask)
        ratio = (plain_logprobs(model, s) - torch.tensor(s.behavior_logprobs)).exp()
        advantage = torch.tensor(s.advantages)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total - surrogate[mask].sum() / count
    return total


def plain_gradients(path: Path, batch: Sequence[Sample]) -> dict[str, np.ndarray]:
    model = plain_model(path)
    plain_loss(model, batch).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


# --- groups that never train: their weights stay those of the folder ------------------------------------------------


@pytest.fixture(scope="module")
def sixty_four() -> list[Sample]:
    return samples(64)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_with_nothing_to_do_changes_nothing(groups, tiny_model: Path, world: int) -> None:
    one = samples(1, seed=5)
    batch = groups[world].batch(one)
    assert all(m.is_empty for shard in batch.shards[1:] for m in shard)
    wanted = plain_gradients(tiny_model, one)  # of one sample: fewer sums to average fp32 noise away
    assert relative(groups[world].gradients(batch), wanted) < 2e-6
    idle = (empty_micro_batch(), empty_micro_batch())
    padded = dataclasses.replace(batch, shards=tuple((*s, *idle) for s in batch.shards))
    assert relative(groups[world].gradients(padded), wanted) < 2e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_at_the_sampling_temperature(groups, tiny_model: Path, sixty_four, temperature: float) -> None:
    """Also: packed equals one by one; the plain way takes each sequence alone."""
    group, model = groups[2], plain_model(tiny_model)
    group.same("run", lambda policy: setattr(policy._head, "_temperature", temperature))
    try:
        found = group.logprobs(group.batch(sixty_four, 1000))
    finally:
        group.same("run", lambda policy: setattr(policy._head, "_temperature", 1.0))
    assert len(found) == 64
    with torch.no_grad():
        for s in sixty_four:
            plain = plain_logprobs(model, s, temperature).numpy()[s.loss_mask]
            assert np.abs(found[s.group_id, s.index] - plain).max() < 3e-6


def test_logprobs_do_not_depend_on_the_packing(groups, sixty_four) -> None:
    alone = groups[1].logprobs(groups[1].batch(sixty_four, 1))  # each sample a micro-batch of its own
    for world, tokens in ((1, 4000), (2, 300), (3, 100)):
        found = groups[world].logprobs(groups[world].batch(sixty_four, tokens))
        assert max(float(np.abs(found[k] - alone[k]).max()) for k in alone) < 2e-6


def test_self_checks_pass_and_are_reported(groups) -> None:
    for world, group in groups.items():
        for info in group.info:
            assert info["checks"]["packing"] < 2e-6
            assert info["checks"]["gradient"] < 1e-6
        assert [i["rank"] for i in group.info] == list(range(world))


def test_self_check_finds_a_wrong_gradient_scale(groups) -> None:
    def spoil(policy: Any) -> str:
        right = policy.spec
        policy.spec = dataclasses.replace(right, world=4)  # as if DeepSpeed averaged over fewer ranks than it should
        try:
            policy.self_check()
        except SelfCheckError as error:
            return str(error)
        finally:
            policy.spec = right
        return "not found"

    for message in groups[2].same("run", spoil):
        assert "'gradient' failed" in message
        assert "differ by 1," in message


def test_self_check_finds_attention_that_leaks(groups) -> None:
    def spoil(policy: Any) -> str:
        from torch.nn.functional import scaled_dot_product_attention
        from transformers import AttentionInterface

        from grpo_dist.learner.attention import SEGMENT, segment_attention

        def leaky(module, query, key, value, attention_mask, scaling=None, **_):  # type: ignore[no-untyped-def]
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None

        AttentionInterface.register(SEGMENT, leaky)
        try:
            policy.self_check()
        except SelfCheckError as error:
            return str(error)
        finally:
            AttentionInterface.register(SEGMENT, segment_attention)
        return "not found"

    assert all("'packing' failed" in message for message in groups[2].same("run", spoil))
    assert groups[2].same("run", lambda policy: policy.self_check()["packing"] < 1e-5) == [True, True]


def test_ping_answers_while_a_call_runs(groups) -> None:
    rank = groups[1].ranks[0]
    running = rank.run.remote(lambda policy: time.sleep(3))
    assert ray.get(rank.ping.remote(), timeout=2)["step"] == 0
    ray.get(running)


def test_wrong_calls_say_what_is_wrong(groups, sixty_four) -> None:
    rank = groups[1].ranks[0]
    for call, words in (
        (rank.send.remote(3), "is to be sent, but"),
        (rank.update.remote([]), "at least one micro-batch"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words) as caught:
            ray.get(call)
        assert words in str(pickle.loads(pickle.dumps(caught.value.cause)))


def test_a_missing_model_is_the_users_error(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model at model"):
        Group(tmp_path / "nothing", 1)


# --- groups that train ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def still(ray_cluster: None, tiny_model: Path) -> Iterator[Group]:
    """Learning rate 0, and a reference policy."""
    group = Group(tiny_model, 2, learning_rate=0.0, algorithm={"kl": {"beta": 0.1}})
    yield group
    group.end()


@pytest.fixture(scope="module")
def moving(ray_cluster: None, tiny_model: Path) -> Iterator[Group]:
    group = Group(
        tiny_model, 2, algorithm={"kl": {"beta": 0.1}}, optimizer={"weight_decay": 0.01}, grad_clip=0.5, total_steps=10,
        schedule={"name": "linear", "warmup_steps": 2},
    )  # fmt: skip
    yield group
    group.end()


def test_learning_rate_0_changes_nothing(still: Group, sixty_four) -> None:
    batch = still.batch(with_behavior(sixty_four, still.logprobs(still.batch(sixty_four))), 300)
    before = still.digests()
    for _ in range(3):
        seen = still.update(batch)
        assert seen["train/skipped"] == 0
        assert seen["train/lr"] == 0
        assert seen["train/grad_norm"] > 0
        assert seen["train/kl"] == pytest.approx(0, abs=1e-9)
        assert seen["train/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert seen["train/ratio_min"] == pytest.approx(1, abs=1e-5)
        assert seen["mismatch/logprob_abs_max"] < 1e-5
    assert still.digests() == before


def test_steps_equal_those_of_plain_adamw(moving: Group, tiny_model: Path, sixty_four) -> None:
    """Three steps with clipping, weight decay (not of norms), warm-up and the KL penalty; then the KL is above 0."""
    behaviour = with_behavior(sixty_four, moving.logprobs(moving.batch(sixty_four)))
    batch = moving.batch(behaviour, 300)
    model, reference = plain_model(tiny_model), plain_model(tiny_model)
    norms, matrices = ([p for p in model.parameters() if (p.dim() == 1) is vector] for vector in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.99))
    count = batch.loss_tokens
    for step, rate in ((1, 0.5e-3), (2, 1e-3), (3, 1e-3 * 7 / 8)):
        seen = moving.update(batch)
        kl = torch.zeros(())
        for s in behaviour:
            x = plain_logprobs(reference, s).detach() - plain_logprobs(model, s)
            kl = kl + (x.exp() - 1 - x)[torch.tensor(s.loss_mask)].sum() / count
        loss = plain_loss(model, behaviour) + 0.1 * kl
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert seen["train/lr"] == pytest.approx(rate)
        assert seen["train/loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
        assert seen["train/kl"] == pytest.approx(float(kl.detach()), abs=2e-6)
        assert seen["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4), step
        assert (seen["train/kl"] > 1e-6) is (step > 1)
    moving.same("stage", 3)
    weights = ray.get(moving.ranks[0].staged.remote())
    # Adam's first steps have the size of the rate whatever the gradient, so a gradient near 0 may differ in sign.
    for name, parameter in model.named_parameters():
        difference = np.abs(weights[name] - parameter.detach().numpy())
        assert difference.max() < 5e-5, name
        assert difference.mean() < 1e-6, name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(moving: Group, sixty_four, bad: float) -> None:
    """On one rank only; the next batch trains as if nothing had been."""
    good = moving.batch(sixty_four, 300)
    before = moving.digests()
    first = sixty_four[0]
    spoilt = dataclasses.replace(first, advantages=np.where(first.loss_mask, bad, 0).astype(np.float32))
    seen = moving.update(moving.batch([spoilt, *sixty_four[1:]], 300))
    assert seen["train/skipped"] == 1
    assert "train/grad_norm" not in seen
    assert moving.digests() == before
    seen = moving.update(good)
    assert seen["train/skipped"] == 0
    assert np.isfinite(seen["train/grad_norm"])
    assert moving.digests() != before


def test_a_batch_without_a_trained_token_is_skipped(moving: Group, sixty_four) -> None:
    before = moving.digests()
    nothing = [dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in sixty_four]
    batch = moving.batch(nothing)
    assert (batch.loss_tokens, batch.loss_sequences) == (0, 0)
    assert moving.update(batch)["train/skipped"] == 1
    assert moving.digests() == before


def test_the_reference_stays_what_was_loaded(moving: Group, tiny_model: Path, sixty_four) -> None:
    """After the policy has moved: reference log-probabilities are still those of the folder."""

    def reference(policy: Any) -> np.ndarray:
        from grpo_dist.learner.model import Packed

        packed = Packed.of(shard[0], policy.device)
        return policy._reference_logprobs(packed).numpy()

    shard = moving.batch(sixty_four[:4], 4000).shards[0]
    values = moving.same("run", reference)[0]
    model = plain_model(tiny_model)
    by_key = {(s.group_id, s.index): s for s in sixty_four}
    ends = np.cumsum(shard[0].segment_lengths)
    for i, end in enumerate(ends):
        s = by_key[int(shard[0].group_ids[i]), int(shard[0].sample_indices[i])]
        part = values[end - len(s.token_ids) : end][s.loss_mask]
        assert np.abs(part - plain_logprobs(model, s).detach().numpy()[s.loss_mask]).max() < 3e-6


def test_no_reference_is_loaded_without_kl(groups) -> None:
    assert groups[1].same("run", lambda policy: policy._reference is None) == [True]


def test_half_precision_has_fp32_logprobs(ray_cluster: None, tiny_model: Path, sixty_four) -> None:
    """bf16 model: the head adds only fp32 noise to the model's own bf16 hidden states, not the 1e-2 of a bf16 head."""
    group = Group(tiny_model, 1, dtype="bfloat16")
    shard = group.batch(sixty_four, 4000).shards[0]

    def against_exact(policy: Any) -> tuple[float, float]:
        from grpo_dist.learner.model import Packed, token_logprobs

        packed, kept = Packed.of(shard[0], policy.device), []
        module = policy.engine.module
        handle = module.model.norm.register_forward_hook(lambda _, __, out: kept.append(out[0]))
        with torch.no_grad():
            found = token_logprobs(policy.engine, policy._head, packed)[0]
        handle.remove()
        with policy.gather([module.lm_head.weight]):
            exact = torch.log_softmax(kept[0].double() @ module.lm_head.weight.double().T, -1)
            coarse = torch.log_softmax(kept[0] @ module.lm_head.weight.T, -1).double()
        assert kept[0].dtype == torch.bfloat16
        assert found.dtype == torch.float32
        at = packed.mask.nonzero()[:, 0]
        wanted, rough = (t[at - 1].gather(1, packed.token_ids[at, None])[:, 0] for t in (exact, coarse))
        return float((found[at] - wanted).abs().max()), float((rough - wanted).abs().max())

    try:
        ours, bf16_head = group.same("run", against_exact)[0]
        assert ours < 2e-6
        assert bf16_head > 1e-3
        before = group.digests()
        assert group.update(group.batch(sixty_four, 300))["train/skipped"] == 0
        assert group.digests() != before
    finally:
        group.end()


def test_a_dead_peer_is_an_error_not_a_wait(ray_cluster: None, tiny_model: Path, sixty_four) -> None:
    group = Group(tiny_model, 2, collective_seconds=30)
    try:
        batch = group.batch(sixty_four)
        ray.kill(group.ranks[1])
        call = group.ranks[0].update.remote([batch.of_rank(0)])
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(call, timeout=60)
        pickle.loads(pickle.dumps(caught.value.cause))
    finally:
        group.end()
