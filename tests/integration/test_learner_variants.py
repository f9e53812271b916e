"""The learner's options: several updates per batch, half precision. Two ranks, many policies in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.config import LearnerSection, Recipe
from grpo_dist.data.minibatches import build_batches
from grpo_dist.errors import UserError
from grpo_dist.metrics import merge_stats, stat_values
from grpo_dist.plan.memory import learner_memory
from grpo_dist.plan.shapes import shape_of_folder
from grpo_dist.types import Sample, TrainBatch
from tests.conftest import tiny_recipe
from tests.integration.learner_probe import Group, fresh, furthest, samples, weights, with_behavior
from tests.integration.plain_learner import plain_logprobs, plain_model, relative

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def group(ray_cluster: None, tiny_model: Path) -> Iterator[Group]:
    made = Group(tiny_model, 2)
    yield made
    made.end()


@pytest.fixture(scope="module")
def on_policy(group: Group) -> list[Sample]:
    """Sampled, as it were, by the policy of the folder: the first ratio is 1."""
    raw = samples(24)
    return with_behavior(raw, group.logprobs(group.batch(raw, 200)))


def train(
    group: Group, steps: list[list[TrainBatch]], **keys: Any
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Statistics of each step and the weights afterwards, of a fresh policy with ``keys``."""

    def run(policy: Any) -> tuple[list[Any], dict[str, np.ndarray] | None]:
        made = fresh(policy, **keys)
        stats = [made.update([b.of_rank(made.spec.rank) for b in step]) for step in steps]
        return stats, weights(made)

    answers = group.same("run", run)
    merged = [stat_values(merge_stats(parts)) for parts in zip(*(a[0] for a in answers), strict=True)]
    return merged, answers[0][1]


def test_several_updates_are_single_ones_in_turn(group: Group, on_policy: list[Sample]) -> None:
    first, second = group.batch(on_policy[:12], 100), group.batch(on_policy[12:], 100)
    (together,), found = train(group, [[first, second]], learning_rate=3e-3)
    (one, two), wanted = train(group, [[first], [second]], learning_rate=3e-3)
    assert furthest(found, wanted) == 0
    assert together["train/loss"] == pytest.approx((one["train/loss"] + two["train/loss"]) / 2, abs=1e-7)
    assert together["train/grad_norm"] == max(one["train/grad_norm"], two["train/grad_norm"])
    assert together["train/ratio_max"] == two["train/ratio_max"] > 1.001
    assert together["mismatch/logprob_abs_max"] < 1e-5  # of the first update: the second's policy has moved
    assert together["train/lr"] == pytest.approx(3e-3)


def bare_loop(
    path: Path, parts: list[list[Sample]], rates: list[float]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """(weights before, weights after, share of tokens clipped) of SGD, an update per part, the clip written down."""
    model = plain_model(path)
    before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    clipped, tokens = 0, 0
    for part, rate in zip(parts, rates, strict=True):
        model.zero_grad()
        count = sum(int(s.loss_mask.sum()) for s in part)
        for s in part:
            on = torch.tensor(s.loss_mask)
            ratio = (plain_logprobs(model, s) - torch.tensor(s.behavior_logprobs))[on].exp()
            advantage = torch.tensor(s.advantages)[on]
            inside, cut = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
            (-torch.minimum(inside, cut).sum() / count).backward()
            clipped += int((cut < inside).sum())
        tokens += count
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    return before, {name: p.detach().numpy() for name, p in model.named_parameters()}, clipped / tokens


def test_minibatches_and_epochs_are_a_bare_loop_of_sgd(group: Group, on_policy: list[Sample], tiny_model: Path) -> None:
    """Two passes of two mini-batches: four updates, the rate rising in each, far enough for the clip to act."""
    keys: dict[str, Any] = {"learning_rate": 0.5, "grad_clip": 0.0, "schedule": {"warmup_steps": 1}}
    section = LearnerSection(updates_per_batch=2, epochs=2, micro_batch_tokens=100)
    batches = build_batches(on_policy, section, ranks=2, seed=(0, 1))
    ids = [{int(g) for shard in b.shards for m in shard for g in m.group_ids} for b in batches]
    assert ids[:2] == [{0, 1, 2}, {3, 4, 5}]
    parts = [[s for s in on_policy if s.group_id in part] for part in ids]
    start, wanted, clipped = bare_loop(tiny_model, parts, [0.125, 0.25, 0.375, 0.5])
    (seen,), found = train(group, [list(batches)], sgd=True, **keys)
    moved = [{name: after[name] - start[name] for name in start} for after in (found, wanted)]
    assert relative(*moved) < 1e-5
    assert seen["train/clip_fraction"] == pytest.approx(clipped, abs=1e-6)
    assert clipped > 0.01
    assert seen["train/ratio_max"] > 1.2
    assert (seen["train/updates"], seen["train/skipped"], seen["train/lr"]) == (4, 0, 0.5)


def test_a_skipped_update_among_others_leaves_no_trace(group: Group, on_policy: list[Sample]) -> None:
    good, other = group.batch(on_policy[:12], 100), group.batch(on_policy[12:], 100)
    bad = group.batch([dataclasses.replace(s, advantages=s.advantages * np.float32("nan")) for s in on_policy], 100)
    (without,), wanted = train(group, [[good, other]])
    (seen,), found = train(group, [[good, bad, other]])
    assert furthest(found, wanted) == 0
    assert (seen["train/updates"], seen["train/skipped"], seen["train/skipped_in_a_row"]) == (2, 1, 1)
    clock = {"train/update_seconds", "train/skipped", "train/skipped_in_a_row"}
    assert {k: v for k, v in seen.items() if k not in clock} == {k: v for k, v in without.items() if k not in clock}
    rows, found = train(group, [[bad, bad], [bad, good, bad], [other]])
    assert furthest(found, wanted) == 0
    assert [row["train/skipped"] for row in rows] == [2, 2, 0]
    assert [row["train/skipped_in_a_row"] for row in rows] == [2, 3, 0]  # the longest row that reaches into the step


def test_the_clip_acts_from_the_second_update_on(group: Group, on_policy: list[Sample]) -> None:
    batch = group.batch(on_policy, 200)
    (seen,), _ = train(group, [[batch]], learning_rate=1e-2)
    assert seen["train/clip_fraction"] == 0
    (seen,), _ = train(group, [[batch] * 4], learning_rate=1e-2)
    assert seen["train/clip_fraction"] > 0.05


def test_old_logprobs_of_the_learner_are_those_before_the_step(group: Group, on_policy: list[Sample]) -> None:
    """Engine's values replaced by nonsense: with old_logprobs 'learner' the updates are those of an honest engine."""
    honest, nonsense = group.batch(on_policy, 200), group.batch(samples(24, behavior=-1.0), 200)
    (wanted,), honestly = train(group, [[honest] * 3], learning_rate=1e-2)
    (seen,), found = train(group, [[nonsense] * 3], learning_rate=1e-2, algorithm={"old_logprobs": "learner"})
    assert furthest(found, honestly) == 0
    for name in ("train/loss", "train/clip_fraction", "train/ratio_max"):
        assert seen[name] == pytest.approx(wanted[name], abs=1e-6)
    assert seen["mismatch/logprob_abs_mean"] > 1  # measured against the engine, and before the first update


def test_bfloat16_follows_fp32(group: Group, on_policy: list[Sample]) -> None:
    """Losses near those of fp32, gradients summed in fp32, no step skipped; a NaN is."""
    batch = group.batch(on_policy, 100)
    wanted, _ = train(group, [[batch]] * 3)
    seen, before = train(group, [[batch]] * 3, dtype="bfloat16")
    for ours, theirs in zip(seen, wanted, strict=True):
        assert ours["train/skipped"] == 0
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=0.02)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.05)
    bad = group.batch([dataclasses.replace(s, advantages=s.advantages * np.float32("nan")) for s in on_policy], 100)
    (*_, last), after = train(group, [*[[batch]] * 3, [bad]], dtype="bfloat16")
    assert last["train/skipped"] == 1
    assert furthest(after, before) == 0


def held_bytes(made: Any) -> dict[str, int]:
    """What this rank really holds, by part; storages are counted once."""
    optimizer, seen = made.engine.optimizer, set()

    def total(tensors: Iterable[Any]) -> int:
        found = 0
        for tensor in tensors:
            if tensor is not None and (place := tensor.untyped_storage().data_ptr()) not in seen:
                seen.add(place)
                found += tensor.untyped_storage().nbytes()
        return found

    masters = optimizer.fp32_partitioned_groups_flat
    moments = [v for state in optimizer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    return {
        "weights": total(p.ds_tensor for p in made.engine.module.parameters()),
        "master weights": total(masters),
        "Adam": total(v for v in moments if v.numel() > 1),  # not the step counters
        "gradients": total([optimizer.grad_partitions_flat_buffer, *(m.grad for m in masters)]),
    }


@pytest.mark.parametrize(("dtype", "offload"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_rank_holds_what_plan_says(
    group: Group, on_policy: list[Sample], tiny_model: Path, dtype: str, offload: bool
) -> None:
    """`grpo-dist plan` against the tensors of real ranks, after an update."""
    recipe = Recipe.model_validate(
        tiny_recipe(model={"dtype": dtype}, learner={"ranks": 2, "zero": {"offload_optimizer": offload}})
    )
    planned = learner_memory(recipe, shape_of_folder(tiny_model))
    batch = group.batch(on_policy, 200)

    def run(policy: Any) -> dict[str, int]:
        made = fresh(policy, dtype=dtype, zero={"offload_optimizer": offload})
        made.update([batch.of_rank(made.spec.rank)])
        return held_bytes(made)

    for found in group.same("run", run):
        expected = {name: (planned.host | planned.device)[name] for name in found}
        assert found == {name: pytest.approx(size, rel=0.01) for name, size in expected.items()}  # shards are padded


def test_a_dtype_the_device_lacks_is_the_users_error(group: Group) -> None:
    def attempt(policy: Any) -> str:
        try:
            fresh(policy, dtype="float16").self_check()
        except UserError as error:
            return str(error)
        return "float16 works here"

    for answer in group.same("run", attempt):
        assert answer.startswith(("model.dtype float16 is not supported on this cpu", "float16 works here"))


def test_self_checks_hold_in_bfloat16(group: Group) -> None:
    found = group.same("run", lambda policy: fresh(policy, dtype="bfloat16").self_check())
    assert all(set(f) == {"packing", "gradient"} for f in found)


def test_shares_survive_the_trip_to_the_actor(group: Group, on_policy: list[Sample]) -> None:
    """``update`` of the actor itself, last in this file: it moves the group's own policy."""
    seen = group.step([group.batch(on_policy, 200)] * 2)
    assert (seen["train/skipped"], seen["train/updates"]) == (0, 2)
    assert ray.get(group.ranks[0].ping.remote())["step"] == 1
