"""From ZeRO-3 shards to full tensors in rank 0's host memory, a layer at a time, all ranks in lockstep.

    shards on R ranks ─► gather a group of tensors ─► rank 0 copies it to staging ─► release ─► next … ─► StagedWeights

Gathering and sending are apart on purpose: while rank 0 sends, no collective of the learners is pending, so a dead
engine cannot hang them, and a late engine is brought up to date from the staging without them. Extra memory on a device
is one group: a layer, or less where a layer exceeds ``gather_bytes`` (a larger tensor makes a group of its own). Rank
0's host memory holds one copy of the model, allocated once.

How shards are gathered is the caller's (``learner/zero3.py``): this file knows no deepspeed. The same walk feeds
exports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_dist.types import TensorInfo
from grpo_dist.weights.digest import tensor_digest

_LAYER = re.compile(r"^(.*?\.(?:layers|h|blocks)\.\d+)\.")

Consume = Callable[[TensorInfo, Tensor], object]  # must copy what it keeps
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """One parameter under its Hugging Face name. Its own shape is that of a shard; ``info`` has the full one.

    With ``low`` (A) and ``high`` (B) it goes out as ``parameter + scaling B A``: a LoRA adapter merged on the way.
    """

    info: TensorInfo
    parameter: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    scaling: float = 0.0

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.info)

    @property
    def shards(self) -> list[Tensor]:
        """What has to be gathered for it."""
        return [t for t in (self.parameter, self.low, self.high) if t is not None]


@dataclass(slots=True)
class StagedWeights:
    """One version of the weights, complete, in host memory of rank 0. Valid until the next ``stage``."""

    version: int
    infos: tuple[TensorInfo, ...]
    tensors: dict[str, Tensor]
    _digests: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(tensor_bytes(info) for info in self.infos)

    def digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = tensor_digest(self.tensors[name])
        return self._digests[name]


class ZeroWeightSource:
    """Stages the policy's weights. Every method is collective: all ranks call it, in the same order."""

    def __init__(
        self, tensors: Sequence[ShardedTensor], gather: Gather, *, gather_bytes: int, main: bool, pin: bool
    ) -> None:
        empty = [t.info.name for t in tensors if 0 in t.info.shape]
        if empty:
            raise ValueError(f"{empty[0]} has shape with a 0: the full shape of a shard is wanted, not its own")
        self.infos = tuple(t.info for t in tensors)
        self.groups = gather_groups(tensors, gather_bytes)
        self._gather, self._main, self._pin = gather, main, pin
        self._buffers: dict[str, Tensor] = {}

    def stage(self, version: int) -> StagedWeights | None:
        """The weights as they are now, on rank 0; None elsewhere."""
        if self._main and not self._buffers:
            self._buffers = {i.name: _host_tensor(i, self._pin) for i in self.infos}
        self.walk(lambda info, full: self._buffers[info.name].copy_(full))
        if not self._main:
            return None
        return StagedWeights(version, self.infos, self._buffers)

    def walk(self, consume: Consume) -> None:
        """Gather group by group; on rank 0 hand every full tensor to ``consume``, which must copy what it keeps.

        A consumer that fails must not leave the others alone in a collective: the walk ends first, then it raises.
        """
        failure: Exception | None = None
        for group in self.groups:
            with self._gather([shard for t in group for shard in t.shards]):
                if not self._main or failure is not None:
                    continue
                try:
                    for tensor in group:
                        consume(tensor.info, _full(tensor))
                except (OSError, RuntimeError, MemoryError, ValueError) as error:
                    failure = error
        if failure is not None:
            raise failure


def gather_groups(tensors: Sequence[ShardedTensor], gather_bytes: int) -> tuple[tuple[ShardedTensor, ...], ...]:
    """Neighbours of one layer together, in the model's order. Only a single tensor may exceed ``gather_bytes``."""
    groups: list[list[ShardedTensor]] = []
    key, size = None, 0
    for tensor in tensors:
        found = _LAYER.match(tensor.info.name)
        layer = found.group(1) if found else tensor.info.name
        if layer != key or size + tensor.bytes > gather_bytes:
            groups.append([])
            key, size = layer, 0
        groups[-1].append(tensor)
        size += tensor.bytes
    return tuple(tuple(g) for g in groups)


def tensor_bytes(info: TensorInfo) -> int:
    count = 1
    for n in info.shape:
        count *= n
    return count * getattr(torch, info.dtype).itemsize


def _full(tensor: ShardedTensor) -> Tensor:
    full = tensor.parameter.detach()
    if tuple(full.shape) != tensor.info.shape:
        raise ValueError(f"{tensor.info.name} was gathered as {tuple(full.shape)}, wanted {tensor.info.shape}")
    if tensor.low is None or tensor.high is None:
        return full
    # In fp32 whatever the dtype: half precision is rounded once, at the end. Where B is 0 the sum is the parameter.
    change = (tensor.high.detach().float() @ tensor.low.detach().float()) * tensor.scaling
    return (full.float() + change).to(full.dtype)


def _host_tensor(info: TensorInfo, pin: bool) -> Tensor:
    return torch.empty(info.shape, dtype=getattr(torch, info.dtype), pin_memory=pin)
