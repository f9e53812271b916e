"""The verifier worker as a Ray actor."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import Recipe, VerifiersSection, VerifierUse
from grpo_dist.errors import RecipeError, WorkerLost
from grpo_dist.fleet.cluster import Cluster
from grpo_dist.fleet.fleet import Fleet
from grpo_dist.fleet.pool import Pool
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, Verdict, VerifyItem
from grpo_dist.verifiers.pool import VerifierPool
from grpo_dist.verifiers.reward_model import RewardModelOptions, reward_models
from grpo_dist.verifiers.reward_scorer import RewardBatcher, local_rewards
from grpo_dist.verifiers.worker import VerifierWorker
from tests.conftest import tiny_recipe

pytestmark = pytest.mark.ray


@pytest.fixture
def worker(ray_cluster: None) -> Any:
    import ray

    section = VerifiersSection.model_validate({"use": [{"name": "math"}], "timeout": 30})
    actor = ray.remote(num_cpus=0.5)(VerifierWorker).remote(section)
    yield actor
    ray.kill(actor)


def group(number: int, texts: list[str]) -> RolloutGroup:
    prompt = Prompt(f"p{number}", (1,), "2+2=", 4)
    completions = tuple(Completion((1, 2), (0.0, 0.0), text, "stop", ()) for text in texts)
    return RolloutGroup(GroupRequest(number, 0, prompt, 0), completions, 0.1, "engine")


def test_scores_groups_together_and_leaves_nothing(worker: Any) -> None:
    """The actor is asynchronous, where math-verify itself would raise: its work is in children (a1)."""
    import ray

    ready = ray.get(worker.ready.remote(), timeout=60)
    assert ready["verifiers"] == ["math"]
    calls = [worker.score_group.remote(group(i, ["4", "5", r"\boxed{\sqrt{16}}", ""])) for i in range(8)]
    scored: list[ScoredGroup] = ray.get(calls, timeout=60)
    for number, one in enumerate(scored):
        assert one.group_id == number
        assert [verdict.reward for verdict in one.verdicts] == [1.0, 0.0, 1.0, 0.0]
    counts = ray.get(worker.counts.remote(), timeout=60)
    assert counts["verdicts"] == 32
    children = list(counts["children"])
    os.kill(ray.get(worker.ping.remote(), timeout=60), signal.SIGKILL)
    assert asyncio.run(_gone(children))


def test_stop(worker: Any) -> None:
    import ray

    item = VerifyItem("x", "?", "4", "stop", 4)
    assert [verdict.reward for verdict in ray.get(worker.score.remote([item]), timeout=60)] == [1.0]
    children = list(ray.get(worker.counts.remote(), timeout=60)["children"])
    ray.get(worker.stop.remote(), timeout=60)
    assert asyncio.run(_gone(children))


async def _gone(pids: list[int]) -> bool:
    assert pids
    for _ in range(200):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def classifier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def expected(classifier: Path, texts: list[str]) -> list[float]:
    """One text at a time, by plain transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    with torch.inference_mode():
        return [
            float(torch.sigmoid(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0]))
            for text in texts
        ]


def test_reward_model_without_ray(classifier: Path) -> None:
    """As `score` and `replay` do it: one copy in this process, and the same pool."""

    async def score() -> list[Verdict]:
        use = VerifierUse.model_validate(
            {"name": "reward_model", "path": str(classifier), "max_tokens": 20, "batch": 2}
        )
        audit = use.model_copy(update={"audit": 0.5, "label": "watch"})
        pool, rewards = VerifierPool([use, audit], timeout=10), local_rewards([use, audit])
        texts = ["4", "5", "4" * 30, "\ud800", "x" * 1_000_000]
        try:
            return await pool.score(
                await rewards.attach([VerifyItem("x", "2+2=", text, "stop", None) for text in texts])
            )
        finally:
            await pool.close()

    verdicts = asyncio.run(score())
    rewards = [verdict.reward for verdict in verdicts[:2]]
    assert rewards == pytest.approx(expected(classifier, ["2+2=4", "2+2=5"]), abs=1e-5)
    assert [verdict.reward for verdict in verdicts[2:]] == [None, pytest.approx(0.5, abs=0.5), None]
    assert "34 tokens, more than the reward model's 20" in (verdicts[2].error or "")
    with pytest.raises(RecipeError, match="used twice with different batch"):
        reward_models([VerifierUse.model_validate({"name": "reward_model", "path": "p", "batch": n}) for n in (1, 2)])


def test_calls_that_wait_share_forward_passes(classifier: Path) -> None:
    async def score() -> tuple[list[list[Any]], list[int]]:
        batcher = RewardBatcher(RewardModelOptions(path=str(classifier), batch=4))
        await batcher.load()
        assert batcher._scorer is not None
        sizes: list[int] = []
        plain = batcher._scorer.score
        batcher._scorer.score = lambda texts: sizes.append(len(texts)) or plain(texts)  # type: ignore[method-assign, func-returns-value]
        return await asyncio.gather(*(batcher.score([f"{i}+{j}=" for j in range(8)]) for i in range(9))), sizes

    said, sizes = asyncio.run(score())
    texts = [f"{i}+{j}=" for i in range(9) for j in range(8)]
    flat = [1 / (1 + math.exp(-value)) for one in said for value in one]
    assert flat == pytest.approx(expected(classifier, texts), abs=1e-5)
    assert sum(sizes) == len(texts)
    assert max(sizes) <= 64
    assert len(sizes) <= 3


def test_lost_scorers_are_replaced_and_every_sample_has_one_verdict(
    ray_cluster: None, classifier: Path, tmp_path: Path
) -> None:
    """kill -9 of a verifier actor, of a child and of a reward model while groups are scored."""
    slow = tmp_path / "slow.sh"
    slow.write_text("sleep 0.1\necho true\n")
    recipe = Recipe.model_validate(
        tiny_recipe(
            verifiers={
                "workers": 2, "children": 2, "reward_model": {"placement": {"cpus": 0.25}},
                "use": [{"name": f"command:/bin/sh {slow}", "label": "slow"},
                        {"name": "reward_model", "path": str(classifier), "weight": 0.5, "max_tokens": 20}],
            },
            faults={"restarts": 2},
        )
    )  # fmt: skip
    seen: list[tuple[str, str]] = []
    texts = ["4", "5", "6", "7" * 30]
    wanted = [1 + 0.5 * value for value in expected(classifier, [f"2+2={text}" for text in texts[:3]])]

    def event(kind: str, **keys: Any) -> None:
        seen.append((kind, keys.get("worker", keys.get("text", ""))))

    async def score(fleet: Fleet, seconds: float, disturb: Callable[[], Awaitable[None]]) -> None:
        calls = [asyncio.ensure_future(fleet.score(group(number, texts))) for number in range(12)]
        await asyncio.sleep(seconds)
        await disturb()
        for number, scored in enumerate(await asyncio.gather(*calls)):
            assert scored.group_id == number
            assert [verdict.reward for verdict in scored.verdicts[:3]] == pytest.approx(wanted, abs=1e-5)
            assert len(scored.verdicts) == 4
            assert scored.verdicts[3].reward is None
            assert "more than the reward model's 20" in (scored.verdicts[3].error or "")

    async def body() -> None:
        fleet = await Fleet.start(
            recipe, "none", Cluster("", started_here=False), event=event, tell=print, roles=frozenset({"verifier"})
        )
        pool = fleet.scoring.verifiers.pool
        reward = next(iter(fleet.scoring._rewards.values())).pool
        everyone: list[int] = []

        async def children(name: str) -> list[int]:
            async with asyncio.timeout(60):  # a child is forked when there is something to judge
                while not (pids := (await pool.members[name].call("counts", seconds=30))["children"]):
                    await asyncio.sleep(0.05)
            return list(pids)

        async def kill_verifier_and_child() -> None:
            first, second = pool.members
            everyone.extend([*await children(first), *(victims := await children(second))])
            os.kill(pool.members[first].info["pid"], signal.SIGKILL)
            os.kill(victims[0], signal.SIGKILL)

        async def kill_reward_model() -> None:
            os.kill(next(iter(reward.members.values())).info["pid"], signal.SIGKILL)

        async def size(of: Pool, wanted: int) -> None:
            async with asyncio.timeout(60):
                while len(of) < wanted:
                    await asyncio.sleep(0.1)

        try:
            await score(fleet, 0.4, kill_verifier_and_child)
            await size(pool, 2)
            assert list(pool.members) == ["verifier-1", "verifier-2"]
            await score(fleet, 0.0, kill_reward_model)
            await size(reward, 1)
            assert list(reward.members) == ["reward-0-1"]
            assert fleet.scoring.restarts.count == 2
            for name in pool.members:
                everyone.extend(await children(name))
            os.kill(next(iter(reward.members.values())).info["pid"], signal.SIGKILL)
            with pytest.raises(WorkerLost, match=r"faults.restarts = 2 replacements are used up"):
                await fleet.score(group(0, texts))
        finally:
            await fleet.end()
        assert await _gone(everyone)

    asyncio.run(body())
    assert [kind for kind, _ in seen if kind.endswith("_lost")] == ["verifier_lost", "reward_lost", "reward_lost"]
    assert sorted(worker for kind, worker in seen if kind.endswith("_started")) == [
        "reward-0-0", "reward-0-1", "verifier-0", "verifier-1", "verifier-2",
    ]  # fmt: skip
