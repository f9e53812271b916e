"""LoRA through peft: low-rank adapters beside frozen linear layers. The only peft import.

    add_adapter    every chosen Linear W becomes  W x + scaling B A x;  only A and B train, B starts at 0
    published      W + scaling B A under W's own name, made while W is gathered: W itself stays as it is
    switched_off   inside, the model is its base: the reference of the KL term, without a second model
    writer         the adapter as peft saves one, beside an exported model

No dropout: rollouts know none, so log-probabilities of engine and learner would differ. No bias, no other variants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from torch import Tensor

from grpo_dist.config import LoraSection
from grpo_dist.errors import UserError
from grpo_dist.learner.model import LogprobHead, Packed, token_logprobs
from grpo_dist.weights.source import Gather, ShardedTensor

ADAPTER = "default"
_INNER, _MATRIX = ".base_layer.", re.compile(r"\.lora_([AB])\.default\.")


class Adapter:
    """The adapters of one model. Made by ``add_adapter``."""

    def __init__(self, config: LoraConfig, layers: dict[str, Any]) -> None:
        self._config, self._layers = config, layers

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The scale is 0 inside. Every module still runs, in the same order: ZeRO-3 remembers that order."""
        for layer in self._layers.values():
            layer.set_scale(ADAPTER, 0.0)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.set_scale(ADAPTER, 1.0)

    def published(self, tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """The base model's tensors, under its names and in its order, those with an adapter to be merged with it."""
        out = []
        for tensor in tensors:
            name = tensor.info.name
            if is_adapter(name):
                continue
            plain = replace(tensor, info=replace(tensor.info, name=name.replace(_INNER, ".")))
            if name.endswith(f"{_INNER}weight"):
                layer = self._layers[name.removesuffix(f"{_INNER}weight")]
                low, high = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
                plain = replace(plain, low=low, high=high, scaling=layer.scaling[ADAPTER])
            out.append(plain)
        return out

    def base_as_reference(self, model: Any, head: LogprobHead) -> BaseAsReference:
        return BaseAsReference(model, head, self)

    def writer(self, model: torch.nn.Module, gather: Gather, *, main: bool, base: str) -> Callable[[Path], None]:
        """Collective: takes A and B of every layer, all at once (they are small), and returns what writes them, on the
        main rank, into ``adapter`` below a folder: what ``PeftModel.from_pretrained`` loads onto ``base``."""
        chosen = [(name, p) for name, p in model.named_parameters() if is_adapter(name)]
        matrices: dict[str, Tensor] = {}
        with gather([p for _, p in chosen]):
            if main:
                matrices = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in chosen}

        def write(folder: Path) -> None:
            (folder / "adapter").mkdir()
            config = replace(self._config, base_model_name_or_path=base, inference_mode=True)
            config.save_pretrained(str(folder / "adapter"))
            path = folder / "adapter" / "adapter_model.safetensors"
            named = {"base_model.model." + _MATRIX.sub(r".lora_\1.", name): t for name, t in matrices.items()}
            save_file(named, path, metadata={"format": "pt"})
            path.chmod(0o644)

        return write


class BaseAsReference:
    """The policy's own base model, where a ``reference.Reference`` would be a second model."""

    def __init__(self, model: Any, head: LogprobHead, adapter: Adapter) -> None:
        self._model, self._head, self._adapter = model, head, adapter

    @torch.no_grad()
    def logprobs(self, packed: Packed) -> Tensor:
        """(L,) fp32, 0 off the mask."""
        with self._adapter.switched_off():
            return token_logprobs(self._model, self._head, packed, entropy=False)[0]

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """It never moves: the recipe refuses kl.reference other than fixed with LoRA."""

    def state(self) -> None:
        """Nothing of it is in a checkpoint."""

    def load(self, folder: Path) -> None:
        """Nothing to load."""


def add_adapter(model: Any, section: LoraSection, seed: int) -> Adapter:
    """Put adapters into ``model``; everything else is frozen. The same on every rank, for the same seed.

    Raises:
        UserError: a target names no linear layer of this model.
    """
    config = LoraConfig(
        r=section.rank, lora_alpha=section.alpha, lora_dropout=0.0, bias="none",
        target_modules=list(section.targets) or "all-linear",
    )  # fmt: skip
    check_targets(model, section.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    return Adapter(config, layers)


def check_targets(model: Any, targets: Sequence[str]) -> None:
    """Raises UserError unless each target names a linear layer below the head; a model on the meta device will do."""
    head = model.get_output_embeddings()
    linear = {
        name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head and "." in name
    }
    ends = sorted({name.rsplit(".", 1)[-1] for name in linear})
    heads = {name for name, m in model.named_modules() if m is head}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            why = "the head gets no adapter" if target in heads else "no linear layer is called so"
            raise UserError(
                f"learner.lora.targets: wanted linear layers of this model ({', '.join(ends)}), found {target!r}: {why}"
            )


def is_adapter(name: str) -> bool:
    return _MATRIX.search(name) is not None
