"""Every objective's gradient, by real ZeRO-3 ranks: the same for any ranks, packing, budget and recomputation, and the
same as a plain PyTorch loop over single sequences in fp64. LoRA likewise, against peft's own model. Each number of ranks
is started once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.algorithms.objective import OBJECTIVES
from grpo_dist.config import AlgorithmSection
from grpo_dist.learner.model import Packed
from grpo_dist.metrics import stat_values
from grpo_dist.types import Sample
from tests.integration import plain_learner
from tests.integration.learner_probe import Group, fresh, furthest, samples, weights
from tests.integration.plain_learner import (
    invented_reference,
    plain_backward,
    plain_gradients,
    plain_model,
    relative,
)

pytestmark = pytest.mark.ray

for module in (sys.modules[__name__], plain_learner):  # ranks run functions of both
    ray.cloudpickle.register_pickle_by_value(module)

# (ranks, tokens per micro-batch, gradient checkpointing): from one sample at a time to everything at once.
SPLITS = ((1, 1, False), (1, 4000, True), (2, 100, True), (2, 4000, False), (3, 60, False), (3, 300, True))

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"objective": name, "old_logprobs": "engine"} for name in OBJECTIVES},
    "clip, sequence divisor, dual, k3": {
        "clip_high": 0.28, "clip_dual": 1.4, "divisor": "sequence", "kl": {"beta": 0.2}, "old_logprobs": "engine",
    },
    "clip, constant divisor, unbiased KL, entropy": {
        "divisor": "constant", "divisor_tokens": 40, "kl": {"beta": 0.2, "estimator": "unbiased"},
        "entropy_bonus": 0.05, "old_logprobs": "engine",
    },
    "clip, KL in the reward": {"kl": {"beta": 0.05, "place": "reward"}, "old_logprobs": "engine"},
    "clip, truncated importance sampling, k2": {
        "correction": {"preset": "tis", "cap": 1.1}, "kl": {"beta": 0.2, "estimator": "k2"},
    },
    "cispo, two-sided mask, k1": {
        "objective": "cispo", "correction": {"mask": "token", "low": 0.7, "high": 1.3},
        "kl": {"beta": 0.2, "estimator": "k1"},
    },
    "gspo, geometric mask, sequence divisor": {
        "objective": "gspo", "correction": {"mask": "geometric", "low": 0.9, "high": 1.1}, "divisor": "sequence",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def batch() -> list[Sample]:
    return samples(32, behavior=-4.35)  # near what the model says: ratios on both sides of 1


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS)
def test_every_objective_has_one_gradient(
    groups: dict[int, Group], tiny_model: Path, batch: list[Sample], keys: dict[str, Any]
) -> None:
    """1e-6 between any two ways to split the work; the distance to fp64 is what fp32 costs, in every split alike."""
    algorithm = AlgorithmSection(**keys)
    if algorithm.objective == "sequence_ratio":  # the error of a product of ratios grows with the completion
        batch = samples(32, behavior=-4.35, longest=8)
    wanted = plain_gradients(tiny_model, batch, algorithm)
    assert np.sqrt(sum((g**2).sum() for g in wanted.values())) > 1e-3
    found: list[dict[str, np.ndarray]] = []
    for world, tokens, recompute in SPLITS:
        shards = groups[world].batch(batch, tokens)

        def gradients(policy: Any, shards: Any = shards, recompute: bool = recompute) -> dict[str, np.ndarray]:
            with as_if(policy, algorithm, recompute):
                return full_gradients(policy, shards)

        found.append(groups[world].same("run", gradients)[0])
        assert relative(found[-1], wanted) < 2e-6, (world, tokens, recompute)
        assert max(relative(found[-1], other) for other in found) < 1e-6, (world, tokens, recompute)


@contextmanager
def as_if(policy: Any, algorithm: AlgorithmSection, recompute: bool) -> Iterator[None]:
    """The policy with another algorithm and an invented reference, with or without gradient checkpointing."""
    spec, module = policy.spec, policy.engine.module
    policy.spec = dataclasses.replace(spec, algorithm=algorithm)
    if algorithm.kl.beta:
        policy._reference_logprobs = lambda packed: invented_reference(packed.token_ids)
    if recompute:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        module.gradient_checkpointing_disable()
        policy.__dict__.pop("_reference_logprobs", None)
        policy.spec = spec


def full_gradients(policy: Any, batch: Any) -> dict[str, np.ndarray]:
    """Of every trained parameter by name, after all micro-batches; nothing is stepped. Collective."""
    shard = batch.shards[policy.spec.rank]
    for k, micro in enumerate(shard):
        policy.engine.set_gradient_accumulation_boundary(k == len(shard) - 1)
        policy._backward(micro, batch.loss_tokens, batch.loss_sequences)
    named = [(n, p) for n, p in policy.engine.module.named_parameters() if p.requires_grad]
    found = {name: policy.full_gradient(p).cpu().numpy().copy() for name, p in named}
    policy.engine.optimizer.zero_grad()
    return found


# --- LoRA, by the same ranks ----------------------------------------------------------------------------------------

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}, "learning_rate": 5e-3}
KL = {"kl": {"beta": 0.1}}


def gathered(policy: Any, wanted: Any = lambda name: True) -> dict[str, np.ndarray]:
    """Full parameters by name, on every rank. Collective."""
    named = [(n, p) for n, p in policy.engine.module.named_parameters() if wanted(n)]
    with policy.gather([p for _, p in named]):
        return {n: p.detach().float().numpy().copy() for n, p in named}


def step(policy: Any, batch: Any) -> dict[str, float]:
    return stat_values(policy.update([batch.of_rank(policy.spec.rank)]))


def peft_gradients(path: Path, batch: list[Sample]) -> dict[str, np.ndarray]:
    """Of peft's own model, one sequence at a time in fp64, with B away from 0 (see ``away_from_zero``)."""
    from peft import LoraConfig, get_peft_model

    keys = AlgorithmSection(old_logprobs="engine")
    model = plain_model(path, torch.float64)
    made = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), autocast_adapter_dtype=False
    )
    for name, p in made.named_parameters():
        if ".lora_" in name:
            p.data = torch.tensor(away_from_zero(name.removeprefix("base_model.model."), tuple(p.shape))).double()
    plain_backward(made, batch, keys)
    return {n.removeprefix("base_model.model."): p.grad.numpy() for n, p in made.named_parameters() if p.requires_grad}


def away_from_zero(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(map(ord, name))).normal(0, 0.1, shape).astype(np.float32)


def test_lora_has_one_gradient(groups: dict[int, Group], tiny_model: Path, batch: list[Sample]) -> None:
    wanted = peft_gradients(tiny_model, batch)
    assert len(wanted) == 2 * 2 * 7
    for world, tokens, recompute in ((1, 4000, False), (2, 100, True), (3, 300, False)):
        made = groups[world].batch(batch, tokens)

        def gradients(policy: Any, made: Any = made, recompute: bool = recompute) -> dict[str, np.ndarray]:
            own = fresh(policy, gradient_checkpointing=recompute, algorithm={"old_logprobs": "engine"}, **LORA)
            trained = {n: p for n, p in own.engine.module.named_parameters() if p.requires_grad}
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(trained.values()), modifier_rank=0):
                for name, p in trained.items():
                    p.data.copy_(torch.tensor(away_from_zero(name, tuple(p.shape))))
            return full_gradients(own, made)

        assert relative(groups[world].same("run", gradients)[0], wanted) < 2e-6, world


def test_lora_trains_adapters_alone_and_its_base_is_the_reference(
    groups: dict[int, Group], tiny_model: Path, batch: list[Sample], tmp_path: Path
) -> None:
    """Two ranks: base untouched, reference exact, publication merged, checkpoint bit for bit, export that loads."""
    group = groups[2]
    data = [group.batch(samples(16, seed=i), 200) for i in range(3)]
    probe = group.batch(batch[:6], 4000)

    def run(policy: Any) -> dict[str, Any]:
        own = fresh(policy, algorithm=KL, **LORA)
        packed = Packed.of(probe.shards[own.spec.rank][0], own.device)
        start, base = own.logprobs(probe.shards[own.spec.rank])[0], gathered(own, lambda n: ".lora_" not in n)
        checks = own.self_check()
        stats = [step(own, b) for b in data[:2]]
        own.save(tmp_path / "000002")
        stats.append(step(own, data[2]))
        staged = own.stage(3)
        own.export(tmp_path / "exported")
        again = fresh(policy, algorithm=KL, **LORA)
        again.load(tmp_path / "000002")
        repeated = step(again, data[2])
        return {
            "checks": checks, "stats": stats, "repeated": repeated, "start": start, "base": base,
            "base after": gathered(own, lambda n: ".lora_" not in n),
            "reference": own._reference_logprobs(packed).numpy(), "policy": own.logprobs(probe.shards[own.spec.rank])[0],
            "adapters": gathered(own, lambda n: ".lora_" in n), "adapters again": gathered(again, lambda n: ".lora_" in n),
            "staged": {n: t.numpy().copy() for n, t in staged.tensors.items()} if staged else {},
            "engines": own._reference._model is own.engine,
        }  # fmt: skip

    answers = group.same("run", run)
    first = answers[0]
    assert all(a["checks"]["gradient"] < 1e-6 and a["checks"]["packing"] < 1e-5 for a in answers)
    assert first["engines"]
    assert [s["train/skipped"] for s in first["stats"]] == [0, 0, 0]
    assert first["stats"][0]["train/kl"] == pytest.approx(0, abs=1e-9)
    assert first["stats"][2]["train/kl"] > 1e-6
    for found in answers:
        assert np.array_equal(found["reference"], found["start"])
        assert np.abs(found["policy"] - found["start"]).max() > 1e-3
    assert furthest(first["base"], first["base after"]) == 0
    assert furthest(first["adapters"], first["adapters again"]) == 0
    assert {k: v for k, v in first["repeated"].items() if "seconds" not in k} == {
        k: v for k, v in first["stats"][2].items() if "seconds" not in k
    }
    saved = sum(f.stat().st_size for f in (tmp_path / "000002").rglob("*") if f.is_file())
    assert saved < 20 * sum(a.size for a in first["adapters"].values()) + 200_000  # adapters and their Adam, no base

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "exported" / "adapter"
    )
    merged = {n: p.detach().numpy() for n, p in adapted.merge_and_unload().named_parameters()}
    assert list(first["staged"]) == list(merged)
    assert furthest(first["staged"], merged) == 0
    assert furthest({n: p.detach().numpy() for n, p in exported.named_parameters()}, merged) == 0

    def with_one_rank(policy: Any) -> dict[str, float]:
        own = fresh(policy, algorithm=KL, **LORA)
        own.load(tmp_path / "000002")
        return step(own, single)

    single = groups[1].batch(samples(16, seed=2), 200)
    alone = groups[1].same("run", with_one_rank)[0]
    assert alone["train/grad_norm"] == pytest.approx(first["stats"][2]["train/grad_norm"], rel=1e-4)


# --- where state lies, and in what precision ------------------------------------------------------------------------


def train(group: Group, data: list[Any], **keys: Any) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Rank 0's statistics of each step and the weights afterwards, of a fresh policy with ``keys``."""

    def run(policy: Any) -> tuple[list[dict[str, float]], dict[str, np.ndarray] | None]:
        own = fresh(policy, **keys)
        return [step(own, b) for b in data], weights(own)

    stats, after = group.same("run", run)[0]
    assert after is not None
    return stats, after


@pytest.mark.parametrize("zero", [{"offload_optimizer": True}, {"offload_optimizer": True, "offload_parameters": True}])
def test_offload_changes_no_bit(groups: dict[int, Group], zero: dict[str, bool]) -> None:
    """Without clipping. With it, the norm is summed in another order: the factor differs in the last digit."""
    data = [groups[2].batch(samples(16, seed=i), 200) for i in range(3)]
    wanted, theirs = train(groups[2], data, grad_clip=0.0)
    seen, ours = train(groups[2], data, grad_clip=0.0, zero=zero)
    assert furthest(ours, theirs) == 0
    assert [s["train/loss"] for s in seen] == [s["train/loss"] for s in wanted]
    wanted, theirs = train(groups[2], data, grad_clip=0.1)
    seen, ours = train(groups[2], data, grad_clip=0.1, zero=zero)
    assert furthest(ours, theirs) < 1e-6
    for a, b in zip(seen, wanted, strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-6)


def allow_float16() -> None:
    """This CPU has no fast fp16, so DeepSpeed refuses it; torch computes it all the same."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def test_float16_finds_its_loss_scale_and_loses_no_batch(groups: dict[int, Group]) -> None:
    """The scale starts far too large: the same batch is tried again at half of it until its gradients fit."""
    data = [groups[2].batch(samples(16, seed=i), 200) for i in range(2)]
    bad = [dataclasses.replace(s, advantages=s.advantages * np.float32("nan")) for s in samples(16, seed=2)]
    spoilt = groups[2].batch(bad, 200)
    wanted, _ = train(groups[2], data)

    def run(policy: Any) -> dict[str, Any]:
        allow_float16()
        own = fresh(policy, dtype="float16")
        checks = own.self_check()
        first = own.loss_scale
        own.engine.optimizer.loss_scaler.cur_scale = 2.0**30
        stats = [step(own, b) for b in data]
        before = weights(own)
        scale = own.loss_scale
        skipped = [step(own, spoilt) for _ in range(2)]
        return {
            "checks": checks, "first": first, "stats": stats, "skipped": skipped, "scale": scale,
            "before": before, "after": weights(own), "last": step(own, data[0]),
        }  # fmt: skip

    answers = groups[2].same("run", run)
    found = answers[0]
    assert found["first"] == 2**16
    assert [s["train/skipped"] for s in found["stats"]] == [0, 0]
    assert found["stats"][0]["train/overflows"] >= 5
    assert found["stats"][0]["train/loss_scale"] == 2.0 ** (30 - found["stats"][0]["train/overflows"])
    assert found["stats"][1]["train/overflows"] <= 1
    for ours, theirs in zip(found["stats"], wanted, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=5e-3)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.02)
    for skipped in found["skipped"]:  # no scale helps a loss that is not finite: given up at once
        assert (skipped["train/skipped"], skipped["train/overflows"]) == (1, 0)
    assert found["skipped"][1]["train/skipped_in_a_row"] == 2
    assert furthest(found["before"], found["after"]) == 0
    assert found["last"]["train/skipped"] == 0
    assert all(a["stats"][0]["train/overflows"] == found["stats"][0]["train/overflows"] for a in answers)
