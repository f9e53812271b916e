"""The digest that both ends of a publication compute, and the walk from shards to staging, with gathers made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from grpo_dist.types import TensorInfo
from grpo_dist.weights.digest import tensor_digest
from grpo_dist.weights.source import ShardedTensor, ZeroWeightSource, gather_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_digest_is_of_dtype_shape_and_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24) % 2).to(dtype).reshape(4, 6)
    digest = tensor_digest(tensor)
    assert tensor_digest(tensor.clone()) == digest
    assert tensor_digest(tensor.t().contiguous().t()) == digest  # other strides, same content
    assert tensor_digest(tensor.reshape(6, 4)) != digest
    other = tensor.clone()
    other[3, 5] = 0 if other[3, 5] else 1
    assert tensor_digest(other) != digest


def test_digest_tells_dtypes_and_signed_zeros_apart() -> None:
    assert tensor_digest(torch.zeros(2)) != tensor_digest(torch.zeros(2, dtype=torch.int32))
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert tensor_digest(nan) == tensor_digest(nan.clone())
    assert len({tensor_digest(torch.zeros(())), tensor_digest(torch.zeros(1)), tensor_digest(torch.zeros(0))}) == 3


def sharded(name: str, *shape: int) -> ShardedTensor:
    return ShardedTensor(TensorInfo(name, "float32", shape), torch.zeros(0))


def names(groups: Sequence[Sequence[ShardedTensor]]) -> list[list[str]]:
    return [[t.info.name for t in g] for g in groups]


def test_groups_are_layers_cut_at_the_bound() -> None:
    tensors = [
        sharded("model.embed_tokens.weight", 100),
        sharded("model.layers.0.q.weight", 10),
        sharded("model.layers.0.k.weight", 10),
        sharded("model.layers.1.q.weight", 10),
        sharded("model.layers.1.k.weight", 30),
        sharded("model.layers.10.q.weight", 1),
        sharded("model.norm.weight", 1),
        sharded("lm_head.weight", 100),
    ]
    assert names(gather_groups(tensors, 10**9)) == [
        ["model.embed_tokens.weight"],
        ["model.layers.0.q.weight", "model.layers.0.k.weight"],
        ["model.layers.1.q.weight", "model.layers.1.k.weight"],
        ["model.layers.10.q.weight"],
        ["model.norm.weight"],
        ["lm_head.weight"],
    ]
    cut = gather_groups(tensors, 120)  # 30 floats
    assert [t.info.name for g in cut for t in g] == [t.info.name for t in tensors]
    assert all(sum(t.bytes for t in g) <= 120 or len(g) == 1 for g in cut)
    assert ["model.layers.1.k.weight"] in names(cut)


class Cluster:
    """Gathers that are made up: parameters are empty outside, full inside."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.full = {n: torch.rand(s) for n, s in shapes.items()}
        self.tensors = [ShardedTensor(TensorInfo(n, "float32", s), torch.empty(0)) for n, s in shapes.items()]
        self.gathered: list[int] = []

    @contextmanager
    def gather(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        mine = [t for t in self.tensors if any(t.parameter is p for p in parameters)]
        self.gathered.append(len(mine))
        for t in mine:
            t.parameter.data = self.full[t.info.name]
        yield
        for t in mine:
            t.parameter.data = torch.empty(0)

    def source(self, *, main: bool) -> ZeroWeightSource:
        return ZeroWeightSource(self.tensors, self.gather, gather_bytes=64, main=main, pin=False)


SHAPES = {"model.layers.0.a": (4, 2), "model.layers.0.b": (3,), "model.layers.1.a": (40,), "model.norm": (2, 2)}


def test_staging_copies_into_the_same_buffers() -> None:
    cluster = Cluster(SHAPES)
    source = cluster.source(main=True)
    first = source.stage(1)
    assert first is not None
    assert [i.name for i in first.infos] == list(SHAPES)
    assert first.bytes == 4 * (8 + 3 + 40 + 4)
    where = {n: t.data_ptr() for n, t in first.tensors.items()}
    before = {n: first.digest(n) for n in SHAPES}
    for name, tensor in cluster.full.items():
        assert torch.equal(first.tensors[name], tensor)
        tensor.add_(1)
    second = source.stage(2)
    assert second is not None
    assert second.version == 2
    assert {n: t.data_ptr() for n, t in second.tensors.items()} == where
    assert all(second.digest(n) != before[n] for n in SHAPES)


def test_other_ranks_gather_as_often_and_hold_nothing() -> None:
    main, other = Cluster(SHAPES), Cluster(SHAPES)
    main.source(main=True).stage(1)
    assert other.source(main=False).stage(1) is None
    assert other.gathered == main.gathered


def test_a_failing_consumer_still_goes_through_all_gathers() -> None:
    cluster = Cluster(SHAPES)
    source, seen = cluster.source(main=True), []

    def consume(info: TensorInfo, full: Tensor) -> None:
        seen.append(info.name)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        source.walk(consume)
    assert seen == ["model.layers.0.a"]
    assert len(cluster.gathered) == len(source.groups)


def test_shapes_of_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="shape with a 0"):
        ZeroWeightSource([sharded("w", 0)], Cluster({}).gather, gather_bytes=1, main=True, pin=False)
    cluster = Cluster(SHAPES)
    cluster.full["model.norm"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"model.norm was gathered as \(3,\), wanted \(2, 2\)"):
        cluster.source(main=True).stage(1)
