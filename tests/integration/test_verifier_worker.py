"""The verifier worker as a Ray actor."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import VerifiersSection
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, VerifyItem
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
