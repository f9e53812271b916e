"""Shards of a tensor among another number of ranks than wrote them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_dist.learner.ds_checkpoint import own_shard


def shards(tensor: Tensor, ranks: int) -> list[Tensor]:
    """As ZeRO-3 cuts: equal sizes, the end padded with whatever was there."""
    size = math.ceil(len(tensor) / ranks)
    padded = torch.full((size * ranks,), torch.nan)
    padded[: len(tensor)] = tensor
    return list(padded.split(size))


def test_by_hand() -> None:
    five = torch.arange(5.0)
    three = shards(five, 3)  # 0 1 | 2 3 | 4 -
    assert [own_shard(three, 5, r, 3).tolist() for r in range(2)] == [[0, 1, 2], [3, 4]]
    assert [own_shard(three, 5, r, 2).tolist() for r in range(3)] == [[0, 1], [2, 3], [4]]
    assert own_shard(three, 5, 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert [own_shard(shards(five, 1), 5, r, 1).tolist() for r in range(5)] == [[0], [1], [2], [3], [4]]


@given(numel=st.integers(1, 40), before=st.integers(1, 7), now=st.integers(1, 7))
def test_nothing_is_lost_or_invented(numel: int, before: int, now: int) -> None:
    """Also with more ranks than elements, where the last shards are all padding."""
    tensor = torch.arange(float(numel))
    size = math.ceil(numel / now)
    parts = [own_shard(shards(tensor, before), numel, rank, size) for rank in range(now)]
    assert torch.cat(parts).tolist() == tensor.tolist()
    assert all(len(part) <= size for part in parts)
