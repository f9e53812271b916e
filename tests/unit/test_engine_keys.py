from __future__ import annotations

import pytest

from grpo_dist.errors import UserError
from grpo_dist.rollout.engine_keys import engine_keys, refuse_unknown_engine_keys


def test_keys_are_those_of_the_installed_vllm() -> None:
    assert {"max_num_seqs", "max_model_len", "kv_cache_memory_bytes", "enforce_eager"} <= engine_keys()
    refuse_unknown_engine_keys(["max_num_seqs", "enforce_eager"])


def test_a_misspelt_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"rollout\.engine\.max_num_sqs.*did you mean rollout\.engine\.max_num_seqs"):
        refuse_unknown_engine_keys(["max_num_sqs"])
