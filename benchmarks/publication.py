"""A publication against a bare Gloo broadcast of the same bytes, in turns, in one run.

    python -m benchmarks.publication [--megabytes 64] [--engines 1] [--rounds 5]

A publication here is all that the loop waits for: pause, start, receive, load into the engine's packed layers, finish,
digests on both sides compared, resume. The bare broadcast moves the same tensors between two plain processes that do
nothing with them, one call per tensor, and once more as a single tensor.
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
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.rollout import build_model
from grpo_dist.config import ModelSection, RolloutSection
from grpo_dist.rollout.engine import EngineSettings
from grpo_dist.rollout.worker import rollout_actor
from grpo_dist.types import TensorInfo
from grpo_dist.weights.sender import EngineEndpoint, WeightSender
from grpo_dist.weights.source import StagedWeights

HOST = "127.0.0.1"
LAYERS = 8


def hidden_for(megabytes: int) -> int:
    """Hidden size of an 8-layer model of about this many fp32 megabytes."""
    parameters = megabytes * 1e6 / 4
    return max(64, round((parameters / (LAYERS * 9)) ** 0.5 / 64) * 64)


def load_state(folder: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@ray.remote
class Sender:
    """Stands for learner rank 0."""

    def __init__(self, folder: str) -> None:
        self.state = load_state(folder)
        self.infos = tuple(TensorInfo(n, "float32", tuple(t.shape)) for n, t in self.state.items())
        self.sender = WeightSender("gloo")

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        self.sender.connect(endpoints, HOST)

    def send(self, version: int, verify: bool) -> float:
        """Seconds of the send alone. A fresh value each time, so that the digests are computed each time."""
        return self.sender.send(StagedWeights(version, self.infos, self.state), version, verify=verify).seconds


@ray.remote
class Peer:
    """One end of a bare broadcast."""

    def __init__(self, folder: str) -> None:
        self.tensors = list(load_state(folder).values())
        self.flat = torch.cat([t.reshape(-1) for t in self.tensors])

    def port(self) -> int:
        from torch.distributed import TCPStore

        self.store = TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def join(self, rank: int, world: int, port: int) -> None:
        from torch.distributed import TCPStore

        from grpo_dist.weights.gloo import GlooGroup

        store = self.store if rank == 0 else TCPStore(HOST, port, None, is_master=False)
        self.group = GlooGroup(store, rank, world, HOST, 120.0)

    def broadcast(self, flat: bool) -> float:
        began = time.monotonic()
        for tensor in [self.flat] if flat else self.tensors:
            self.group.broadcast(tensor).wait()
        return time.monotonic() - began


def measure(megabytes: int, engines: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(build_model(Path(temporary) / "model", hidden_for(megabytes), LAYERS, context=64))
        rollout = RolloutSection(engine={"kv_cache_memory_bytes": 32 << 20})
        settings = EngineSettings(ModelSection(path=folder, dtype="float32"), rollout, context_tokens=64)
        workers = {f"rollout-{i}": rollout_actor(num_cpus=1).remote(f"rollout-{i}", settings) for i in range(engines)}
        sender = Sender.options(num_cpus=1).remote(folder)  # type: ignore[attr-defined]
        peers = [Peer.options(num_cpus=1).remote(folder) for _ in range(engines + 1)]  # type: ignore[attr-defined]
        ray.get([w.ready.remote() for w in workers.values()])
        ray.get(sender.connect.remote([EngineEndpoint(name, w) for name, w in workers.items()]))
        port = ray.get(peers[0].port.remote())
        ray.get([p.join.remote(rank, len(peers), port) for rank, p in enumerate(peers)])
        size = sum(t.numel() * t.element_size() for t in load_state(folder).values())
        seconds = _rounds(list(workers.values()), sender, peers, rounds)
    rate = {name: size / s / 1e9 for name, s in seconds.items()}
    return {
        "benchmark": "publication",
        "bytes": size,
        "engines": engines,
        "rounds": rounds,
        "seconds": {name: round(s, 4) for name, s in seconds.items()},
        "gigabytes_per_second": {name: round(r, 3) for name, r in rate.items()},
        "ratio_whole_to_bare": round(seconds["publication"] / seconds["bare"], 2),
        "ratio_send_to_bare": round(seconds["send"] / seconds["bare"], 2),
        "ratio_unverified_send_to_bare": round(seconds["send_unverified"] / seconds["bare"], 2),
    }


def _rounds(workers: Sequence[Any], sender: Any, peers: Sequence[Any], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {k: [] for k in ("publication", "send", "send_unverified", "bare", "bare_flat")}
    version = 0
    for number in range(rounds + 1):  # the first round warms up
        for verify in (True, False):
            version += 1
            began = time.monotonic()
            ray.get([w.pause.remote() for w in workers])
            sent = ray.get(sender.send.remote(version, verify))
            ray.get([w.resume.remote() for w in workers])
            if number and verify:
                taken["publication"].append(time.monotonic() - began)
            if number:
                taken["send" if verify else "send_unverified"].append(sent)
        for flat in (False, True):
            spent = max(ray.get([p.broadcast.remote(flat) for p in peers]))
            if number:
                taken["bare_flat" if flat else "bare"].append(spent)
    return {name: statistics.median(values) for name, values in taken.items()}


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['bytes'] / 1e6:,.1f} MB to {result['engines']} engine(s)")
    for column in ("", "seconds", "GB/s", "x bare"):
        table.add_column(column, justify="right")
    labels = {
        "bare_flat": "bare Gloo broadcast, one tensor",
        "bare": "bare Gloo broadcast, tensor by tensor",
        "send_unverified": "send, without digests",
        "send": "send, digests compared",
        "publication": "whole publication (pause … resume)",
    }
    for name, label in labels.items():
        seconds, rate = result["seconds"][name], result["gigabytes_per_second"][name]
        table.add_row(label, f"{seconds:.3f}", f"{rate:.2f}", f"{seconds / result['seconds']['bare']:.2f}")
    Console(stderr=True).print(table)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("megabytes", 64), ("engines", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    try:
        result = measure(**vars(options))
    finally:
        ray.shutdown()
    print(json.dumps(result))
    show(result)
    return result


if __name__ == "__main__":
    main()
