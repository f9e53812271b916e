"""The shape of a model: what its sizes say about parameters, activations and cache. Read from config.json, no weights.

Qwen2/3, Llama and Mistral shapes (grouped-query attention, gated MLP, RMSNorm), dense or with experts. The shipped
recipes' hub names are in a table, so that they can be planned where the hub cannot be reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN_FAMILIES = frozenset({"qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. ``mlp`` is the width of a dense MLP, or of one expert when there are experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    context: int
    experts: int = 0
    experts_per_token: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    family: str = ""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads; values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head when it is not the same tensor: the largest ones."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Attention, MLP or experts with their router, two norms."""
        attention = 2 * self.hidden * (self.query + self.key)
        attention += self.query + 2 * self.key if self.qkv_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        mlp = 3 * self.hidden * self.mlp
        if self.experts:
            mlp = self.experts * mlp + self.experts * self.hidden
        return attention + mlp + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor. All experts of a layer are one tensor in memory (transformers 5)."""
        return max(self.embedding, self.experts * 2 * self.mlp * self.hidden, self.mlp * self.hidden)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """From the content of config.json.

    Raises:
        ValueError: a size is missing; names it.
    """

    def size(*names: str) -> int:
        for name in names:
            if isinstance(value := config.get(name), int) and value > 0:
                return value
        raise ValueError(f"config.json has no {names[0]}, without which memory cannot be estimated")

    family = str(config.get("model_type", ""))
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    return ModelShape(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        mlp=size("moe_intermediate_size", "intermediate_size") if experts else size("intermediate_size"),
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=size("max_position_embeddings"),
        experts=experts,
        experts_per_token=size("num_experts_per_tok") if experts else 0,
        qk_norm=family.startswith("qwen3"),
        qkv_bias=family == "qwen2",
        family=family,
    )


def shape_of_folder(folder: Path) -> ModelShape:
    """Raises ValueError when config.json is missing, broken, or lacks a size."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json is no JSON object")
    return shape_from_config(config)


def _qwen3(layers: int, hidden: int, heads: int, mlp: int, *, tied: bool) -> ModelShape:
    return ModelShape(layers, hidden, heads, 8, 128, mlp, 151_936, tied, 40_960, qk_norm=True, family="qwen3")


# From the config.json on the hub (of the models the shipped recipes name). A test compares the parameter counts with
# those that transformers builds from the same sizes.
SHAPES: dict[str, ModelShape] = {
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12288, tied=False),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 64, 25600, tied=False),
    "Qwen/Qwen3-30B-A3B": ModelShape(
        48, 2048, 32, 4, 128, 768, 151_936, False, 40_960, experts=128, experts_per_token=8, qk_norm=True,
        family="qwen3_moe",
    ),
    "quickstart": ModelShape(2, 128, 4, 2, 32, 256, 55, True, 64, qk_norm=True, family="qwen3"),
    "smollm2": ModelShape(30, 576, 9, 3, 64, 1536, 49_152, True, 8192, family="llama"),
}  # fmt: skip
