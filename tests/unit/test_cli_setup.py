"""The set-up that every make target does first: clear sentences, and at once when there is nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "venv.sh", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def set_up(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "HOME": str(checkout), **env}
    return subprocess.run(
        [checkout / "tools" / "venv.sh"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def fake(checkout: Path, name: str, script: str) -> Path:
    file = checkout / "bin" / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_an_unsuitable_python_is_named(checkout: Path) -> None:
    old = fake(checkout, "python-old", "exit 1")
    done = set_up(checkout, PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr == (f"set-up stopped: wanted Python 3.11 or 3.12, found {old}; set PYTHON=/path/to/python3.11\n")
    assert not (checkout / ".venv").exists()


def test_a_full_disk_is_named(checkout: Path) -> None:
    fake(checkout, "df", "printf 'Filesystem 1048576-blocks Used Available\\n/dev/x 9 9 2100 9%% /\\n'")
    done = set_up(checkout)
    assert done.returncode == 1
    assert done.stderr.startswith("set-up stopped: wanted 6 GB of free disk for the environment in ")
    assert done.stderr.endswith("found 2 GB\n")
    assert not (checkout / ".venv").exists()


def test_another_system_is_named(checkout: Path) -> None:
    fake(checkout, "uname", "echo Darwin")
    assert set_up(checkout).stderr == "set-up stopped: vLLM and DeepSpeed run on Linux only; this is Darwin\n"


def test_a_second_call_does_nothing(checkout: Path) -> None:
    key = subprocess.run(
        "cat pyproject.toml tools/venv.sh | sha256sum | cut -c1-16",
        shell=True, cwd=checkout, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / f".made-for-{key}").touch()
    fake(checkout, "df", "exit 1")
    done = set_up(checkout, PYTHON="/nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("\n# another environment is wanted\n")
    assert set_up(checkout, PYTHON="/nowhere").returncode == 1
