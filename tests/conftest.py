"""Shared fixtures: one Ray cluster for the session, tiny random models, and the order in which tests run.

Pure tests (tests/unit) run first, then those that need Ray, then whole runs: a broken function is seen in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def floor(item: pytest.Item) -> int:
        if item.get_closest_marker("long"):
            return 2
        return 1 if item.get_closest_marker("ray") or "integration" in item.path.parts else 0

    items.sort(key=floor)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With GRPO_DIST_NO_SKIPS=1 (CI) only GPU tests may skip: a missing system package must not pass unseen."""
    report = yield
    allowed = item.get_closest_marker("gpu") is not None or hasattr(report, "wasxfail")
    allowed = allowed or "KubeRay's definitions" in str(report.longrepr)  # data files that are no part of the project
    if report.skipped and not allowed and os.environ.get("GRPO_DIST_NO_SKIPS") == "1":
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped where no test may skip: {reason}"
    return report


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The session's Ray: more logical CPUs than cores, because the tests' workers mostly wait."""
    import ray

    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
    )
    yield
    ray.shutdown()


def build_tiny_model(
    folder: Path, *, tied: bool, vocab: int = 64, hidden: int = 64, layers: int = 2, seed: int = 0
) -> Path:
    """A random Qwen3 with a character-level tokenizer, loadable by transformers and by vLLM."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    chars = "0123456789+-*/=,#. abcdefghijklmnopqrstuvwxyz?!:()[]{}<>"
    table = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {c: i + 4 for i, c in enumerate(chars)}
    assert len(table) <= vocab
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():  # sharper than the default initialisation, so that a stale weight shows
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "tied", tied=True)


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "untied", tied=False)


def tiny_recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    """A smallest valid recipe as a plain dict; keyword arguments replace keys inside its sections."""
    recipe: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "steps": 2},
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"source": "rows.jsonl", "template": "raw", "max_prompt_tokens": 64},
        "rollout": {"group_size": 4, "groups_per_step": 2, "sampling": {"max_tokens": 16}},
        "verifiers": {"use": [{"name": "exact"}]},
        "tracking": {"wandb": {"mode": "disabled"}},
    }
    for name, keys in sections.items():
        recipe.setdefault(name, {}).update(keys)
    return recipe
