"""From shards to full tensors: names, shapes and values, tied and untied, in bounded pieces; the exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors import safe_open

from grpo_dist.errors import CheckpointError
from tests.conftest import build_tiny_model
from tests.integration.learner_probe import Group, samples

pytestmark = pytest.mark.ray


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("tied", [True, False])
def test_staged_and_exported_weights(ray_cluster: None, request: Any, tmp_path: Path, tied: bool) -> None:
    """Two ranks: untouched weights are those of the folder; trained ones load in plain transformers: same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue("tiny_model" if tied else "tiny_model_untied")
    group = Group(folder, 2)
    try:
        reports = group.same("stage", 0)
        assert [r.tensors for r in reports] == [len(on_disk(folder)), 0]
        staged, disk = ray.get(group.ranks[0].staged.remote()), on_disk(folder)
        assert staged.keys() == disk.keys()
        assert ("lm_head.weight" in staged) is not tied
        for name, tensor in disk.items():
            assert staged[name].shape == tuple(tensor.shape)
            assert tensor.numel() > 0
            assert torch.equal(torch.tensor(staged[name]), tensor), name

        first = group.digests(0)
        batch = group.batch(samples(16), 200)
        group.update(batch)
        second = group.digests(1)
        assert all(second[name] != first[name] for name in first)  # both of embed_tokens and lm_head when untied

        out = tmp_path / "exported"
        group.same("export", out)
        assert not out.with_name("exported.tmp").exists()
        staged = ray.get(group.ranks[0].staged.remote())
        model = AutoModelForCausalLM.from_pretrained(out)
        state = model.state_dict()
        for name, array in staged.items():
            assert torch.equal(state[name], torch.tensor(array)), name
        assert model.config.tie_word_embeddings is tied
        assert model.config.use_cache is True
        assert AutoTokenizer.from_pretrained(out).encode("12+3") == AutoTokenizer.from_pretrained(folder).encode("12+3")
        logits = plain_logits_of_engine(group, batch)
        with torch.no_grad():
            ids = torch.tensor(batch.shards[0][0].token_ids[: batch.shards[0][0].segment_lengths[0]])
            assert (model(ids[None]).logits[0] - logits).abs().max() < 5e-6

        with pytest.raises(CheckpointError, match="exists already"):
            group.same("export", out)
        group.update(batch)  # a refused export leaves the ranks in step
    finally:
        group.end()


def plain_logits_of_engine(group: Group, batch: Any) -> torch.Tensor:
    """(T, V) of rank 0's first sequence."""
    shards = batch.shards

    def logits(policy: Any) -> torch.Tensor:
        from grpo_dist.learner.model import Packed

        packed = Packed.of(shards[policy.spec.rank][0], policy.device)
        return policy.plain_logits(packed)[: packed.segments.lengths[0]].clone()

    return group.same("run", logits)[0]


@pytest.fixture(scope="module")
def ten_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("ten") / "m", tied=True, hidden=288, layers=4)


def test_gathering_is_bounded(ray_cluster: None, ten_megabytes: Path, tmp_path: Path) -> None:
    """A 10 MB model, 1 MB at a time, 2 ranks: many groups, never more gathered than the bound or one larger tensor."""
    bound = 1 << 20
    group = Group(ten_megabytes, 2, zero={"gather_bytes": bound})

    def watched(policy: Any) -> dict[str, Any]:
        import threading
        from contextlib import contextmanager

        for thread in threading.enumerate():  # rank 0 loads vllm aside: its memory is not the staging's
            if thread.name == "load sender":
                thread.join(120)
        source, seen = policy._source, []
        parameters = list(policy.engine.module.parameters())
        inner = source._gather

        @contextmanager
        def gather(wanted: Any) -> Any:
            with inner(wanted):
                seen.append(sum(p.data.numel() * p.data.element_size() for p in parameters))
                yield

        source._gather = gather
        policy.stage(0)
        with open("/proc/self/clear_refs", "w") as file:  # from here the peak of resident memory counts anew
            file.write("5")
        before = _status("VmRSS")
        policy.stage(1)
        peak = _status("VmHWM") - before
        source._gather = inner
        sizes = [t.bytes for g in source.groups for t in g]
        return {
            "groups": len(source.groups), "seen": max(seen), "largest": max(sizes), "total": sum(sizes), "peak": peak,
        }  # fmt: skip

    def exported_in_pieces(policy: Any) -> str | None:
        from grpo_dist.learner.export import export_folder

        main = policy.spec.rank == 0
        return export_folder(tmp_path / "pieces", policy.spec.model, policy._source, main=main, shard_bytes=3 << 20)

    try:
        for found in group.same("run", watched):
            assert found["total"] > 9e6
            assert found["groups"] > 9
            assert found["largest"] <= bound
            assert found["seen"] <= bound
            # A gather holds the flat buffer beside the tensors cut from it. What else is resident is pages, not pieces.
            assert found["peak"] < found["total"] / 2, found
        assert group.same("run", exported_in_pieces) == [None, None]
        index = json.loads((tmp_path / "pieces" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        from transformers import AutoModelForCausalLM

        state = AutoModelForCausalLM.from_pretrained(tmp_path / "pieces").state_dict()
        for name, tensor in on_disk(ten_megabytes).items():
            assert torch.equal(state[name], tensor), name
    finally:
        group.end()


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {key} in /proc/self/status")
