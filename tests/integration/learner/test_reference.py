"""The reference policy that follows the policy: over one to three ranks, in fp32 and bf16, whole and sharded parameters.

That its state survives a checkpoint, at any number of ranks, is held by test_checkpoint_learner.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from grpo_dist.types import Sample
from tests.integration.learner_probe import SHARDED, Group, fresh, samples, weights, with_behavior
from tests.integration.plain_learner import plain_logprobs, plain_model

pytestmark = pytest.mark.ray

# DeepSpeed keeps small parameters whole on every rank by default, and all of this model's are small.
KINDS: dict[str, dict[str, Any]] = {"sharded": SHARDED, "whole": {}}


@pytest.fixture(scope="module", params=[1, 2, 3])
def group(request: pytest.FixtureRequest, groups: dict[int, Group]) -> Group:
    return groups[request.param]


@pytest.fixture(scope="module")
def on_policy(group: Group) -> list[Sample]:
    raw = samples(12)
    return with_behavior(raw, group.logprobs(group.batch(raw, 200)))


def follow(
    group: Group, on_policy: list[Sample], steps: int, *, kl: dict[str, Any], **keys: Any
) -> list[dict[str, Any]]:
    """After each step, and before the first: log-probabilities of both policies, weights of both; on rank 0."""
    batch = group.batch(on_policy, 2000)

    def look(policy: Any) -> dict[str, Any]:
        micro = batch.shards[policy.spec.rank][0]
        from grpo_dist.learner.model import Packed

        seen = {
            "policy": policy.logprobs([micro])[0],
            "reference": policy._reference_logprobs(Packed.of(micro, policy.device)).numpy(),
            "weights": weights(policy),
            "reference_weights": {},
        }
        for name, p in policy._reference.engine.module.named_parameters():
            with policy.gather([p]):
                seen["reference_weights"][name] = p.detach().float().numpy().copy()
        return seen

    def run(policy: Any) -> list[dict[str, Any]]:
        made = fresh(policy, algorithm={"kl": {"beta": 0.1} | kl}, learning_rate=3e-3, **keys)
        out = [look(made)]
        for _ in range(steps):
            made.update([batch.of_rank(made.spec.rank)])
            out.append(look(made))
        return out

    return group.same("run", run)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_refresh_both_policies_say_the_same(group: Group, on_policy: list[Sample], kind: str) -> None:
    seen = follow(group, on_policy, 4, kl={"reference": "refresh", "refresh_every": 2}, deepspeed=KINDS[kind])
    assert np.array_equal(seen[0]["reference"], seen[0]["policy"])
    for step in (1, 3):  # as two steps ago, or as loaded
        assert np.array_equal(seen[step]["reference"], seen[step - 1]["reference"])
        assert np.abs(seen[step]["reference"] - seen[step]["policy"]).max() > 1e-3
    for step in (2, 4):
        assert np.array_equal(seen[step]["reference"], seen[step]["policy"])
        assert np.abs(seen[step]["reference"] - seen[step - 1]["reference"]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_moving_average_is_the_mixture_by_hand(
    group: Group, on_policy: list[Sample], tiny_model: Path, kind: str
) -> None:
    """And forward passes use it: its log-probabilities are those of a plain model with the mixture's weights."""
    seen = follow(group, on_policy, 4, kl={"reference": "ema", "ema": 0.25, "refresh_every": 2}, deepspeed=KINDS[kind])
    w = [s["weights"] for s in seen]
    mixture = {name: 0.75 * (0.75 * w[0][name] + 0.25 * w[2][name]) + 0.25 * w[4][name] for name in w[0]}
    for name, wanted in mixture.items():
        assert np.abs(seen[4]["reference_weights"][name] - wanted).max() < 3e-7, name  # an ulp or two
    model = plain_model(tiny_model)
    for name, p in model.named_parameters():
        p.data.copy_(p.new_tensor(mixture[name]))
    shard = group.batch(on_policy, 2000).shards[0][0]
    by_key = {(s.group_id, s.index): s for s in on_policy}
    ends = np.cumsum(shard.segment_lengths)
    for i, end in enumerate(ends):
        s = by_key[int(shard.group_ids[i]), int(shard.sample_indices[i])]
        part = seen[4]["reference"][end - len(s.token_ids) : end][s.loss_mask]
        assert np.abs(part - plain_logprobs(model, s).detach().numpy()[s.loss_mask]).max() < 3e-6


def test_a_small_share_is_not_lost_in_bfloat16(group: Group, on_policy: list[Sample]) -> None:
    """The average is kept in fp32: by hand from the bf16 weights of every step, far below what bf16 could show."""

    def run(policy: Any) -> float:
        kl = {"beta": 0.1, "reference": "ema", "ema": 1e-3}
        made = fresh(policy, algorithm={"kl": kl}, dtype="bfloat16", learning_rate=1e-2)
        shards = dict(made.engine.module.named_parameters())
        wanted = {n: p.ds_tensor.double() for n, p in shards.items()}
        first = {n: t.clone() for n, t in wanted.items()}
        for _ in range(3):
            made.update([batch.of_rank(made.spec.rank)])
            wanted = {n: 0.999 * t + 0.001 * shards[n].ds_tensor.double() for n, t in wanted.items()}
        exact = made._reference._exact
        assert all(str(t.dtype) == "torch.float32" for t in exact.values())
        sizes = {n: int(min(p.ds_numel - made.spec.rank * len(first[n]), len(first[n]))) for n, p in shards.items()}
        moved = sum(float((wanted[n] - first[n])[: sizes[n]].abs().sum()) for n in wanted)
        off = sum(float((wanted[n] - exact[n].double())[: sizes[n]].abs().sum()) for n in wanted)
        assert moved > 0
        return off / moved

    batch = group.batch(on_policy, 2000)
    assert max(group.same("run", run)) < 1e-2  # fp32's rounding of steps of 1e-5


def test_a_reference_that_would_not_be_used_is_the_users_error(group: Group) -> None:
    """Shards in memory of which forward passes use another copy: refused, not ignored."""

    def attempt(policy: Any) -> str:
        from grpo_dist.errors import UserError
        from grpo_dist.learner.reference import _refuse_other_copies

        parameter = next(policy.engine.module.parameters())
        _refuse_other_copies("this", parameter)  # as it is: fine
        parameter.ds_secondary_tensor = parameter.ds_tensor
        try:
            _refuse_other_copies("this", parameter)
        except UserError as error:
            return str(error)
        finally:
            parameter.ds_secondary_tensor = None
        return "not refused"

    assert all("zero_hpz_partition_size" in text for text in group.same("run", attempt))


def test_no_reference_is_loaded_at_beta_0(group: Group) -> None:
    def run(policy: Any) -> bool:
        made = fresh(policy, algorithm={"kl": {"beta": 0, "reference": "ema", "ema": 0.5}})
        return made._reference is None

    assert all(group.same("run", run))
    assert ray.get(group.ranks[0].ping.remote())["step"] == 0
