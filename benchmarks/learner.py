"""The learner against the plain way of doing the same, in one run; prints ratios.

    python -m benchmarks.learner [--only update|packing|logprobs] [--rounds 5]

    update    ZeRO-3 on one rank / a bare PyTorch loop with the same model, packing, head, loss, clipping and AdamW
    packing   packed micro-batches / sequences padded to the longest of their micro-batch, long-tailed lengths; and how
              even the tokens are over 8 ranks
    logprobs  chunked head / log_softmax of a [tokens, vocabulary] tensor: peak memory, time and error, V 49,152, H 576

Both sides of a ratio take turns in one process. Time is the processor time of that process, with one thread: on a
machine that is otherwise idle it is the time on the clock, and on a busy one it hardly counts the neighbours. Shown
are the ratio of the medians, and the range over the rounds.

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
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from grpo_dist.algorithms.logprobs import completion_logprobs, plain_logprobs
from grpo_dist.algorithms.objective import LossInputs, policy_loss
from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection
from grpo_dist.data.batching import build_batch
from grpo_dist.learner.model import Packed, load_model, replace_head, token_logprobs
from grpo_dist.learner.spec import LearnerSpec
from grpo_dist.types import Sample

SIZES = {  # name: (hidden, layers, vocabulary, samples, median length)
    "toy": (96, 3, 64, 512, 12),
    "small": (384, 6, 8192, 24, 120),
    "packing": (256, 4, 4096, 64, 120),
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


def long_tailed(count: int, median: int, vocab: int) -> list[Sample]:
    """Lengths are the quantiles of a log-normal distribution (sigma 1), cut at 12 medians, in a fixed random order.

    Quantiles, because the sum of a few dozen draws is luck. Twelve medians: a limit of 8,192 tokens for answers of
    1,100 on average. A quarter of each sequence is prompt.
    """
    rng, normal = np.random.default_rng(0), statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = np.clip(median * np.exp(rng.permutation(quantiles)), 4, 12 * median).astype(int)
    out = []
    for i, n in enumerate(lengths):
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


def in_turns(rounds: int, **ways: Callable[[], object]) -> dict[str, list[float]]:
    """Processor seconds of each in each round. The first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            started = time.process_time()
            way()
            if turn:
                seconds[name].append(time.process_time() - started)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Of the medians, and the range of the rounds' own ratios."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    return {"ratio": statistics.median(above) / statistics.median(below), "lowest": min(each), "highest": max(each)}


MICRO_BATCH_TOKENS = 4096
PADDED_SAMPLES = 8  # of a padded micro-batch


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


def bench_update(size: str, rounds: int) -> dict[str, Any]:
    """Own process: one ZeRO-3 rank, and in turns with it the bare loop (for "packing", the padded one)."""
    from grpo_dist.learner.zero3 import Zero3Policy

    # As the rank's actor does: DeepSpeed calls names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    hidden, layers, vocab, count, median = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        path = build_model(Path(folder) / "model", hidden, layers, vocab)
        section = ModelSection(path=str(path), dtype="float32")
        learner = LearnerSection(ranks=1, micro_batch_tokens=MICRO_BATCH_TOKENS)
        spec = LearnerSpec(
            section, AlgorithmSection(), learner, 0, 1, "127.0.0.1", free_port(), 1.0, 1000, 0, collective_seconds=60
        )
        bare, padded = _before_deepspeed(section, learner)
        policy = Zero3Policy(spec)
        samples = long_tailed(count, median, vocab)
        batch = build_batch(samples, ranks=1, micro_batch_tokens=MICRO_BATCH_TOKENS)
        counts = {"loss_tokens": batch.loss_tokens, "loss_sequences": batch.loss_sequences}
        ways: dict[str, Callable[[], object]] = {
            "bare": lambda: bare.update(batch.shards[0], **counts),
            "padded": lambda: padded.update_samples(samples, PADDED_SAMPLES),
        }
        other = "padded" if size == "packing" else "bare"
        seconds = in_turns(rounds, zero3=lambda: policy.update([batch.of_rank(0)]), **{other: ways[other]})
    lengths = [len(s.token_ids) for s in samples]
    slots = sum(PADDED_SAMPLES * max(lengths[i : i + PADDED_SAMPLES]) for i in range(0, count, PADDED_SAMPLES))
    return {
        "parameters": sum(p.numel() for p in bare.model.parameters()),
        "tokens": sum(lengths),
        "padded_tokens": slots,
        "tokens_per_second": {name: sum(lengths) / statistics.median(s) for name, s in seconds.items()},
        f"zero3_over_{other}": ratio(seconds[other], seconds["zero3"]),
    }


def imbalance(ranks: int = 8, draws: int = 20) -> float:
    """Tokens of the fullest rank, summed over the micro-batches that all wait for, over an even share: the worst of
    some draws. 512 samples, log-normal, 1,098 tokens on average, limit 8,192, budget 16,384."""
    worst = 0.0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        samples = []
        for i, n in enumerate(np.clip(rng.lognormal(np.log(666), 1.0, 512), 4, 8192).astype(int)):
            values = np.zeros(n, np.float32)
            samples.append(Sample(0, i, np.ones(n, np.int64), np.arange(n) > 0, values, values))
        shards = build_batch(samples, ranks=ranks, micro_batch_tokens=16_384).shards
        turns = [max(len(micro.token_ids) for micro in turn) for turn in zip(*shards, strict=True)]
        worst = max(worst, sum(turns) * ranks / sum(len(s.token_ids) for s in samples))
    return worst


def _before_deepspeed(section: ModelSection, learner: LearnerSection) -> tuple[BareLoop, PaddedLoop]:
    """A model that is built while a DeepSpeed config is alive would be sharded."""
    return BareLoop(section, learner), PaddedLoop(section, learner)


def bench_logprobs(way: str, rounds: int) -> dict[str, Any]:
    """Forward and backward with both gradients: seconds of both ways in turns, errors, or peak memory of one way."""
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

    if way == "seconds":
        return in_turns(rounds, chunked=lambda: run(chunked), plain=lambda: run(plain))
    if way == "errors":
        return {
            dtype: _error(hidden[:256], weight, ids[:256], getattr(torch, dtype)) for dtype in ("float32", "bfloat16")
        }
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = _status("VmRSS")
    run({"plain": plain, "chunked": chunked}[way])
    return {"peak_mib": (_status("VmHWM") - before) / 2**20}


@torch.no_grad()
def _error(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest difference to the log-probabilities of the same (rounded) inputs in fp64."""
    hidden, weight, lengths = hidden.to(dtype), weight.to(dtype), torch.tensor([len(ids)])
    found = completion_logprobs(hidden, weight, ids, lengths, torch.arange(len(ids)) > 0, need_entropy=False)[0]
    exact = plain_logprobs(hidden.double() @ weight.double().T, ids, lengths)[0]
    return float((found - exact).abs().max())


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def in_own_process(kind: str, name: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.learner", "--part", kind, name, "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def report_update(rounds: int) -> dict[str, Any]:
    results = {}
    for size in ("toy", "small"):
        r = results[size] = in_own_process("update", size, rounds)
        tell(f"update, {size} ({r['parameters'] / 1e6:.1f}M parameters, {r['tokens']:,} tokens a step)")
        tell(f"  ZeRO-3, one rank   {r['tokens_per_second']['zero3']:9,.0f} tokens/s")
        tell(f"  bare PyTorch loop  {r['tokens_per_second']['bare']:9,.0f} tokens/s")
        tell(f"  ratio              {shown(r['zero3_over_bare'])}")
    return results


def report_packing(rounds: int) -> dict[str, Any]:
    r = in_own_process("update", "packing", rounds)
    r["imbalance_of_8_ranks"] = imbalance()
    tell(f"packing ({r['parameters'] / 1e6:.1f}M parameters, {r['tokens']:,} tokens, padded {r['padded_tokens']:,})")
    tell(f"  packed, ZeRO-3     {r['tokens_per_second']['zero3']:9,.0f} tokens/s")
    tell(f"  padded             {r['tokens_per_second']['padded']:9,.0f} tokens/s")
    tell(f"  ratio              {shown(r['zero3_over_padded'])}")
    tell(f"  fullest of 8 ranks over an even share, worst of 20 draws: {r['imbalance_of_8_ranks']:.4f}")
    return r


def report_logprobs(rounds: int) -> dict[str, Any]:
    seconds = in_own_process("logprobs", "seconds", rounds)
    peak = {way: in_own_process("logprobs", way, 1)["peak_mib"] for way in ("chunked", "plain")}
    errors, times = in_own_process("logprobs", "errors", 1), ratio(seconds["chunked"], seconds["plain"])
    tell("log-probabilities, forward and backward, 2,048 tokens, V 49,152, H 576, fp32; memory above the inputs")
    for way in ("chunked", "plain"):
        tell(f"  {way:<11} {statistics.median(seconds[way]):6.2f} s  {peak[way]:6.0f} MiB")
    tell(f"  ratio       {shown(times)} of the time, {peak['chunked'] / peak['plain']:.2f} of the memory")
    tell(f"  largest error against fp64: fp32 {errors['float32']:.1e}, bf16 {errors['bfloat16']:.1e}")
    return {"seconds": seconds, "time": times, "peak_mib": peak, "errors": errors}


def shown(r: dict[str, float]) -> str:
    return f"{r['ratio']:.2f} ({r['lowest']:.2f} to {r['highest']:.2f})"


PARTS = {"update": report_update, "packing": report_packing, "logprobs": report_logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(PARTS))
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        logging.disable(logging.WARNING)
        kind, name = options.part
        found = (bench_update if kind == "update" else bench_logprobs)(name, options.rounds)
        print(json.dumps(found), flush=True)
        os._exit(0)  # DeepSpeed's process group sometimes aborts while the interpreter ends
    wanted = [options.only] if options.only else list(PARTS)
    print(json.dumps({"benchmark": "learner"} | {part: PARTS[part](options.rounds) for part in wanted}))


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
