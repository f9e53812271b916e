"""A rollout worker against a bare AsyncLLM: the same requests, seeds and engine settings, in turns, in one run.

    python -m benchmarks.rollout [--groups 32] [--samples 16] [--tokens 64] [--hidden 128] [--rounds 5]

The bare engine generates inside its own process and counts tokens, nothing else. The worker's groups come from this
process through Ray, one call each, and go back as token ids, log-probabilities, text and version spans: all that the
loop needs. Both engines live at the same time but run in turns; the ratio is of the median rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import ray
from rich.console import Console
from rich.table import Table

from grpo_dist.config import ModelSection, RolloutSection
from grpo_dist.quickstart.policy import WarmUp, character_tokenizer, random_policy
from grpo_dist.rollout.engine import EngineSettings, SamplingSpec
from grpo_dist.rollout.seeds import group_seed
from grpo_dist.rollout.worker import rollout_actor
from grpo_dist.types import GroupRequest, Prompt


def build_model(folder: Path, hidden: int, layers: int, context: int) -> Path:
    """A random policy of the quickstart's kind; what it says does not matter here."""
    size = WarmUp(
        hidden=hidden, layers=layers, heads=hidden // 32, kv_heads=max(1, hidden // 64), mlp=2 * hidden, context=context
    )
    random_policy(size).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def build_requests(groups: int, samples: int) -> list[GroupRequest]:
    made = []
    for i in range(groups):
        prompt = Prompt(id=f"row-{i}", token_ids=(1, 3 + i % 10, 14, 3 + i // 10 % 10), text="", answer=None)
        made.append(GroupRequest(i, 0, prompt, group_seed(0, 0, prompt.id, samples)))
    return made


@ray.remote
class BareEngine:
    """AsyncLLM as its authors document it, started with the arguments of the worker's engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings

    async def ready(self) -> None:
        os.environ.update(self.settings.environment())
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.settings.arguments()))

    async def run(self, requests: Sequence[GroupRequest], tokens: int, samples: int) -> tuple[int, float]:
        import asyncio

        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async def one(request: GroupRequest) -> int:
            params = SamplingParams(
                n=samples, seed=request.seed, max_tokens=tokens, logprobs=0, detokenize=False,
                ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            count, prompt = 0, {"type": "token", "prompt_token_ids": list(request.prompt.token_ids)}
            async for output in self.llm.generate(prompt, params, f"{request.group_id}-{time.monotonic_ns()}"):
                count = sum(len(o.token_ids) for o in output.outputs)
            return count

        began = time.monotonic()
        counts = await asyncio.gather(*(one(r) for r in requests))
        return sum(counts), time.monotonic() - began


def run_worker(worker: Any, requests: Sequence[GroupRequest], spec: SamplingSpec, samples: int) -> tuple[int, float]:
    began = time.monotonic()
    groups = ray.get([worker.generate.remote(r, spec, samples) for r in requests])
    seconds = time.monotonic() - began
    return sum(len(c.token_ids) for g in groups for c in g.completions), seconds


def measure(groups: int, samples: int, tokens: int, hidden: int, layers: int, rounds: int) -> dict[str, Any]:
    context = tokens + 16
    with tempfile.TemporaryDirectory() as folder:
        path = build_model(Path(folder) / "model", hidden, layers, context)
        rollout = RolloutSection(group_size=samples)
        settings = EngineSettings(ModelSection(path=str(path), dtype="float32"), rollout, context_tokens=context)
        worker, bare = rollout_actor(num_cpus=1).remote("rollout-0", settings), BareEngine.remote(settings)  # type: ignore[attr-defined]
        ray.get([worker.ready.remote(), bare.ready.remote()])
        requests, spec = build_requests(groups, samples), SamplingSpec(max_tokens=tokens, ignore_eos=True)
        rates: dict[str, list[float]] = {"worker": [], "bare": []}
        total = 0
        for number in range(rounds + 1):  # the first round warms both up
            for name in ("bare", "worker") if number % 2 else ("worker", "bare"):
                if name == "worker":
                    total, seconds = run_worker(worker, requests, spec, samples)
                else:
                    total, seconds = ray.get(bare.run.remote(requests, tokens, samples))
                assert total == groups * samples * tokens
                if number:
                    rates[name].append(total / seconds)
        ray.kill(worker)
        ray.kill(bare)
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "benchmark": "rollout",
        "groups": groups,
        "samples": samples,
        "tokens_per_sample": tokens,
        "hidden": hidden,
        "layers": layers,
        "rounds": rounds,
        "worker_tokens_per_second": round(median["worker"], 1),
        "bare_tokens_per_second": round(median["bare"], 1),
        "ratio": round(median["worker"] / median["bare"], 3),
        "ratio_by_round": [round(w / b, 3) for w, b in zip(rates["worker"], rates["bare"], strict=True)],
    }


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['groups']} groups x {result['samples']} samples x {result['tokens_per_sample']} tokens"
    )
    for column in ("", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    table.add_row("bare AsyncLLM", f"{result['bare_tokens_per_second']:,.0f}", "1")
    table.add_row("RolloutWorker", f"{result['worker_tokens_per_second']:,.0f}", f"{result['ratio']:.3f}")
    Console(stderr=True).print(table)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("groups", 32),
        ("samples", 16),
        ("tokens", 64),
        ("hidden", 128),
        ("layers", 2),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        result = measure(**vars(options))
    finally:
        ray.shutdown()
    print(json.dumps(result))
    show(result)
    return result


if __name__ == "__main__":
    main()
