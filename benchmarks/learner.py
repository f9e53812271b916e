"""The learner against the plain way of doing the same, in one run; prints ratios. `python benchmarks/learner.py`

    update    ZeRO-3 on one rank / a bare PyTorch loop with the same model, packing, head, loss, clipping and AdamW
    packing   packed micro-batches / sequences padded to the longest of their micro-batch, long-tailed lengths
    logprobs  chunked head / log_softmax of a [tokens, vocabulary] tensor: peak memory and time, V 49,152, H 576

Left out: generation and publication (benchmarks/rollout.py, benchmarks/publication.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from grpo_dist.algorithms.logprobs import completion_logprobs
from grpo_dist.algorithms.objective import LossInputs, policy_loss
from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection
from grpo_dist.data.batching import build_batch
from grpo_dist.learner.model import Packed, load_model, replace_head, token_logprobs
from grpo_dist.learner.spec import LearnerSpec
from grpo_dist.types import Sample

SIZES = {  # name: (hidden, layers, vocabulary, samples, median length)
    "toy": (96, 3, 64, 512, 12),
    "small": (384, 6, 8192, 48, 120),
}


def build_model(folder: Path, hidden: int, layers: int, vocab: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 96), head_dim=32,
        max_position_embeddings=2048, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def long_tailed(count: int, median: int, vocab: int, longest: int = 1024) -> list[Sample]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        n = int(np.clip(rng.lognormal(np.log(median), 1.0), 4, longest))
        mask = np.arange(n) >= max(1, n // 4)
        out.append(
            Sample(
                group_id=i // 8,
                index=i % 8,
                token_ids=rng.integers(1, vocab, n),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -np.log(vocab), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            )
        )
    return out


def alternate(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Median seconds of each; taken in turns, so a busy neighbour hits all. The first round is not counted."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, kept in zip(functions, seconds, strict=True):
            started = time.perf_counter()
            function()
            if turn:
                kept.append(time.perf_counter() - started)
    return [statistics.median(s) for s in seconds]


class BareLoop:
    """The same mathematics without DeepSpeed."""

    def __init__(self, section: ModelSection, learner: LearnerSection) -> None:
        self.model = load_model(section, torch.device("cpu")).train()
        self.head = replace_head(self.model, 1.0, learner.logprob_chunk_tokens)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learner.learning_rate, betas=(0.9, 0.99))
        self.clip = learner.grad_clip

    def update(self, micro: Sequence[Any], *, loss_tokens: int, loss_sequences: int) -> float:
        algorithm = AlgorithmSection()
        for batch in micro:
            packed = Packed.of(batch, torch.device("cpu"))
            logprobs, entropy = token_logprobs(self.model, self.head, packed)
            inputs = LossInputs(
                logprobs=logprobs, advantages=packed.advantages, mask=packed.mask, segment_ids=packed.segment_ids,
                behavior_logprobs=packed.behavior_logprobs, entropy=entropy.detach(),
            )  # fmt: skip
            loss, _ = policy_loss(inputs, algorithm, loss_tokens=loss_tokens, loss_sequences=loss_sequences)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class PaddedLoop(BareLoop):
    """As most loops do it: micro-batches of as many samples, each padded to its longest, logits of every position."""

    def __init__(self, section: ModelSection, learner: LearnerSection) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(section.path, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learner.learning_rate, betas=(0.9, 0.99))
        self.clip = learner.grad_clip

    def update_samples(self, samples: Sequence[Sample], per_micro: int) -> None:
        tokens = sum(int(s.loss_mask.sum()) for s in samples)
        for start in range(0, len(samples), per_micro):
            part = samples[start : start + per_micro]
            longest = max(len(s.token_ids) for s in part)
            ids, mask, attend = (torch.zeros(len(part), longest, dtype=torch.int64) for _ in range(3))
            behavior, advantages = (torch.zeros(len(part), longest) for _ in range(2))
            for row, s in enumerate(part):
                n = len(s.token_ids)
                ids[row, :n], mask[row, :n], attend[row, :n] = map(
                    torch.tensor, (s.token_ids, s.loss_mask, np.ones(n, int))
                )
                behavior[row, :n], advantages[row, :n] = map(torch.tensor, (s.behavior_logprobs, s.advantages))
            logits = self.model(input_ids=ids, attention_mask=attend, use_cache=False).logits[:, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[..., 0]
            ratio = (logp - behavior[:, 1:]).exp()
            surrogate = torch.minimum(ratio * advantages[:, 1:], ratio.clamp(0.8, 1.2) * advantages[:, 1:])
            (-(surrogate * mask[:, 1:]).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bench_update(size: str, repeats: int) -> dict[str, float]:
    """Own process: one ZeRO-3 rank and the bare loops in turns."""
    from grpo_dist.learner.zero3 import Zero3Policy

    hidden, layers, vocab, count, median = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        path = build_model(Path(folder) / "model", hidden, layers, vocab)
        section = ModelSection(path=str(path), dtype="float32")
        learner = LearnerSection(ranks=1, micro_batch_tokens=4096)
        spec = LearnerSpec(
            section, AlgorithmSection(), learner, 0, 1, "127.0.0.1", free_port(), 1.0, 1000, 0, collective_seconds=60
        )
        bare, padded = _before_deepspeed(section, learner)
        policy = Zero3Policy(spec)
        samples = long_tailed(count, median, vocab)
        batch = build_batch(samples, ranks=1, micro_batch_tokens=learner.micro_batch_tokens)
        counts = {"loss_tokens": batch.loss_tokens, "loss_sequences": batch.loss_sequences}
        ours, plain, pad = alternate(
            repeats,
            lambda: policy.update([batch.of_rank(0)]),
            lambda: bare.update(batch.shards[0], **counts),
            lambda: padded.update_samples(samples, 8),
        )
    tokens = sum(len(s.token_ids) for s in samples)
    return {
        "parameters": sum(p.numel() for p in bare.model.parameters()),
        "tokens": tokens,
        "zero3_tokens_per_second": tokens / ours,
        "bare_tokens_per_second": tokens / plain,
        "padded_tokens_per_second": tokens / pad,
        "zero3_over_bare": plain / ours,
        "zero3_over_padded": pad / ours,
    }


def _before_deepspeed(section: ModelSection, learner: LearnerSection) -> tuple[BareLoop, PaddedLoop]:
    """A model that is built while a DeepSpeed config is alive would be sharded."""
    return BareLoop(section, learner), PaddedLoop(section, learner)


def bench_logprobs(way: str, repeats: int) -> dict[str, float]:
    """Forward and backward with both gradients: seconds of both ways in turns, or peak memory of one way alone."""
    torch.manual_seed(0)
    tokens, width, vocab = 2048, 576, 49_152
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocab, width) / width**0.5).requires_grad_()
    ids, mask = torch.randint(vocab, (tokens,)), torch.arange(tokens) > 0
    lengths = torch.tensor([tokens])

    def plain() -> torch.Tensor:
        logp = torch.log_softmax(hidden[:-1] @ weight.T, -1)
        return logp.gather(1, ids[1:, None]).sum()

    def chunked() -> torch.Tensor:
        return completion_logprobs(hidden, weight, ids, lengths, mask, need_entropy=False)[0].sum()

    def run(function: Callable[[], torch.Tensor]) -> None:
        function().backward()
        hidden.grad = weight.grad = None

    if way == "both":
        ours, naive = alternate(repeats, lambda: run(chunked), lambda: run(plain))
        return {"chunked": ours, "plain": naive}
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = _status("VmRSS")
    run({"plain": plain, "chunked": chunked}[way])
    return {"peak_mib": (_status("VmHWM") - before) / 2**20}


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def in_own_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        logging.disable(logging.WARNING)
        kind, name = options.part
        found = (bench_update if kind == "update" else bench_logprobs)(name, options.repeats)
        print(json.dumps(found), flush=True)
        os._exit(0)  # DeepSpeed's process group sometimes aborts while the interpreter ends
    results: dict[str, Any] = {}
    for size in SIZES:
        r = results[size] = in_own_process("update", size, "--repeats", str(options.repeats))
        tell(f"update, {size} ({r['parameters'] / 1e6:.1f}M parameters, {r['tokens']:.0f} tokens a step), tokens/s")
        tell(f"  ZeRO-3, one rank      {r['zero3_tokens_per_second']:9.0f}")
        tell(f"  bare PyTorch loop     {r['bare_tokens_per_second']:9.0f}   ratio {r['zero3_over_bare']:.2f}")
        tell(f"  padded, full logits   {r['padded_tokens_per_second']:9.0f}   ratio {r['zero3_over_padded']:.2f}")
    seconds = in_own_process("logprobs", "both", "--repeats", "3")
    peak = {way: in_own_process("logprobs", way)["peak_mib"] for way in ("chunked", "plain")}
    tell("log-probabilities, forward and backward, 2,048 tokens, V 49,152, H 576, fp32; memory above the inputs")
    tell(f"  chunked      {seconds['chunked']:6.2f} s  {peak['chunked']:6.0f} MiB")
    tell(f"  log_softmax  {seconds['plain']:6.2f} s  {peak['plain']:6.0f} MiB")
    results["logprobs"] = {way: {"seconds": seconds[way], "peak_mib": peak[way]} for way in peak}
    tell(f"  ratio        {seconds['chunked'] / seconds['plain']:6.2f}    {peak['chunked'] / peak['plain']:6.2f}")
    print(json.dumps({"benchmark": "learner", **results}))


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
