"""Entry point ``vllm.general_plugins``: tells every vLLM process about our weight-transfer engines.

vLLM calls ``register`` in the actor, in EngineCore and in each worker, possibly more than once. It names classes and
imports none of them, so it costs nothing where no weights are transferred. The learner calls it too, for its side.
"""

from __future__ import annotations

BACKENDS = {"gloo": "gloo", "nccl": "grpo_nccl"}  # recipe's name -> name in vLLM's registries

_WORKER_ENGINES = {
    "gloo": ("grpo_dist.weights.gloo", "GlooWeightTransferEngine"),
    "grpo_nccl": ("grpo_dist.weights.nccl", "GrpoNcclWeightTransferEngine"),
}
_TRAINER_ENGINES = {
    "gloo": ("grpo_dist.weights.gloo", "GlooTrainerWeightTransferEngine"),
    "grpo_nccl": ("grpo_dist.weights.nccl", "GrpoNcclTrainerWeightTransferEngine"),
}


def register() -> None:
    """Idempotent: vLLM's factories refuse a name that is already there."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for name, (module, class_name) in _WORKER_ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, class_name)
    for name, (module, class_name) in _TRAINER_ENGINES.items():
        if name not in WeightTransferTrainerFactory._registry:
            WeightTransferTrainerFactory.register_engine(name, module, class_name)
