"""Bytes of a learner rank and of an engine, from recipe and model shape. Formulas and sources: docs/planning.md.

What is counted is what this code allocates: DeepSpeed 0.19.8's ZeRO-3 with torch's AdamW, transformers 5.19's decoder
layers, the chunked head of algorithms/logprobs.py, the staging of weights/source.py. Tests compare the learner's parts
with a real rank, and activations with what autograd really saves. Assumed, not derived: the ``*_OVERHEAD`` constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_dist.config import LoraSection, Recipe
from grpo_dist.plan.batch import rank_share
from grpo_dist.plan.shapes import ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 1 << 30

# Assumed: CUDA context, cuBLAS workspaces, NCCL buffers and what the allocator cannot use.
LEARNER_OVERHEAD = 3 * GIB
ENGINE_OVERHEAD = 3 * GIB  # the same, CUDA graphs, and vLLM's activations of one batch of max_num_batched_tokens
PACKED_BUFFERS = 3 * (512 << 20)  # of a publication, beside vLLM's own share (weights/nccl.py)
MAX_LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
SUB_GROUP = 1_000_000_000  # DeepSpeed's sub_group_size: elements stepped at a time
UTILIZATION = 0.85  # rollout/engine.py's gpu_memory_utilization
MAX_NUM_SEQS = 1024  # vLLM's own default on large GPUs; a recipe that cares says max_num_seqs


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes of one rank by part. ``device`` parts are alive together at the peak; ``host`` is per rank."""

    device: dict[str, int]
    host: dict[str, int]
    staging: int  # host memory of rank 0 alone: one copy of the model

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one GPU of an engine, and what its cache holds."""

    weights: int
    kv_per_token: int  # of one GPU
    budget: int | None  # for the cache; None without a GPU's size
    sequences: int | None  # at the longest length, together; None as above
    limit: int  # max_num_seqs

    @property
    def concurrent(self) -> int | None:
        """Sequences that are generated at the same time when all of them reach the longest length."""
        return None if self.sequences is None else min(self.sequences, self.limit)


def activation_bytes_per_token(shape: ModelShape, size: int) -> int:
    """What one layer saves for its backward pass, for one token, without checkpointing.

    Two RMSNorms save their input in fp32, the normalised and the scaled value; Qwen3's query and key norms likewise;
    attention saves q, k, v and its output (twice); the gated MLP gate, up, silu(gate) and the product.
    """
    norms = 2 * shape.hidden * (4 + 2 * size)
    qk_norms = (4 + size) * (shape.query + shape.key) if shape.qk_norm else 0
    attention = size * (3 * shape.query + 2 * shape.key)
    mlp = 4 * size * shape.mlp
    if shape.experts:  # each chosen expert has its own copy of the token, going in and coming out
        mlp = shape.experts_per_token * (mlp + 2 * size * shape.hidden)
    return norms + qk_norms + attention + mlp


def activation_bytes(shape: ModelShape, size: int, tokens: int, *, checkpointing: bool) -> int:
    """Of one packed forward pass of ``tokens``; with checkpointing each layer's input and one layer at a time."""
    layer = activation_bytes_per_token(shape, size)
    last = (4 + 2 * size) * shape.hidden
    if checkpointing:
        return tokens * (shape.layers * size * shape.hidden + layer + last)
    return tokens * (shape.layers * layer + last)


def head_bytes(shape: ModelShape, size: int, chunk_tokens: int, *, trained: bool = True) -> int:
    """Logits of a chunk (twice, fp32), the head's gradient as an fp32 sum and as it is handed on."""
    return 2 * 4 * chunk_tokens * shape.vocab + ((4 + size) * shape.embedding if trained else 0)


def adapter_parameters(shape: ModelShape, lora: LoraSection) -> int:
    """A and B of every adapted linear layer: rank x (its inputs + its outputs). Experts are no linear layers."""
    widths = {
        "q_proj": shape.hidden + shape.query, "k_proj": shape.hidden + shape.key, "v_proj": shape.hidden + shape.key,
        "o_proj": shape.query + shape.hidden,
    }  # fmt: skip
    if not shape.experts:
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.hidden + shape.mlp)
    chosen = [width for name, width in widths.items() if not lora.targets or name in lora.targets]
    return shape.layers * lora.rank * sum(chosen)


def learner_memory(recipe: Recipe, shape: ModelShape, *, parameters: int | None = None) -> LearnerMemory:
    """``parameters``: counted ones, where they are known better than by the shape's formula."""
    learner, zero, size = recipe.learner, recipe.learner.zero, BYTES[recipe.model.dtype]
    count = shape.parameters if parameters is None else parameters
    lora = learner.lora.rank > 0
    trained = adapter_parameters(shape, learner.lora) if lora else count
    shard = -(-(count + (trained if lora else 0)) // learner.ranks)
    own = -(-trained // learner.ranks)  # the part that has masters, moments and gradients
    longest = recipe.data.max_prompt_tokens + recipe.rollout.sampling.max_tokens
    tokens = min(max(learner.micro_batch_tokens, longest), rank_share(recipe) * longest)
    stage3: dict[str, Any] = learner.deepspeed.get("zero_optimization", {})
    live = min(count, int(stage3.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS)))
    device = {"weights": 0 if zero.offload_parameters else size * shard}
    host = {"weights": size * shard} if zero.offload_parameters else {}
    step = 4 * min(own, int(stage3.get("sub_group_size", SUB_GROUP)))
    if zero.offload_optimizer:  # pinned copies, and gradients twice: as they are summed and as AdamW reads them
        host |= {"master weights": 4 * own, "Adam": 8 * own, "gradients": 8 * own}
        step = 0
    else:
        device |= {"master weights": 4 * own, "Adam": 8 * own, "gradients": 4 * own}
    if recipe.algorithm.kl.beta > 0 and not lora:  # with LoRA the policy's own base is the reference
        place = host if zero.offload_parameters else device
        place["reference"] = size * shard
        if recipe.algorithm.kl.reference == "ema" and size < 4:
            place["reference's average"] = 4 * shard  # fp32, as learner/reference.py keeps it
    # Allocated whole at the start; on a CPU only what is written to takes memory.
    bucket = min(trained, zero.reduce_bucket_size) if recipe.weights.backend == "gloo" else zero.reduce_bucket_size
    backward = {
        "gathered layers": size * max(live, shape.largest_tensor),
        "reduce bucket": size * bucket,
        "activations": activation_bytes(shape, size, tokens, checkpointing=learner.gradient_checkpointing),
        "logits and head": head_bytes(shape, size, learner.logprob_chunk_tokens, trained=not lora),
    }
    # The optimizer's own copy of the gradient lives when activations are gone: only the larger of the two counts.
    short = step - backward["activations"] - backward["logits and head"]
    device |= backward | ({"optimizer step": short} if short > 0 else {})
    if recipe.weights.backend != "gloo":
        device["CUDA and NCCL (assumed)"] = LEARNER_OVERHEAD
    return LearnerMemory(device, host, size * count)


def engine_memory(
    recipe: Recipe, shape: ModelShape, *, gpu_bytes: int | None = None, parameters: int | None = None
) -> EngineMemory:
    """Of one GPU of an engine of ``rollout.tensor_parallel``."""
    rollout, size = recipe.rollout, BYTES[recipe.model.dtype]
    weights = -(-size * (shape.parameters if parameters is None else parameters) // rollout.tensor_parallel)
    heads = max(1, -(-shape.kv_heads // rollout.tensor_parallel))  # fewer heads than GPUs: each has a copy
    kv = 2 * shape.layers * heads * shape.head_dim * size
    limit = int(rollout.engine.get("max_num_seqs", MAX_NUM_SEQS))
    budget = rollout.engine.get("kv_cache_memory_bytes")
    if budget is None and gpu_bytes is not None:
        budget = int(float(rollout.engine.get("gpu_memory_utilization", UTILIZATION)) * gpu_bytes)
        budget -= weights + ENGINE_OVERHEAD
    if budget is None:
        return EngineMemory(weights, kv, None, None, limit)
    return EngineMemory(weights, kv, int(budget), max(0, int(budget) // (kv * recipe.longest_sequence)), limit)


def bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
