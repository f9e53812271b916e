"""Checkpoints are complete or absent: damage is refused with its reason, no moment of death loses the last good one."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_dist.errors import CheckpointError
from grpo_dist.learner import checkpoint
from grpo_dist.learner.checkpoint import CheckpointStore, verify
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, RunState, ScoredGroup, Verdict, VersionSpan

SHARDS = ("learner/zero_pp_rank_0_mp_rank_00_optim_states.pt", "learner/zero_pp_rank_1_mp_rank_00_optim_states.pt")


def scored(group_id: int) -> ScoredGroup:
    prompt = Prompt(id="p", token_ids=(4, 5), text="1+", answer={"value": 3}, extra={"level": 2})
    completion = Completion((6, 2), (-0.5, -0.25), "2", "stop", (VersionSpan(1, 0, 2),))
    rollout = RolloutGroup(GroupRequest(group_id, 0, prompt, 7), (completion,) * 2, 0.5, "rollout-0")
    return ScoredGroup(rollout, (Verdict(1.0, True, {"exact": 1.0}), Verdict(None, error="timeout", timed_out=True)))


def save(store: CheckpointStore, step: int, *, content: bytes = b"", **state: object) -> Path:
    aside = store.begin(step)
    for shard in SHARDS:
        (aside / shard).parent.mkdir(exist_ok=True)
        (aside / shard).write_bytes(content or f"{shard} of step {step}".encode() * 50)
    return store.commit(aside, RunState(step=step, **state), recipe_hash="abc", extra={"note": step})  # type: ignore[arg-type]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    state = RunState(
        step=12, next_group=96, samples_trained=6144, tokens_trained=9, seconds=1.5, wandb_id="w1",
        buffered=(scored(97), scored(99)),
    )  # fmt: skip
    aside = store.begin(12)
    for shard in SHARDS:
        (aside / shard).parent.mkdir(exist_ok=True)
        (aside / shard).write_bytes(b"x")
    path = store.commit(aside, state, recipe_hash="abc", extra={"note": 1})
    assert path == tmp_path / "checkpoints" / "000012"
    assert (store.root / "latest").read_text() == "000012\n"
    found = store.newest_good()
    assert (found.path, found.state, found.refused) == (path, state, [])
    assert found.manifest is not None
    assert (found.manifest.step, found.manifest.world, found.manifest.recipe_hash) == (12, 2, "abc")
    assert found.manifest.extra == {"note": 1}
    assert set(found.manifest.files) == {*SHARDS, "state.json", "buffered.pkl"}


def test_a_fresh_run_has_nothing(tmp_path: Path) -> None:
    found = CheckpointStore(tmp_path / "none", keep=1).newest_good()
    assert (found.path, found.state, found.refused) == (None, RunState(), [])


def truncate(path: Path) -> None:
    (path / SHARDS[1]).write_bytes((path / SHARDS[1]).read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray((path / SHARDS[1]).read_bytes())
    content[100] ^= 1
    (path / SHARDS[1]).write_bytes(content)


def flip_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 3', '"step": 4'))


def other_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, f"000003: {SHARDS[1]} has"),
        (flip, f"000003: the content of {SHARDS[1]} has changed"),
        (lambda p: (p / SHARDS[0]).unlink(), f"000003: {SHARDS[0]} is missing"),
        (lambda p: (p / "buffered.pkl").unlink(), "000003: buffered.pkl is missing"),
        (flip_state, "000003: the content of state.json has changed"),
        (lambda p: (p / "manifest.json").unlink(), "000003: manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_text('{"step": 3'), "000003: manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text("[]"), "000003: manifest.json cannot be read"),
        (other_format, "000003: written in format 99, this version reads 1"),
    ],
)
def test_damage_is_refused_and_the_last_good_wins(tmp_path: Path, spoil: Callable[[Path], None], reason: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    save(store, 2)
    spoil(save(store, 3))
    found = store.newest_good()
    assert found.path == tmp_path / "000002"
    assert found.state.step == 2
    assert len(found.refused) == 1
    assert found.refused[0].startswith(reason)


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    truncate(save(store, 1))
    flip(save(store, 2))
    with pytest.raises(CheckpointError, match=r"000002: the content of .* has changed .*; 000001: .* bytes"):
        store.newest_good()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 5, 7, 100, 1_000_000, 1_000_001):
        save(store, step)
    assert [p.name for p in store.candidates()] == ["1000001", "1000000"]
    assert [p.name for p in CheckpointStore(tmp_path, keep=1).candidates()] == ["1000001", "1000000"]
    save(CheckpointStore(tmp_path, keep=1), 1_000_002)
    assert [p.name for p in store.candidates()] == ["1000002"]


def test_what_an_interrupted_save_left_is_ignored_and_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 4)
    aside = store.begin(5)
    (aside / "learner").mkdir()
    (aside / SHARDS[0]).write_bytes(b"half")
    again = CheckpointStore(tmp_path, keep=2)
    assert again.newest_good().path == tmp_path / "000004"
    assert again.newest_good().refused == []
    assert aside.exists()  # a reader removes nothing: the writer may still be alive
    save(again, 6)
    assert not aside.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000004", "000006", "latest"]


def test_the_same_step_again_replaces_and_later_ones_are_an_abandoned_future(tmp_path: Path) -> None:
    """After a resume at 2, because 3 was damaged: 3 must not outlive the new 2 nor push it out with keep = 1."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    flip(save(CheckpointStore(tmp_path, keep=2), 3))
    assert store.newest_good().state.step == 2
    save(store, 2, content=b"again", seconds=9.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002", "latest"]
    assert store.newest_good().state.seconds == 9.0


def test_a_crash_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (save(store, 2)).rename(tmp_path / "000002.old")
    assert store.newest_good().state.step == 2
    save(store, 2, seconds=1.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002", "latest"]
    assert store.newest_good().state.seconds == 1.0


def test_a_full_disk_is_named_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file finds no room. (With a real small disk: tests/integration/test_checkpoint_learner.py.)"""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    real = checkpoint._write_durably
    for fails in ("state.json", "buffered.pkl", "manifest.json", "latest.part"):

        def write(path: Path, content: bytes, fails: str = fails) -> None:
            if path.name == fails:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            real(path, content)

        monkeypatch.setattr(checkpoint, "_write_durably", write)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written .*disk is full .* free\)"):
            save(store, 2)
        monkeypatch.setattr(checkpoint, "_write_durably", real)
        assert not list(tmp_path.glob("*.tmp"))
        assert (tmp_path / "000001").exists()
        assert store.newest_good().refused == []
    save(store, 3)
    assert [p.name for p in store.candidates()] == ["000003"]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one checkpoint"):
        CheckpointStore(tmp_path, keep=0)


# --- death at any moment ----------------------------------------------------------------------------------------------

CHILD = """
import os, sys, time
from pathlib import Path
from grpo_dist.learner import checkpoint
from tests.unit.test_checkpoint import CheckpointStore, save

real = os.fsync
def slow(descriptor):
    time.sleep(0.004)
    real(descriptor)
checkpoint.os.fsync = slow
store = CheckpointStore(Path(sys.argv[1]), keep=1)
print("ready", flush=True)
for step in range(2, 1000):
    save(store, step, seconds=float(step))
"""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    save(CheckpointStore(tmp_path, keep=1), 1, seconds=1.0)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


@pytest.mark.parametrize("seed", range(6))
def test_killed_while_saving(victim: subprocess.Popen[str], tmp_path: Path, seed: int) -> None:
    """keep = 1, kill -9 at a random moment of a save: what is found is whole, and is the newest finished one."""
    time.sleep(random.Random(seed).uniform(0.01, 0.4))
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    store = CheckpointStore(tmp_path, keep=1)
    found = store.newest_good()
    assert found.path is not None
    assert found.refused == []
    assert found.state.seconds == found.state.step == verify(found.path).step
    latest = int((tmp_path / "latest").read_text())
    assert latest <= found.state.step <= latest + 1
    save(store, 2000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["002000", "latest"]
