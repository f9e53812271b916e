"""Whole runs over NCCL on 1, 2 and 4 GPUs, and the same body over Gloo on CPUs. The GPU ones are unrun (docs/gpu.md).

One GPU holds a rank or an engine, never both: NCCL refuses two members on one device, so a run starts at two GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist import cli
from tests.gpu.system.body import Shape, devices, learned, whole_run
from tests.integration.runs import command, events, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def needs(gpus: int) -> list[pytest.MarkDecorator]:
    """Marks of a test for this many GPUs."""
    here = devices()
    reason = f"wants {gpus} GPU{'s' if gpus > 1 else ''}, this machine has {here}"
    return [pytest.mark.gpu, pytest.mark.skipif(here < gpus, reason=reason)]


def on_gpus(name: str, shape: Shape) -> object:
    return pytest.param(shape, id=f"{shape.gpus}gpu-{name}", marks=needs(shape.gpus))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(ranks=2, staleness=1, device="cpu", steps=3), id="cpu-2-ranks-1-engine"),
        on_gpus("rank-and-engine", Shape()),
        on_gpus("bf16-one-behind", Shape(dtype="bfloat16", staleness=1)),
        on_gpus("2-ranks-tp2", Shape(ranks=2, tensor_parallel=2, staleness=1)),
        on_gpus("2-ranks-2-engines", Shape(ranks=2, engines=2, staleness=1)),
        # More than two ranks: where gathering while sending is reported to hang. Ours gathers first.
        on_gpus("3-ranks-1-engine", Shape(ranks=3)),
    ],
)
def test_a_whole_run(shape: Shape, tmp_path: Path) -> None:
    out = whole_run(tmp_path, shape)
    if shape.steps == 20:
        learned(out)


@pytest.mark.parametrize("gpus", [pytest.param(0, id="cpu"), pytest.param(1, id="1gpu", marks=needs(1))])
def test_one_device_for_rank_and_engine_is_refused_in_one_message(
    gpus: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many GPUs as it may see: too few for a rank and an engine, told before anything starts."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    assert cli.run_command(["check", "quickstart", "weights.backend=nccl"]) == 2
    said = capfd.readouterr().err
    assert "the cluster cannot hold this run: no node has room for one more" in said
    assert "wanted     learner: 1 x (0.25 CPU, 1 GPU)" in said
    assert f"available  this machine: {os.cpu_count()} CPU, {gpus} GPU" in said


@pytest.mark.parametrize("shape", [on_gpus("resume", Shape(staleness=1, steps=6))])
def test_a_run_that_is_killed_goes_on_from_its_checkpoint(shape: Shape, tmp_path: Path) -> None:
    """The driver is killed after a checkpoint; --resume finishes, and the GPUs are free in between."""
    words = ["quickstart", "run.name=system", f"run.out={tmp_path}", *shape.words, "checkpoint.every=2"]
    out = tmp_path / "system"
    with command("train", *words, cwd=tmp_path) as run:
        run.until(lambda: len(metrics(out)) >= 3, 400, "third step")
        run.process.kill()
        run.nothing_left()
    with command("train", *words, "--resume", cwd=tmp_path) as run:
        assert run.wait(540) == 0, run.output[-3000:]
    assert events(out, "resumed")
    assert [row["step"] for row in metrics(out)] == list(range(1, 7))


@pytest.mark.parametrize("shape", [on_gpus("doctor", Shape())])
def test_the_doctor_finds_nothing_wrong_with_this_machine(shape: Shape, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_dist.cli", "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "CUDA" in done.stdout
    assert shape.gpus <= devices()
