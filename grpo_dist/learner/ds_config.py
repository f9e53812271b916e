"""The DeepSpeed configuration that one policy needs, as plain dictionaries. Pure: no deepspeed import.

What the recipe gives under ``learner.deepspeed`` is merged last; keys that would break the gradient's scale are refused
by the recipe already.
"""

from __future__ import annotations

from typing import Any

from grpo_dist.learner.spec import LearnerSpec


def policy_config(spec: LearnerSpec) -> dict[str, Any]:
    """For the trained policy."""
    learner, zero = spec.learner, _zero(spec)
    if learner.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": spec.device == "cuda"}
    config = _common(spec) | {
        "gradient_clipping": learner.grad_clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW on the CPU: nothing to compile
    }
    if spec.model.dtype != "float32":  # gradients of micro-batches are summed in fp32 whatever the model's dtype
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return merged(config, learner.deepspeed)


def reference_config(spec: LearnerSpec) -> dict[str, Any]:
    """For a frozen model without optimizer. Same persistence threshold as the policy: congruent shards."""
    config = _common(spec) | {"zero_optimization": _zero(spec)}
    ours = {k: v for k, v in spec.learner.deepspeed.items() if k != "zero_optimization"}
    wanted = spec.learner.deepspeed.get("zero_optimization", {})
    shared = {k: v for k, v in wanted.items() if not k.startswith("offload_optimizer")}
    return merged(config, ours | {"zero_optimization": shared})


def _common(spec: LearnerSpec) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # unused: micro-batches are ours, DeepSpeed only wants a number
        "gradient_accumulation_steps": 1,
        "train_batch_size": spec.world,
        "bf16": {"enabled": spec.model.dtype == "bfloat16"},
        # Halved at the first overflow, not at the second: a batch is tried again until its gradients fit.
        "fp16": {"enabled": spec.model.dtype == "float16", "hysteresis": 1},
        "steps_per_print": None,
    }


def _zero(spec: LearnerSpec) -> dict[str, Any]:
    zero = spec.learner.zero
    config: dict[str, Any] = {
        "stage": 3,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "overlap_comm": spec.device == "cuda",
        "reduce_scatter": True,  # set, not left to the default: the averaging factor depends on it
    }
    if zero.offload_parameters:
        config["offload_param"] = {"device": "cpu", "pin_memory": spec.device == "cuda"}
    return config


def merged(config: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """``override`` wins, section by section."""
    out = dict(config)
    for key, value in override.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out
