"""Which keys ``learner.deepspeed`` may have: those DeepSpeed reads, without those that grpo_dist sets or must not be.

DeepSpeed ignores a top-level key that it does not know, so a misspelt one would do nothing and say nothing. The lists
are written down, because a recipe is read without importing deepspeed; a test compares them with the installed one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

KNOWN = frozenset({
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last",
    "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler",
    "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline",
    "prescale_gradients", "scheduler", "seq_parallel_communication_data_type", "steps_per_print", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip

KNOWN_ZERO = frozenset({
    "allgather_bucket_size", "allgather_partitions", "allgather_sequential", "compute_grad_norm",
    "contiguous_gradients", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
    "enable_sanity_checks", "gather_16bit_weights_on_model_save", "ignore_unused_parameters", "leaf_module",
    "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance",
    "memory_efficient_linear", "model_persistence_threshold", "module_granularity_threshold", "offload_optimizer",
    "offload_param", "overlap_comm", "override_module_apply", "param_persistence_threshold", "parameter_alignment",
    "pipeline_loading_checkpoint", "prefetch_bucket_size", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage", "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params", "sub_group_size", "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
})  # fmt: skip

# Set by us. The last two are not DeepSpeed's any more, and are asked for all the same.
OWNED = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
    "gradient_clipping", "bf16", "bfloat16", "fp16", "data_types", "torch_autocast", "managed_gradient_accumulation",
    "checkpoint", "compile", "amp",
})  # fmt: skip
_SCALE = "the gradient's scale would be another one, and DeepSpeed would not say so"
_MODEL = "it would train another model, or on other ranks, than the engines are sent"
REFUSED = {
    "prescale_gradients": _SCALE,
    "gradient_predivide_factor": _SCALE,
    "gradient_allreduce_op": _SCALE,
    "progressive_layer_drop": _MODEL,
    "compression_training": _MODEL,
    "weight_quantization": _MODEL,
    "data_efficiency": _MODEL,
    "hybrid_engine": _MODEL,
    "pipeline": _MODEL,
    "tensor_parallel": _MODEL,
    "expert_parallel": _MODEL,
}
# Both are the averaging factor's or the weight version's: a gradient would be late, or scaled, without a sign.
OWNED_ZERO = frozenset({"reduce_scatter", "zenflow"})
_ROUNDED = "weights or gradients would be rounded on their way, and the learner would train another policy than samples"
REFUSED_ZERO = {
    "zero_quantized_gradients": _ROUNDED,
    "zero_quantized_weights": _ROUNDED,
    "zero_quantized_nontrainable_weights": _ROUNDED,
    "elastic_checkpoint": "checkpoints are grpo_dist's own",
}
# Key of zero_optimization -> key of learner.zero that switches it on; then its details may be given here.
_OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
_OLD_OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_parameters",
    "cpu_offload_use_pin_memory": "offload_optimizer",
}


def refuse_keys(given: dict[str, Any], *, offloads: dict[str, bool]) -> None:
    """Raises ValueError, beginning with ``deepspeed.KEY``, for the first key that cannot be given.

    Args:
        given: ``learner.deepspeed``.
        offloads: the switches of ``learner.zero``, by name.
    """
    for key in given:
        if key in OWNED:
            raise ValueError(f"deepspeed.{key} is set by grpo_dist and cannot be given; see the learner's own keys")
        if key in REFUSED:
            raise ValueError(f"deepspeed.{key} cannot be given: {REFUSED[key]}")
        if key not in KNOWN:
            raise ValueError(f"deepspeed.{key} is no key of DeepSpeed{_nearest(key, KNOWN - OWNED - REFUSED.keys())}")
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f"deepspeed.zero_optimization must be a mapping, got {zero!r}")
    if (stage := zero.get("stage", 3)) != 3:
        raise ValueError(f"deepspeed.zero_optimization.stage is 3 and cannot be changed, got {stage!r}")
    for key, value in zero.items():
        _refuse_zero(key, value, offloads)


def _refuse_zero(key: str, value: Any, offloads: dict[str, bool]) -> None:
    name = f"deepspeed.zero_optimization.{key}"
    if key in OWNED_ZERO:
        raise ValueError(f"{name} is set by grpo_dist and cannot be given")
    if key in REFUSED_ZERO:
        raise ValueError(f"{name} cannot be given: {REFUSED_ZERO[key]}")
    if key in _OLD_OFFLOADS:
        raise ValueError(f"{name} cannot be given: set learner.zero.{_OLD_OFFLOADS[key]}")
    if (switch := _OFFLOADS.get(key)) is not None:
        if not offloads[switch]:
            raise ValueError(f"{name} needs learner.zero.{switch}: true, which is false: offloading is switched there")
        if not isinstance(value, dict) or value.get("device", "cpu") not in ("cpu", "nvme"):
            raise ValueError(f"{name} must be a mapping with device cpu or nvme, got {value!r}")
    if key not in KNOWN_ZERO:
        usable = KNOWN_ZERO - OWNED_ZERO - REFUSED_ZERO.keys() - _OLD_OFFLOADS.keys()
        raise ValueError(f"{name} is no key of DeepSpeed{_nearest(key, usable)}")


def _nearest(key: str, choices: Iterable[str]) -> str:
    found = difflib.get_close_matches(key, sorted(choices), n=1)
    return f"; did you mean {found[0]}?" if found else ""
