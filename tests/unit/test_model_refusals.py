"""Models that the learner's head would be wrong for are refused before anything is loaded, by the key that says so."""

from __future__ import annotations

import pytest
import torch
from transformers import Cohere2Config, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, Qwen3Config
from transformers.models.falcon_h1 import FalconH1Config

from grpo_dist.config import ModelSection
from grpo_dist.errors import UserError
from grpo_dist.learner.model import load_config, refuse_scaled_logits, replace_head


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Gemma2Config(), "final_logit_softcapping: 30.0"),
        (CohereConfig(), "logit_scale: 0.0625"),
        (Cohere2Config(), "logit_scale: 0.0625"),
        (GraniteConfig(logits_scaling=8.0), "logits_scaling: 8.0"),
        (FalconH1Config(lm_head_multiplier=0.5), "lm_head_multiplier: 0.5"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.model_type,
)
def test_what_happens_to_logits_after_the_head_is_named(config, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=f"{config.model_type} has {key} in its config") as caught:
        refuse_scaled_logits(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [Qwen3Config(), LlamaConfig(), GraniteConfig(logits_scaling=1.0), Gemma2Config(final_logit_softcapping=None)],
    ids=lambda c: c.model_type,
)
def test_a_value_that_changes_nothing_is_fine(config) -> None:  # type: ignore[no-untyped-def]
    refuse_scaled_logits(config)


def test_refused_from_the_folder_before_loading(tmp_path) -> None:  # type: ignore[no-untyped-def]
    GraniteConfig(logits_scaling=8.0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="logits_scaling"):
        load_config(ModelSection(path=str(tmp_path)))


def test_a_head_with_a_bias_is_refused() -> None:
    from transformers import PhiConfig, PhiForCausalLM

    small = PhiConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11)
    with torch.device("meta"):
        model = PhiForCausalLM(small)
    with pytest.raises(UserError, match=r"head of PhiForCausalLM has a bias \(lm_head.bias\)"):
        replace_head(model, 1.0, 256)
