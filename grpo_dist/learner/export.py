"""A Hugging Face model folder from sharded weights: written aside, a shard file at a time, then renamed.

    gather a group of tensors -> collect up to SHARD_BYTES on rank 0 -> model-00001-of-00003.safetensors -> … -> index

Host memory is one shard file, whatever the size of the model. A tied head is omitted, as transformers itself does. LoRA
adapters are merged; the adapter itself lies beside, in the folder ``adapter``.
Config and tokenizer are those of the folder the policy was loaded from, with the dtype of the weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from grpo_dist.config import ModelSection
from grpo_dist.types import TensorInfo
from grpo_dist.weights.source import ZeroWeightSource, tensor_bytes

SHARD_BYTES = 4 << 30


def export_folder(
    out: Path,
    section: ModelSection,
    source: ZeroWeightSource,
    *,
    main: bool,
    shard_bytes: int = SHARD_BYTES,
    also: Callable[[Path], None] | None = None,
) -> str | None:
    """Collective. ``out`` exists complete or not at all; on rank 0 says what went wrong, if anything.

    ``also`` writes more files into the folder, on rank 0 alone.
    """
    aside = out.with_name(f"{out.name}.tmp")
    writer = _ShardWriter(aside, source.infos, shard_bytes)
    problem = _prepare(out, aside) if main else None
    try:
        source.walk(writer.add if problem is None else _drop)
        if main and problem is None:
            writer.close()
            _write_rest(aside, section)
            if also is not None:
                also(aside)
            _sync_tree(aside)
            os.rename(aside, out)
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"{out} could not be written: {error}"
    if problem is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return problem


def _prepare(out: Path, aside: Path) -> str | None:
    if out.exists():
        return f"{out} exists already"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        return f"{aside} cannot be made: {error}"
    return None


def _drop(info: TensorInfo, full: Tensor) -> None:
    """The other ranks wait in the gathers: they are gone through although nothing is written."""


class _ShardWriter:
    """Collects tensors in the order of ``infos`` and writes a file whenever ``limit`` bytes are together."""

    def __init__(self, folder: Path, infos: Sequence[TensorInfo], limit: int) -> None:
        self._folder, self._plan = folder, _plan(infos, limit)
        self._held: dict[str, Tensor] = {}
        self._written = 0

    def add(self, info: TensorInfo, full: Tensor) -> None:
        self._held[info.name] = full.to("cpu", copy=True).contiguous()
        if len(self._held) == len(self._plan[self._written]):
            self._flush()

    def _flush(self) -> None:
        path = self._folder / self._name(self._written)
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes it private to its writer
        self._written += 1
        self._held = {}

    def _name(self, index: int) -> str:
        count = len(self._plan)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def close(self) -> None:
        assert self._written == len(self._plan), f"{self._written} of {len(self._plan)} files written"
        if len(self._plan) == 1:
            return
        total = sum(tensor_bytes(i) for part in self._plan for i in part)
        table = {info.name: self._name(n) for n, part in enumerate(self._plan) for info in part}
        index = {"metadata": {"total_size": total}, "weight_map": table}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _plan(infos: Sequence[TensorInfo], limit: int) -> list[list[TensorInfo]]:
    parts: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if parts[-1] and size + tensor_bytes(info) > limit:
            parts.append([])
            size = 0
        parts[-1].append(info)
        size += tensor_bytes(info)
    return parts


def _write_rest(folder: Path, section: ModelSection) -> None:
    config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
    config.dtype = getattr(torch, section.dtype)
    config.save_pretrained(folder)
    generation = Path(section.path) / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)
    AutoTokenizer.from_pretrained(section.path, trust_remote_code=section.trust_remote_code).save_pretrained(folder)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
