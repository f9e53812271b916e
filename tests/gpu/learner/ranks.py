"""Learner ranks as plain processes, one GPU each: no Ray and no vLLM, so that a bare GPU machine can run these tests.

    run_ranks(world, model, job)  ->  per rank: process sees one GPU -> Zero3Policy -> job(policy) -> result by file

``job`` is a function of a module (it is pickled by name). A process that does not end in time is killed and its peers
with it: NCCL alone would wait for ever.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from grpo_dist.types import Sample

BACKEND: Literal["gloo", "nccl"] = "nccl"
LIMIT_SECONDS = 240
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # tiny parameters would never be sharded


def needs(gpus: int) -> pytest.MarkDecorator:
    """Skips where fewer GPUs are visible, and says so."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < gpus, reason=f"needs {gpus} CUDA GPU(s), {found} visible")


def samples(count: int, *, seed: int = 0, longest: int = 40, vocab: int = 60) -> list[Sample]:
    """Sequences of mixed length with random advantages, as if a policy near the uniform one had sampled them."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(5, longest))
        mask = np.arange(n) >= int(rng.integers(1, 4))
        out.append(
            Sample(
                group_id=i // 4,
                index=i % 4,
                token_ids=rng.integers(4, vocab, n),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -3.5 + rng.normal(0, 0.3, n), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            )
        )
    return out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(world: int, model: Path, folder: Path, job: Callable[[Any], Any], **keys: Any) -> list[Any]:
    """What ``job`` returned on each rank. ``keys``: of the learner section, and ``dtype`` of the model."""
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world, port, model, folder, job, keys)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + LIMIT_SECONDS
    try:
        while any(p.is_alive() for p in processes):
            failed = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
            assert not failed, f"rank {failed[0]} of {world} ended with status {processes[failed[0]].exitcode}"
            assert time.monotonic() < until, f"{world} ranks took longer than {LIMIT_SECONDS} s"
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(world)]


def _rank(
    rank: int, world: int, port: int, model: Path, folder: Path, job: Callable[[Any], Any], keys: dict[str, Any]
) -> None:
    if BACKEND == "nccl":  # before anything touches CUDA: each rank sees its own GPU only, as under Ray
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if visible != [""] else str(rank)
    from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection
    from grpo_dist.learner.spec import LearnerSpec
    from grpo_dist.learner.zero3 import Zero3Policy

    dtype = keys.pop("dtype", "float32")
    learner = LearnerSection(**({"ranks": world, "learning_rate": 1e-3, "deepspeed": SHARDED} | keys))
    policy = Zero3Policy(
        LearnerSpec(
            model=ModelSection(path=str(model), dtype=dtype), algorithm=AlgorithmSection(), learner=learner, rank=rank,
            world=world, host="127.0.0.1", port=port, temperature=1.0, total_steps=100, seed=0, backend=BACKEND,
            collective_seconds=60,
        )
    )  # fmt: skip
    result = job(policy)
    (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # nobody leaves while another still needs it
    os._exit(0)  # what interpreters do at their end is not what is tested
