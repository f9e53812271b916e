"""The learner's state through a checkpoint: bit for bit at the same number of ranks, to 1e-5 at another.

With several updates a step and a reference that follows the policy, whose state is part of the checkpoint.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from grpo_dist.config import LearnerSection
from grpo_dist.data.minibatches import build_batches
from grpo_dist.errors import CheckpointError
from grpo_dist.learner.checkpoint import CheckpointStore
from grpo_dist.types import RunState
from tests.integration.learner_probe import Group, samples

pytestmark = pytest.mark.ray
KEYS: dict[str, Any] = {
    "algorithm": {"kl": {"beta": 0.05, "reference": "ema", "ema": 0.3}}, "schedule": {"name": "linear", "warmup_steps": 2}, "total_steps": 8,
    "optimizer": {"weight_decay": 0.01},
}  # fmt: skip


def train(group: Group, first: int, last: int) -> list[float]:
    """Losses and gradient norms of some steps; each step has data of its own, and two passes of two mini-batches."""
    out, section = [], LearnerSection(updates_per_batch=2, epochs=2, micro_batch_tokens=200)
    for step in range(first, last + 1):
        batches = build_batches(samples(16, seed=step), section, ranks=len(group.ranks), seed=(0, step))
        seen = group.step(batches)
        out += [seen["train/loss"], seen["train/grad_norm"], seen["train/kl"], seen["train/lr"]]
    return out


def save(group: Group, store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    group.same("save", folder)
    return store.commit(folder, RunState(step=step))


@pytest.fixture(scope="module")
def written(ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two ranks: saved after steps 2 and 4, then trained on to 6 without a stop."""
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints", keep=3)
    group = Group(tiny_model, 2, **KEYS)
    train(group, 1, 2)
    save(group, store, 2)
    from_2 = train(group, 3, 4)
    save(group, store, 4)
    from_4 = train(group, 5, 6)
    yield {"store": store, "group": group, "from_2": from_2, "from_4": from_4, "digests": group.digests(6)}
    group.end()


def test_same_ranks_go_on_bit_for_bit(written: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Also a second time: resumed at 2, saved at 4, resumed again."""
    first = Group(tiny_model, 2, **KEYS)
    try:
        assert first.same("load", written["store"].root / "000002") == [2, 2]
        assert train(first, 3, 4) == written["from_2"]
        again = save(first, CheckpointStore(tmp_path, keep=1), 4)
    finally:
        first.end()
    second = Group(tiny_model, 2, **KEYS)
    try:
        assert second.same("load", again) == [4, 4]
        assert train(second, 5, 6) == written["from_4"]
        assert second.digests(6) == written["digests"]
        with pytest.raises(RuntimeError, match="has not trained yet"):
            second.same("load", again)
    finally:
        second.end()


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks(written: dict[str, Any], tiny_model: Path, tmp_path: Path, world: int) -> None:
    """Through the universal format, in a scratch folder that is gone afterwards; saved again by the new ranks."""
    source = shutil.copytree(written["store"].root / "000002", tmp_path / "000002")
    group = Group(tiny_model, world, **KEYS)
    try:
        assert group.same("load", source) == [2] * world
        assert [p.name for p in tmp_path.iterdir()] == ["000002"]
        assert train(group, 3, 4) == pytest.approx(written["from_2"], abs=1e-5)
        manifest_world = save(group, CheckpointStore(tmp_path / "own", keep=1), 4)
        assert train(group, 5, 6) == pytest.approx(written["from_4"], abs=1e-5)
        from grpo_dist.learner.checkpoint import verify

        assert verify(manifest_world).world == world
    finally:
        group.end()


def test_a_missing_shard_is_refused_and_the_older_one_chosen(written: dict[str, Any], tmp_path: Path) -> None:
    root = shutil.copytree(written["store"].root, tmp_path / "checkpoints")
    next((root / "000004").rglob("*rank_1*_optim_states.pt")).unlink()
    found = CheckpointStore(root, keep=2).newest_good()
    assert found.path == root / "000002"
    assert found.state.step == 2
    assert found.manifest is not None
    assert found.manifest.world == 2
    assert len(found.refused) == 1
    assert "000004: learner/" in found.refused[0]
    assert "is missing" in found.refused[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("room", [10_000, 500_000, 1_000_000])
def test_a_full_disk_fails_on_all_ranks_and_they_go_on(written: dict[str, Any], small_disk: Path, room: int) -> None:
    """keep = 1: the checkpoint of before stays, and training can go on. ``room``: for nothing, or one rank's shards."""
    group, store = written["group"], CheckpointStore(small_disk / "checkpoints", keep=1)
    save(group, store, 6)
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(b"x" * (free - room))
    aside = store.begin(7)
    for answer in [rank.save.remote(aside) for rank in group.ranks]:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(answer, timeout=60)
        assert isinstance(caught.value.cause, CheckpointError)
        assert "learner rank" in str(caught.value.cause)
        assert "000007.tmp" in str(caught.value.cause)
        assert "No space left on device" in str(caught.value.cause)
    store.abort(aside)
    found = store.newest_good()
    assert (found.state.step, found.refused) == (6, [])
    train(group, 7, 7)
    (small_disk / "ballast").unlink()
    save(group, store, 7)
    assert [p.name for p in store.candidates()] == ["000007"]


def test_state_that_is_not_there(written: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no learner state"):
        ray.get(Group(tiny_model, 1).ranks[0].load.remote(tmp_path))
