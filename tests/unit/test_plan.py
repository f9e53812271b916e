"""Planning: numbers worked out by hand, real parameter counts, what autograd really saves, and who is told what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist import cli
from grpo_dist.config import Recipe
from grpo_dist.plan.advice import Machines, make_plan
from grpo_dist.plan.batch import batch_plan, group_sizes, mixed_share
from grpo_dist.plan.memory import (
    activation_bytes,
    activation_bytes_per_token,
    engine_memory,
    head_bytes,
    learner_memory,
)
from grpo_dist.plan.shapes import SHAPES, ModelShape, shape_from_config, shape_of_folder
from tests.conftest import tiny_recipe

SMALL = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp=8, vocab=10, tied=True, context=64)
EIGHT = SHAPES["Qwen/Qwen3-8B"]
GB = 10**9


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(tiny_recipe(**sections))


def large(**sections: dict[str, Any]) -> Recipe:
    """8 ranks and 8 engines of an 8B model in bf16."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 1024},
        "rollout": {
            "workers": 8, "group_size": 16, "groups_per_step": 32, "max_staleness": 1, "sampling": {"max_tokens": 4096},
            "engine": {"max_num_seqs": 128},
        },
        "learner": {"ranks": 8, "micro_batch_tokens": 20480, "gradient_checkpointing": True},
    }  # fmt: skip
    for name, keys in sections.items():
        base.setdefault(name, {}).update(keys)
    return recipe(**base)


class TestShapes:
    def test_by_hand(self) -> None:
        # attention 2 x 4 x (4 + 2) = 48, MLP 3 x 4 x 8 = 96, norms 8
        assert SMALL.layer_parameters == 152
        assert SMALL.parameters == 2 * 152 + 40 + 4

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("Qwen/Qwen3-0.6B", 596_049_920),
            ("Qwen/Qwen3-1.7B", 1_720_574_976),
            ("Qwen/Qwen3-8B", 8_190_735_360),
            ("Qwen/Qwen3-32B", 32_762_123_264),
            ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
            ("quickstart", 302_720),
        ],
    )
    def test_published_counts(self, name: str, parameters: int) -> None:
        assert SHAPES[name].parameters == parameters

    @pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama", "Mistral", "Qwen3Moe", "Mixtral"])
    def test_as_transformers_builds_it(self, kind: str) -> None:
        """Every family whose sizes are read: the formula is the count of the model that transformers makes of them."""
        import torch
        import transformers

        sizes: dict[str, Any] = {
            "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": kind == "Qwen2",
        }  # fmt: skip
        if kind in ("Qwen3Moe", "Mixtral"):
            count = "num_experts" if kind == "Qwen3Moe" else "num_local_experts"
            sizes |= {count: 6, "num_experts_per_tok": 2}
        if kind == "Qwen3Moe":
            sizes |= {"moe_intermediate_size": 24, "head_dim": 16}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert shape_from_config(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())

    def test_a_folder_and_what_is_missing_in_it(self, tiny_model: Path, tmp_path: Path) -> None:
        assert shape_of_folder(tiny_model).head_dim == 32
        with pytest.raises(ValueError, match=r"config\.json cannot be read"):
            shape_of_folder(tmp_path)
        (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
        with pytest.raises(ValueError, match="has no num_hidden_layers"):
            shape_of_folder(tmp_path)


class TestLearnerMemory:
    def test_a_small_model_by_hand(self) -> None:
        """fp32, two ranks, 344 + 4 parameters, 4 x 2 samples of at most 16 + 16 tokens in micro-batches of 64."""
        one = recipe(
            data={"max_prompt_tokens": 16}, learner={"ranks": 2, "micro_batch_tokens": 64, "logprob_chunk_tokens": 8},
            weights={"backend": "gloo"},
        )  # fmt: skip
        found = learner_memory(one, SMALL)
        # a layer: norms 2 x 4 x 12, q k v and the output twice 4 x (3 x 4 + 2 x 2), MLP 16 x 8; then the last norm
        activations = 64 * (2 * (96 + 64 + 128) + 12 * 4)
        assert found.device == {
            "weights": 4 * 174, "master weights": 4 * 174, "Adam": 8 * 174, "gradients": 4 * 174,
            "gathered layers": 4 * 348, "reduce bucket": 4 * 348, "activations": activations,
            "logits and head": 2 * 4 * 8 * 10 + 8 * 40,
        }  # fmt: skip
        assert found.host == {}
        assert found.staging == 4 * 348
        assert found.device_total == sum(found.device.values())

    def test_8b_on_8_ranks_by_hand(self) -> None:
        found = learner_memory(large(), EIGHT)
        shard = 1_023_841_920  # 8,190,735,360 / 8
        assert found.device["weights"] == 2 * shard
        assert found.device["master weights"] == found.device["gradients"] == 4 * shard
        assert found.device["Adam"] == 8 * shard
        assert found.device["gathered layers"] == 2 * 1_000_000_000
        assert found.device["reduce bucket"] == 2 * 500_000_000
        # a layer: 65,536 norms + 30,720 query and key norms + 28,672 attention + 98,304 MLP
        assert activation_bytes_per_token(EIGHT, 2) == 223_232
        assert found.device["activations"] == 20_480 * (36 * 2 * 4096 + 223_232 + 8 * 4096)
        assert found.device["logits and head"] == 8 * 256 * 151_936 + 6 * 151_936 * 4096
        assert found.staging == 2 * 8_190_735_360
        assert "optimizer step" not in found.device  # its 4 GB live when activations are gone

    def test_without_checkpointing(self) -> None:
        assert activation_bytes(EIGHT, 2, 1000, checkpointing=False) == 1000 * (36 * 223_232 + 8 * 4096)

    def test_offload_moves_20_bytes_a_parameter_to_the_host(self) -> None:
        """Measured on real ranks by test_learner_variants.py."""
        found = learner_memory(large(learner={"zero": {"offload_optimizer": True}}), EIGHT)
        assert found.device["weights"] == 2 * 1_023_841_920
        assert "Adam" not in found.device
        assert found.host_total == 20 * 1_023_841_920
        both = {"offload_optimizer": True, "offload_parameters": True}
        found = learner_memory(large(learner={"zero": both}, algorithm={"kl": {"beta": 0.1}}), EIGHT)
        assert found.device["weights"] == 0
        assert found.host["reference"] == found.host["weights"] == 2 * 1_023_841_920
        ema = {"kl": {"beta": 0.1, "reference": "ema", "ema": 0.01}}  # its average is kept in fp32
        assert learner_memory(large(algorithm=ema), EIGHT).device["reference's average"] == 4 * 1_023_841_920

    def test_lora_trains_adapters_alone(self) -> None:
        """Rank 16: 36 layers x 16 x (q 8192 + k 5120 + v 5120 + o 8192 + three of the MLP 16384 each)."""
        found = learner_memory(large(learner={"lora": {"rank": 16}}, algorithm={"kl": {"beta": 0.1}}), EIGHT)
        assert found.device["Adam"] == 36 * 16 * (26_624 + 49_152)  # 8 bytes, 8 ranks
        assert found.device["weights"] == 2 * (1_023_841_920 + 36 * 2 * 75_776)  # base and adapters
        assert "reference" not in found.device
        only = learner_memory(large(learner={"lora": {"rank": 16, "targets": ["q_proj"]}}), EIGHT)
        assert only.device["Adam"] == 36 * 16 * 8192

    def test_a_step_that_is_larger_than_the_backward_pass_counts(self) -> None:
        one = large(learner={"micro_batch_tokens": 64, "logprob_chunk_tokens": 1}, data={"max_prompt_tokens": 8})
        few = Recipe.model_validate(
            one.model_dump() | {"rollout": one.rollout.model_dump() | {"sampling": {"max_tokens": 8}}}
        )
        found = learner_memory(few, ModelShape(100, 2048, 16, 8, 128, 16384, 1000, True, 4096))
        backward = found.device["activations"] + found.device["logits and head"]
        assert found.device["optimizer step"] + backward == 4 * 1_000_000_000  # a sub-group is at most so large

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen3Moe"])
    def test_activations_are_what_autograd_saves(self, kind: str, dtype: str) -> None:
        """A layer more, on a packed micro-batch through our own attention and head: within 3 % of the formula."""
        one, per_token = saved_bytes(kind, dtype, layers=1)
        three, _ = saved_bytes(kind, dtype, layers=3)
        assert (three - one) / 2 == pytest.approx(per_token, rel=0.03)

    def test_checkpointed_activations_are_what_autograd_saves(self) -> None:
        one, _ = saved_bytes("Qwen3", "bfloat16", layers=1, checkpointing=True)
        three, _ = saved_bytes("Qwen3", "bfloat16", layers=3, checkpointing=True)
        assert (three - one) / 2 == 2 * 256  # its input

    def test_the_head(self) -> None:
        assert head_bytes(SMALL, 2, 8) == 2 * 4 * 8 * 10 + 6 * 40


def saved_bytes(kind: str, dtype: str, *, layers: int, checkpointing: bool = False) -> tuple[float, int]:
    """(bytes that a forward pass keeps per token, what the formula says of one layer)."""
    import torch
    import transformers

    from grpo_dist.learner.attention import choose_attention
    from grpo_dist.learner.model import Packed, replace_head, token_logprobs
    from grpo_dist.types import MicroBatch

    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = choose_attention("segment", torch.device("cpu"), getattr(torch, dtype))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    head = replace_head(model, 1.0, 256)
    length, one = 256, 128
    positions = np.tile(np.arange(one), length // one)
    batch = MicroBatch(
        token_ids=np.zeros(length, np.int64), position_ids=positions, segment_lengths=np.full(length // one, one),
        loss_mask=positions > 0, behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32), group_ids=np.zeros(2, np.int64), sample_indices=np.arange(2),
    )  # fmt: skip
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(model, head, Packed.of(batch, torch.device("cpu")))
    size = {"bfloat16": 2, "float32": 4}[dtype]
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    return total / length, activation_bytes_per_token(shape_from_config(config.to_dict()), size)


class TestEngineMemory:
    def test_8b_by_hand(self) -> None:
        found = engine_memory(large(), EIGHT, gpu_bytes=80 * GB)
        assert found.weights == 2 * 8_190_735_360
        assert found.kv_per_token == 2 * 36 * 8 * 128 * 2 == 147_456
        assert found.budget == 68 * GB - 16_381_470_720 - 3 * 2**30
        assert found.sequences == found.concurrent == found.budget // (147_456 * 5120) == 64

    def test_heads_are_split_and_then_copied(self) -> None:
        kv = [
            engine_memory(large(rollout={"tensor_parallel": n}), EIGHT).kv_per_token for n in (1, 4, 8, 16)
        ]  # 8 heads of keys and values
        assert kv == [147_456, 36_864, 18_432, 18_432]

    def test_an_explicit_cache_needs_no_gpu(self) -> None:
        found = engine_memory(large(rollout={"engine": {"kv_cache_memory_bytes": 147_456 * 5120 * 3}}), EIGHT)
        assert found.sequences == 3


class TestBatch:
    def test_by_hand(self) -> None:
        found = batch_plan(large(learner={"updates_per_batch": 2, "epochs": 2}), rows=10_000)
        assert (found.samples, found.longest, found.tokens) == (512, 5120, 2_621_440)
        assert found.updates == 4
        assert found.micro_batches == 8  # 512 / (8 ranks x 2) = 32 samples of a rank, four in a micro-batch
        assert (found.slots, found.in_flight) == (64, 128)
        assert found.steps_per_epoch == 10_000 / 32
        assert batch_plan(large()).rows is None

    def test_group_sizes_under_one_budget(self) -> None:
        assert mixed_share(0.5, 2) == 0.5
        assert mixed_share(0.1, 4) == pytest.approx(1 - 0.1**4 - 0.9**4)
        found = group_sizes(64)
        assert list(found) == [4, 8, 16, 32, 64]
        assert found[4][0.5] == pytest.approx(16 * 0.875)
        # Of a hard prompt a large group is far more often mixed, though there are fewer of them.
        assert found[16][0.02] / (64 / 16) > 3 * found[4][0.02] / (64 / 4)


class TestAdvice:
    NODES = (
        Machines("roles.learner", ("head", "learner"), 1, 8, 80 * GB, 900 * GB),
        Machines("roles.rollout", ("rollout", "verifier"), 1, 8, 80 * GB, 900 * GB),
    )

    def test_a_plan_that_fits_says_nothing(self) -> None:
        found = make_plan(large(), EIGHT, self.NODES)
        assert (found.problems, found.warnings) == ([], [])

    @pytest.mark.parametrize(
        ("sections", "says"),
        [
            (
                {"learner": {"gradient_checkpointing": False}},
                "a learner rank needs about .*gradient_checkpointing: true",
            ),
            ({"learner": {"ranks": 1}, "rollout": {"workers": 8}}, "more learner.ranks than 1"),
            ({"learner": {"ranks": 9}}, r"roles.learner: 1 nodes x 8 GPUs, the recipe wants 9 \(learner 9\)"),
            ({"rollout": {"tensor_parallel": 3, "workers": 1}}, "does not divide the model's 32 attention heads"),
            ({"rollout": {"tensor_parallel": 16, "workers": 1}}, "1 nodes x 8 GPUs, the recipe wants 16"),
            ({"rollout": {"sampling": {"max_tokens": 40_000}}}, "exceeds the model's context of 40960"),
            ({"rollout": {"engine": {"kv_cache_memory_bytes": 1 << 20}}}, "does not hold one sequence of 5120 tokens"),
        ],
    )
    def test_what_cannot_run(self, sections: dict[str, dict[str, Any]], says: str) -> None:
        found = make_plan(large(**sections), EIGHT, self.NODES)
        assert len([text for text in found.problems if _matches(says, text)]) == 1, found.problems

    @pytest.mark.parametrize(
        ("sections", "says"),
        [
            ({"learner": {"ranks": 6}}, "roles.learner: 2 of 8 GPUs have no work: raise learner.ranks"),
            ({"rollout": {"max_staleness": 0}}, "rollout.max_staleness 0: engines wait while the learner trains"),
            ({"rollout": {"groups_per_step": 2, "workers": 8}}, "4 groups in flight for 8 engines: 4 engines never"),
            ({"rollout": {"groups_per_step": 128}}, "up to 512 completions in flight on an engine, 64 at a time"),
            ({"learner": {"micro_batch_tokens": 4096}}, "is below the longest sample"),
            ({"rollout": {"engine": {"gpu_memory_utilization": 0.96}}}, "a publication needs about 1.61 GB beside"),
            ({"learner": {"zero": {"offload_optimizer": True}}}, "it costs time for nothing"),
        ],
    )
    def test_what_is_wasteful(self, sections: dict[str, dict[str, Any]], says: str) -> None:
        found = make_plan(large(**sections), EIGHT, self.NODES)
        assert found.problems == []
        assert len([text for text in found.warnings if _matches(says, text)]) == 1, found.warnings

    def test_reward_models_take_gpus_too(self) -> None:
        uses = {"use": [{"name": "exact"}, {"name": "reward_model", "path": "x"}]}
        section = {"reward_model": {"workers": 3, "gpus": 0.5}}
        found = make_plan(large(verifiers=uses | section), EIGHT, self.NODES)
        assert found.problems == ["roles.rollout: 1 nodes x 8 GPUs, the recipe wants 10 (rollout 8, verifier 2)"]

    def test_weights_that_fill_the_gpu(self) -> None:
        found = make_plan(large(), EIGHT, gpu_bytes=16 * GB)
        assert any("leave no room for a cache on a GPU of 16 GB" in text for text in found.problems)

    def test_host_memory(self) -> None:
        offload = large(learner={"zero": {"offload_optimizer": True}, "micro_batch_tokens": 61_440})
        # 8 ranks x 20 bytes x a shard = 164 GB, 16.4 GB staged, 16.4 GB while loading
        tight = make_plan(offload, EIGHT, (Machines("n", ("learner", "rollout"), 2, 8, 80 * GB, 200 * GB),))
        assert any("needs about 197 GB of host memory" in text for text in tight.warnings)
        less = make_plan(offload, EIGHT, (Machines("n", ("learner", "rollout"), 2, 8, 80 * GB, 190 * GB),))
        assert any("it has 190 GB: more nodes, or no offload" in text for text in less.problems)


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None


class TestVerb:
    def run(self, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        status = cli.run_command(["plan", *words])
        out, err = capfd.readouterr()
        return status, out, err

    def test_topics(self, capfd: pytest.CaptureFixture[str]) -> None:
        status, out, _ = self.run(capfd, "memory", "math-8b")
        assert status == 0
        assert "learner rank" in out
        assert "samples" not in out
        out = self.run(capfd, "groups", "math-8b")[1]
        assert "steps an epoch (40,315 rows)" in out
        assert "G = 16  " in out
        assert "8 for the learner, 8 for engines" in self.run(capfd, "fleet", "math-8b")[1]

    def test_json_and_what_does_not_fit(self, capfd: pytest.CaptureFixture[str]) -> None:
        status, out, err = self.run(capfd, "math-8b", "learner.ranks=1", "--gpu-memory", "79Gi", "--json")
        assert status == 2
        assert json.loads(out)["fits"] is False
        assert json.loads(out)["learner"]["device"]["Adam"] == 8 * 8_190_735_360
        assert err.startswith("grpo-dist: a learner rank needs about")

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["memory"], "plan needs a RECIPE"),
            (["quickstart", "model.path=a/b"], "model.path a/b: no such folder, and not in the table of shapes"),
            (["quickstart", "--gpu-memory", "big"], "--gpu-memory: wanted a size such as 64Gi"),
            (["quickstart", "--cluster", "/nowhere"], "/nowhere: cannot be read"),
        ],
    )
    def test_wrong_input(self, capfd: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
        status, _, err = self.run(capfd, *words)
        assert status == 2
        assert says in err

    def test_it_loads_nothing_heavy(self) -> None:
        import subprocess
        import sys

        code = (
            "import sys\nfrom grpo_dist.cli import run_command\ncode = run_command(['plan', 'math-8b'])\n"
            "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets'}\n"
            "print(code, sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == "0 []"
