"""What a run takes in, checked before anything starts: the model folder, and the prompts in the model's tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_dist.config import LoraSection, ModelSection, Recipe
from grpo_dist.data.prompts import PromptStream, load_prompts
from grpo_dist.errors import UserError
from grpo_dist.quickstart.policy import build_quickstart_policy
from grpo_dist.quickstart.smollm2 import build_smollm2
from grpo_dist.rollout.engine_keys import refuse_unknown_engine_keys
from grpo_dist.verifiers.registry import build

QUICKSTART = "quickstart"
# Names that stand for a model made on this machine on first use.
MADE_HERE: dict[str, Callable[..., Path]] = {QUICKSTART: build_quickstart_policy, "smollm2": build_smollm2}


def resolve_model(model: ModelSection, *, tell: Callable[[str], None] = print) -> str:
    """The folder or hub name to load; makes what is made on this machine (MADE_HERE).

    Raises:
        UserError: there is no such folder, or nothing that transformers can load.
    """
    if model.path in MADE_HERE:
        return str(MADE_HERE[model.path](tell=tell))
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path {folder} is not a model folder: it has no config.json")
        return str(folder)
    looks_local = model.path.startswith((".", "/", "~")) or model.path.count("/") != 1
    if looks_local or os.environ.get("HF_HUB_OFFLINE") == "1":
        why = "" if looks_local else " (HF_HUB_OFFLINE=1: hub names are only looked up in the local cache)"
        if looks_local or not _in_cache(model.path):
            raise UserError(f"model.path {model.path!r}: no such folder{why}")
    return model.path


def _in_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def load_config(path: str, model: ModelSection) -> Any:
    """The model's transformers configuration. Raises UserError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path {path}: its configuration cannot be loaded: {_first_line(error)}") from error


def load_tokenizer(path: str, model: ModelSection) -> Any:
    """The model's tokenizer. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path {path}: its tokenizer cannot be loaded: {_first_line(error)}") from error


def refuse_beyond_context(recipe: Recipe, config: Any) -> None:
    """Prompts and completions must fit what the model was made for.

    Raises:
        UserError: the longest sequence the recipe allows exceeds the model's context.
    """
    context = getattr(config, "max_position_embeddings", None)
    longest = recipe.longest_sequence
    if context is not None and longest > context:
        raise UserError(
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + the longest completion "
            f"{longest - recipe.data.max_prompt_tokens} = {longest} tokens exceed the model's context of {context}"
        )


def refuse_untrainable(config: Any) -> None:
    """Raises UserError for a model whose log-probabilities the learner would get wrong; names the key that says so."""
    from grpo_dist.learner.attention import refuse_unsupported
    from grpo_dist.learner.model import refuse_scaled_logits

    refuse_unsupported(config)
    refuse_scaled_logits(config)


def meta_model(config: Any, model: ModelSection) -> Any:
    """The model without memory for its weights. Raises UserError."""
    import torch
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            return build(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(
            f"model.path: not a causal language model that transformers knows: {_first_line(error)}"
        ) from error


def refuse_unknown_targets(model: Any, lora: LoraSection) -> None:
    """Raises UserError for a target of LoRA that is no linear layer of this model, or is its head."""
    if lora.rank and lora.targets:
        from grpo_dist.learner.lora import check_targets  # loads peft: only where it is wanted

        check_targets(model, lora.targets)


def load_inputs(recipe: Recipe) -> tuple[str, PromptStream]:
    """The model to load (folder or hub name) and the prompts.

    Raises:
        UserError: a model, an engine key, a context or a data set that cannot be used; each says what was wanted.
    """
    refuse_unknown_engine_keys(recipe.rollout.engine)
    judge = build(recipe.verifiers.use)
    model = resolve_model(recipe.model)
    config = load_config(model, recipe.model)
    refuse_untrainable(config)
    refuse_beyond_context(recipe, config)
    if recipe.learner.lora.rank and recipe.learner.lora.targets:
        refuse_unknown_targets(meta_model(config, recipe.model), recipe.learner.lora)
    prompts = load_prompts(
        recipe.data,
        load_tokenizer(model, recipe.model),
        seed=recipe.run.seed,
        group_size=recipe.rollout.group_size,
        judge=judge,
    )
    return model, prompts


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
