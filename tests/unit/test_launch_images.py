"""Images: linted, one set of versions everywhere, no root, nothing but sources sent to the builder; the compose file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_dist.launch.node_options import parse
from grpo_dist.recipe_file import load_recipe
from grpo_dist.submit.plan import ray_version

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]


def constraints() -> dict[str, str]:
    lines = [line.strip() for line in (DOCKER / "constraints.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("hadolint is not installed (pip install '.[dev]')")
    done = subprocess.run([tool, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_pinned_and_does_not_run_as_root(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^USER (.*)$", text, re.M)[-1] == "1000"
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.M)
    assert ":" in base
    assert not base.endswith(":latest")
    extras = project()["optional-dependencies"]
    vllm = {one.split("==")[1] for extra in ("cpu", "gpu") for one in extras[extra] if one.startswith("vllm")}
    assert vllm == set(re.findall(r"^ARG VLLM=(\S+)$", text, re.M))
    assert not re.search(r"(API_KEY|TOKEN|PASSWORD)=", text)
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"  # everything stays, except what is named


def test_versions_agree_everywhere() -> None:
    from packaging.requirements import Requirement

    pins = constraints()
    assert pins["ray"] == ray_version()
    for text in project()["dependencies"]:
        wanted = Requirement(text)
        if wanted.name in pins:
            assert wanted.specifier.contains(pins[wanted.name]), f"{text} and {wanted.name}=={pins[wanted.name]}"
    torch = re.findall(r"^ARG TORCH=(\S+)$", (DOCKER / "Dockerfile.cpu").read_text(), re.M)
    assert torch == [pins["torch"]]
    for path in IMAGES:
        assert re.findall(r"^ARG VERSION=(\S+)$", path.read_text(), re.M) == [project()["version"]]


def test_the_entry_point_knows_every_verb() -> None:
    """What is no verb is run as it is, so that KubeRay can start Ray in the image."""
    script = DOCKER / "entrypoint.sh"
    done = subprocess.run(["bash", str(script), "printf", "as it is"], capture_output=True, text=True, timeout=20)
    assert done.stdout == "as it is"
    text = script.read_text()
    for verb in ("train", "check", "eval", "submit", "jobs", "status", "logs", "stop", "recipes", "report", "export"):
        assert re.search(rf"\b{verb}\b", text)


def test_the_compose_file_starts_nodes_that_exist() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    head = services["head"]["command"]
    options = parse(head[1:])
    assert options.head
    assert options.role == "learner"
    words = list(options.command)
    assert words[:3] == ["grpo-dist", "train", "quickstart"]
    recipe = load_recipe(words[2], words[3:])
    for role, section in (("learner", recipe.learner), ("rollout", recipe.rollout), ("verifier", recipe.verifiers)):
        assert section.placement.labels == {"grpo.dev/role": role}
    for role in ("rollout", "verifier"):
        other = parse(services[role]["command"][1:])
        assert (other.role, other.head_address) == (role, f"head:{options.gcs_port}")
        assert other.token == options.token
        assert services[role]["shm_size"] == "2g"
