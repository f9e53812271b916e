"""Helpers of the engine tests: real rollout workers, a sender in its own process, and Hugging Face as the judge."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from transformers import AutoModelForCausalLM

from grpo_dist.config import ModelSection, RolloutSection
from grpo_dist.rollout.engine import EngineSettings, SamplingSpec
from grpo_dist.rollout.worker import rollout_actor
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, TensorInfo
from grpo_dist.weights.digest import tensor_digest
from grpo_dist.weights.sender import EngineEndpoint, SendReport, WeightSender

HOST = "127.0.0.1"
CONTEXT = 448
State = Mapping[str, torch.Tensor]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """What a publication of this model holds: tied tensors once."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model: Any, seed: int, size: float = 0.5) -> Any:
    """Another policy of the same shape, far enough away that a stale weight shows."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * p.std() * size)
    return other


def hf_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each completion token under a plain forward pass, scaled like a learner does."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].float() / temperature
    scores = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return scores.gather(1, torch.tensor([completion]).T).squeeze(1)


def worst_error(group: RolloutGroup, models: Mapping[int, Any], temperature: float = 1.0) -> float:
    """Largest |engine - Hugging Face| log-probability, each token under the version that its span names."""
    worst = 0.0
    for completion in group.completions:
        assert_covered(completion)
        for version in {s.version for s in completion.versions}:
            wanted = hf_logprobs(models[version], group.prompt.token_ids, completion.token_ids, temperature)
            for span in (s for s in completion.versions if s.version == version):
                came = torch.tensor(completion.logprobs[span.start : span.end])
                worst = max(worst, (wanted[span.start : span.end] - came).abs().max().item())
    return worst


def assert_covered(completion: Completion) -> None:
    edges = [0, *(s.end for s in completion.versions)]
    assert [s.start for s in completion.versions] == edges[:-1]
    assert edges[-1] == len(completion.token_ids) == len(completion.logprobs)


def request(number: int, seed: int, tokens: Sequence[int] = (5, 6, 7)) -> GroupRequest:
    prompt = Prompt(id=f"p{number}", token_ids=(*tokens, 8 + number % 50), text="", answer=None)
    return GroupRequest(group_id=number, epoch=0, prompt=prompt, seed=seed)


def settings(folder: Path, *, ranks: int = 1, **engine: Any) -> EngineSettings:
    rollout = RolloutSection(
        group_size=4, tensor_parallel=ranks, engine={"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 128} | engine
    )
    return EngineSettings(ModelSection(path=str(folder), dtype="float32"), rollout, context_tokens=CONTEXT)


@dataclass(frozen=True)
class Worker:
    """A living engine."""

    name: str
    actor: Any
    info: dict[str, Any]

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(self.name, self.actor, self.info["world_size"], self.info["incarnation"])

    def generate(self, request: GroupRequest, spec: SamplingSpec, n: int = 4) -> RolloutGroup:
        return ray.get(self.actor.generate.remote(request, spec, n), timeout=120)

    def call(self, method: str, *args: Any, seconds: float = 60) -> Any:
        return ray.get(getattr(self.actor, method).remote(*args), timeout=seconds)

    def processes(self, title: str) -> list[psutil.Process]:
        children = psutil.Process(self.info["pid"]).children(recursive=True)
        return [p for p in children if title in " ".join(p.cmdline())]

    def end(self) -> None:
        ray.kill(self.actor)


def start_workers(wanted: Mapping[str, EngineSettings]) -> dict[str, Worker]:
    actors = {name: rollout_actor(num_cpus=1).remote(name, s) for name, s in wanted.items()}
    infos = dict(zip(actors, ray.get([a.ready.remote() for a in actors.values()], timeout=280), strict=True))
    return {name: Worker(name, actor, infos[name]) for name, actor in actors.items()}


class Staged:
    """Staged weights whose ``tensors`` calls ``at[name]`` just before the tensor of that name is sent."""

    def __init__(self, state: State, at: Mapping[str, Callable[[], object]] | None = None) -> None:
        hooks = at or {}

        class Tensors(dict[str, torch.Tensor]):
            def __getitem__(self, name: str) -> torch.Tensor:
                if name in hooks:
                    hooks[name]()
                return super().__getitem__(name)

        self.tensors: dict[str, torch.Tensor] = Tensors(state)
        self.infos = tuple(
            TensorInfo(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()
        )
        self._digests = {name: tensor_digest(t) for name, t in state.items()}

    def digest(self, name: str) -> str:
        return self._digests[name]


@ray.remote
class SenderProbe:
    """Stands for learner rank 0: the real sender, in a process that is neither the test nor an engine."""

    def __init__(self, send_seconds: float = 60.0, connect_seconds: float = 60.0) -> None:
        self.sender = WeightSender("gloo", connect_seconds=connect_seconds, send_seconds=send_seconds)

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> int:
        return self.sender.connect(endpoints, HOST)

    def send(self, state: State, version: int, verify: bool = True) -> SendReport:
        return self.sender.send(Staged(state), version, verify=verify)

    def send_and_signal(self, state: State, version: int, at: str, pid: int, number: int) -> SendReport:
        """Send, and give process ``pid`` a signal just before tensor ``at`` goes out."""
        return self.sender.send(Staged(state, {at: lambda: os.kill(pid, number)}), version)

    def send_wrong_bytes(self, state: State, version: int, name: str) -> SendReport:
        staged = Staged(state)
        staged.tensors[name] = staged.tensors[name] + 1
        return self.sender.send(staged, version)


def publish(sender: Any, workers: Sequence[Worker], model: Any, version: int) -> SendReport:
    """Pause, send, resume: what the publisher does, in a straight line."""
    for worker in workers:
        worker.call("pause")
    report = ray.get(sender.send.remote(state_of(model), version), timeout=90)
    for worker in workers:
        worker.call("resume")
    return report
