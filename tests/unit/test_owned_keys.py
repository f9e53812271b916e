"""Raw options of DeepSpeed and vLLM: merged where they are harmless, refused where a gradient or a probability would be wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_dist.config import LearnerSection, ModelSection, RolloutSection
from grpo_dist.deepspeed_keys import KNOWN, KNOWN_ZERO
from grpo_dist.learner.ds_config import policy_config, reference_config
from tests.unit.test_learner_spec import spec

REFUSED: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Muon"},
    "scheduler": {"type": "WarmupLR"},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": True},
    "amp": {"enabled": True},
    "managed_gradient_accumulation": False,
    "checkpoint": {"load_universal": True},
    "compile": {"deepcompile": True},
    "bfloat16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "bf16"},
    "torch_autocast": {"enabled": True},
}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_keys_that_this_system_owns_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match=rf"deepspeed\.{key} is set by grpo_dist and cannot be given"):
        LearnerSection(deepspeed={key: REFUSED[key]})


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 2}, r"zero_optimization\.stage is 3 and cannot be changed, got 2"),
        ({"reduce_scatter": False}, r"zero_optimization\.reduce_scatter is set by grpo_dist"),
        ({"zenflow": {"topk_ratio": 0.1}}, r"zero_optimization\.zenflow is set by grpo_dist"),
        ("yes", "zero_optimization must be a mapping, got 'yes'"),
        ({"zero_quantized_gradients": True}, r"zero_optimization\.zero_quantized_gradients cannot be given: .*rounded"),
        ({"zero_quantized_weights": True}, r"zero_optimization\.zero_quantized_weights cannot be given: .*rounded"),
        ({"offload_optimizer": {"device": "cpu"}}, r"offload_optimizer needs learner\.zero\.offload_optimizer: true"),
        ({"offload_param": {"device": "cpu"}}, r"offload_param needs learner\.zero\.offload_parameters: true"),
        ({"cpu_offload": True}, r"cpu_offload cannot be given: set learner\.zero\.offload_optimizer"),
        ({"stage3_max_live_paramters": 5}, "is no key of DeepSpeed; did you mean stage3_max_live_parameters"),
    ],
)
def test_keys_below_zero_optimization(zero: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerSection(deepspeed={"zero_optimization": zero})


@pytest.mark.parametrize("key", ["prescale_gradients", "gradient_predivide_factor", "progressive_layer_drop"])
def test_keys_that_would_scale_or_change_what_is_trained(key: str) -> None:
    with pytest.raises(ValidationError, match=rf"deepspeed\.{key} cannot be given: "):
        LearnerSection(deepspeed={key: True})


def test_a_key_that_deepspeed_would_ignore() -> None:
    with pytest.raises(
        ValidationError, match=r"deepspeed\.comunication_data_type is no key of DeepSpeed; did you mean communication_d"
    ):
        LearnerSection(deepspeed={"comunication_data_type": "fp32"})
    with pytest.raises(ValidationError, match=r"deepspeed\.zzqq is no key of DeepSpeed"):
        LearnerSection(deepspeed={"zzqq": 1})


def test_details_of_an_offload_that_is_on() -> None:
    given = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}}
    config = policy_config(spec(zero={"offload_optimizer": True}, deepspeed=given))
    assert config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/fast"
    with pytest.raises(ValidationError, match="must be a mapping with device cpu or nvme"):
        spec(
            zero={"offload_optimizer": True}, deepspeed={"zero_optimization": {"offload_optimizer": {"device": "none"}}}
        )


def test_the_lists_are_those_of_the_installed_deepspeed() -> None:
    """What its configuration asks a mapping for, and the fields of its ZeRO section."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked: set[str] = set()

    class Asked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    reader = object.__new__(DeepSpeedConfig)
    reader._initialize_params(Asked(train_batch_size=1))  # not empty: some only look into one that is not
    assert asked == KNOWN
    fields = DeepSpeedZeroConfig.model_fields
    assert set(fields) | {field.alias for field in fields.values() if field.alias} == KNOWN_ZERO


def test_other_keys_reach_policy_and_reference() -> None:
    given = {
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "leaf_module": {"names": ["experts"]}},
    }
    for config in (policy_config(spec(deepspeed=given)), reference_config(spec(deepspeed=given))):
        assert config["communication_data_type"] == "fp32"
        assert config["zero_optimization"]["zero_hpz_partition_size"] == 8
        assert config["zero_optimization"]["leaf_module"] == {"names": ["experts"]}
        assert config["zero_optimization"]["reduce_scatter"] is True


def test_float16_halves_its_scale_at_the_first_overflow() -> None:
    assert policy_config(spec(dtype="float16"))["fp16"] == {"enabled": True, "hysteresis": 1}
    assert policy_config(spec(dtype="float16"))["data_types"] == {"grad_accum_dtype": "fp32"}
    assert policy_config(spec())["fp16"]["enabled"] is False
    assert ModelSection(path="m", dtype="float16").dtype == "float16"


@pytest.mark.parametrize("key", ["logprobs_mode", "generation_config", "dtype", "seed", "tensor_parallel_size"])
def test_what_makes_engine_and_learner_agree_cannot_be_set_for_the_engine_alone(key: str) -> None:
    with pytest.raises(ValidationError, match=rf"engine\.{key} is set by grpo_dist and cannot be given"):
        RolloutSection(engine={key: "raw_logprobs"})
