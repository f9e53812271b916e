"""The verifier worker as a Ray actor."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import VerifiersSection
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, Verdict, VerifyItem
from grpo_dist.verifiers.worker import VerifierWorker

pytestmark = pytest.mark.ray


@pytest.fixture
def worker(ray_cluster: None) -> Any:
    import ray

    section = VerifiersSection.model_validate({"use": [{"name": "numeric"}], "timeout": 10})
    actor = ray.remote(num_cpus=0.5)(VerifierWorker).remote(section)
    yield actor
    ray.kill(actor)


def group(number: int, texts: list[str]) -> RolloutGroup:
    prompt = Prompt(f"p{number}", (1,), "2+2=", 4)
    completions = tuple(Completion((1, 2), (0.0, 0.0), text, "stop", ()) for text in texts)
    return RolloutGroup(GroupRequest(number, 0, prompt, 0), completions, 0.1, "engine")


def test_scores_groups_together_and_leaves_nothing(worker: Any) -> None:
    import ray

    ready = ray.get(worker.ready.remote(), timeout=60)
    assert ready["verifiers"] == ["numeric"]
    calls = [worker.score_group.remote(group(i, ["4", "5", r"\boxed{4}", ""])) for i in range(8)]
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
    from grpo_dist.config import VerifierUse
    from grpo_dist.verifiers.pool import VerifierPool

    async def score() -> list[Verdict]:
        use = VerifierUse.model_validate({"name": "reward_model", "path": str(classifier)})
        pool = VerifierPool([use], timeout=10)
        try:
            return await pool.score([VerifyItem("x", "2+2=", text, "stop", None) for text in ("4", "5")])
        finally:
            await pool.close()

    verdicts = asyncio.run(score())
    assert [verdict.reward for verdict in verdicts] == pytest.approx(expected(classifier, ["2+2=4", "2+2=5"]), abs=1e-5)
