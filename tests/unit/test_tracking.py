"""W&B from outside: nothing is lost, nothing waits, no secret leaves (field faults e5, f12, i1, i5).

Each test runs the real wandb in its child process, offline or against a server that is not there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import Recipe
from grpo_dist.monitor.tracking import NullTracker, WandbTracker, open_tracker
from tests.conftest import tiny_recipe

SECRET = "dummy5ecret" * 4  # 44 characters: long enough to be taken for a key


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe.model_validate(
        tiny_recipe(run={"out": str(tmp_path)}, tracking={"wandb": {"mode": "offline", "tags": ["a"]}})
    )


@pytest.fixture
def open_one(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WandbTracker]:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def make(*, online: bool | None = False, run_id: str | None = None, said: list[str] | None = None) -> WandbTracker:
        warn = (lambda _: None) if said is None else said.append
        return WandbTracker(recipe, tmp_path, run_id=run_id, online=online, warn=warn, init_seconds=3, close_seconds=30)

    return make


def stored_records(file: Path) -> Iterator[Any]:
    """Records of a .wandb file: a header of 7 bytes, then LevelDB's log format (32 KiB blocks) with protobuf inside."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Every row that W&B holds, over all parts of the run, in the order in which they were written."""
    rows = []
    for file in sorted(folder.glob("wandb/*run-*/*.wandb"), key=lambda f: f.stat().st_mtime_ns):
        for record in stored_records(file):
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                )
    return rows


def run_ids(folder: Path) -> set[str]:
    return {
        record.run.run_id
        for file in folder.glob("wandb/*run-*/*.wandb")
        for record in stored_records(file)
        if record.WhichOneof("record_type") == "run"
    }


def test_disabled_tracks_nothing(recipe: Recipe, tmp_path: Path) -> None:
    wandb = recipe.tracking.wandb.model_copy(update={"mode": "disabled"})
    off = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"wandb": wandb})})
    tracker = open_tracker(off, tmp_path)
    tracker.log(1, {"x": 1.0})
    tracker.table("t", 1, ["a"], [[1]])
    tracker.alert(1, "x")
    tracker.close()
    assert isinstance(tracker, NullTracker)
    assert not (tmp_path / "wandb").exists()


def test_rows_out_of_order_are_all_kept_over_a_resume(open_one: Callable[..., WandbTracker], tmp_path: Path) -> None:
    """i1: train 5, evaluation of 4, train 6; then the run is resumed at 5. e5: same id, no step a second time."""
    first = open_one()
    first.log(5, {"train/loss": 0.5, "bad": float("nan")})
    first.log(4, {"eval/pass@1": 0.4})
    first.table("eval/samples", 4, ["prompt", "completion"], [["1+1=", "#2"]])
    first.log(6, {"train/loss": 0.6})
    first.alert(6, "it smells")
    first.close()
    second = open_one(run_id=first.run_id)
    assert second.run_id == first.run_id
    second.log(6, {"train/loss": 0.66})
    second.log(4, {"eval/pass@1": 0.44})
    second.table("eval/samples", 4, ["prompt", "completion"], [["1+1=", "#3"]])
    second.alert(6, "again")
    second.log(7, {"train/loss": 0.7})
    second.close()

    rows = history(tmp_path)
    assert [(r["step"], r.get("train/loss"), r.get("eval/pass@1")) for r in rows] == [
        (5, 0.5, None), (4, None, 0.4), (4, None, None), (6, 0.6, None), (7, 0.7, None),
    ]  # fmt: skip
    assert [r["_step"] for r in rows] == [1, 2, 3, 4, 6]  # W&B's own counter goes on: no row falls on another
    alerts = [one.alert.text for file in tmp_path.glob("wandb/*run-*/*.wandb") for one in stored_records(file)
              if one.WhichOneof("record_type") == "alert"]  # fmt: skip
    assert alerts == ["step 6: it smells"]
    assert rows[2]["eval/samples._type"] == "table-file"
    assert run_ids(tmp_path) == {first.run_id}


def test_what_the_folder_says_was_sent_counts_only_when_resumed(recipe: Recipe, tmp_path: Path) -> None:
    """A run killed before its first checkpoint has no id in one; a try that ended before step 1 is no resumed run."""
    memory = tmp_path / "wandb" / "grpo_dist.json"
    memory.parent.mkdir()
    memory.write_text(json.dumps({"id": "abc", "row": 9, "sent": {"train": 3, "eval": 0}}))
    had = []
    for run_id, resumed in ((None, None), (None, 0), ("abc", None), ("other", 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", _no_process)
            tracker = WandbTracker(
                recipe, tmp_path, run_id=run_id, resumed_step=resumed, online=False, warn=lambda _: None
            )
        had.append(tracker._had)
    assert had == [{}, {"train": 3, "eval": 0}, {"train": 3, "eval": 0}, {}]


def _no_process(*_: Any, **__: Any) -> None:
    raise OSError("none in this test")


def test_an_id_of_the_folder_is_taken_up_without_a_checkpoint(open_one: Callable[..., WandbTracker]) -> None:
    first = open_one()
    first.log(1, {})
    first.close()
    second = open_one()
    second.close()
    assert second.run_id == first.run_id


@pytest.mark.parametrize("server", ["closed", "silent"])
def test_a_server_that_is_not_there(
    server: str, open_one: Callable[..., WandbTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """i5: the run goes on at once, one warning, and the rows are in an offline run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "silent":
            listener.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        said: list[str] = []
        tracker = open_one(online=True, said=said)
        for step in range(1, 30):
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.close()
    assert len(said) == 1
    assert said[0].startswith("W&B cannot be reached (")
    assert "wandb sync" in said[0]
    assert [row["step"] for row in history(tmp_path)] == list(range(1, 30))


def test_auto_goes_online_only_with_a_key(
    open_one: Callable[..., WandbTracker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with_key: list[str] = []
    open_one(online=None, said=with_key).close()
    assert len(with_key) == 1
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    without: list[str] = []
    open_one(online=None, said=without).close()
    assert without == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(open_one: Callable[..., WandbTracker], tmp_path: Path) -> None:
    place = tmp_path / "wandb"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        said: list[str] = []
        tracker = open_one(said=said)
        for step in range(1, 200):
            tracker.log(step, {f"m{i}": step * 0.001 for i in range(30)})
        tracker.close()
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    assert len(said) == 1
    assert "metrics.jsonl" in said[0]


def test_no_secret_in_any_file(open_one: Callable[..., WandbTracker], tmp_path: Path) -> None:
    """f12"""
    tracker = open_one()
    tracker.log(1, {"x": 1.0})
    tracker.table("t", 1, ["a"], [["b"]])
    tracker.close()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 3
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def test_ends_with_the_driver(recipe: Recipe, tmp_path: Path) -> None:
    """kill -9 of the driver: the child and wandb's own service go, and what was logged is on disk."""
    code = (
        "import json, os, sys, time\nfrom pathlib import Path\nfrom grpo_dist.config import Recipe\n"
        "from grpo_dist.monitor.tracking import WandbTracker\n"
        "recipe = Recipe.model_validate(json.loads(sys.argv[1]))\n"
        "t = WandbTracker(recipe, Path(sys.argv[2]), run_id=None, online=False, warn=print)\n"
        "t.log(1, {'x': 1.0})\nmemory = Path(sys.argv[2]) / 'wandb' / 'grpo_dist.json'\n"
        "while not (memory.exists() and json.loads(memory.read_text())['row']): time.sleep(0.1)\n"
        "print(t._child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, recipe.model_dump_json(), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    child = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 45
    while child.exists() and child.joinpath("stat").read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not child.exists() or child.joinpath("stat").read_text().split()[2] == "Z"
    assert [row["x"] for row in history(tmp_path)] == [1.0]


def test_signals_for_the_run_do_not_end_it(open_one: Callable[..., WandbTracker], tmp_path: Path) -> None:
    tracker = open_one()
    tracker.log(1, {"x": 1.0})
    while not (tmp_path / "wandb" / "grpo_dist.json").exists():
        time.sleep(0.1)
    assert tracker._child is not None
    for sent in (signal.SIGINT, signal.SIGTERM):
        tracker._child.send_signal(sent)
    tracker.log(2, {"x": 2.0})
    tracker.close()
    assert [row["x"] for row in history(tmp_path)] == [1.0, 2.0]


def test_a_child_that_dies_costs_a_warning(open_one: Callable[..., WandbTracker]) -> None:
    said: list[str] = []
    tracker = open_one(said=said)
    assert tracker._child is not None
    tracker._child.kill()
    tracker._child.wait()
    for step in range(1, 5000):
        tracker.log(step, {f"m{i}": 1.0 for i in range(20)})
    tracker.close()
    tracker.log(9, {})  # after the end: ignored
    assert len(said) == 1
    assert "metrics.jsonl has them all" in said[0]


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_hung_child_is_left_behind_within_the_limit(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = tmp_path / "python"
    hung.write_text("#!/bin/sh\nexec sleep 1000\n")
    hung.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hung))
    said: list[str] = []
    tracker = WandbTracker(recipe, tmp_path, run_id=None, online=False, warn=said.append, close_seconds=1)
    for step in range(1, 20_000):  # more than the queue and the pipe hold
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert len(said) == 1
