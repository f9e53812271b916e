"""What is about to be submitted: recipe and cluster file brought together and checked before anything is sent.

    recipe + overrides + cluster file ─► fit, secrets, paths ─► Submission ─► a back end renders and sends it

The resolved recipe travels, not the file it came from: what is trained is what was checked. Its roles are bound to the
cluster's nodes by label, and its output goes to storage that the nodes see.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from grpo_dist.config import Recipe
from grpo_dist.errors import RecipeError
from grpo_dist.recipe_file import dump_recipe, load_recipe
from grpo_dist.submit.cluster import ROLE_LABEL, Role
from grpo_dist.submit.cluster_file import LoadedCluster, load_cluster
from grpo_dist.submit.cluster_rules import fit_problems, missing_secrets

PLACED: dict[Role, str] = {"learner": "learner", "rollout": "rollout", "verifier": "verifiers"}  # role -> its section


@dataclass(frozen=True, slots=True)
class Submission:
    """One run on one cluster, ready to be rendered."""

    id: str  # unique; stays the same when a scheduler tries again
    recipe: Recipe  # as the nodes will read it
    loaded: LoadedCluster
    module: str = "grpo_dist.cli"  # what the nodes run

    @property
    def run(self) -> str:
        return self.recipe.run.name

    @property
    def run_dir(self) -> PurePosixPath:
        """The run folder as the nodes see it."""
        return PurePosixPath(self.recipe.run_dir)

    @property
    def launch(self) -> PurePosixPath:
        """Folder of recipe, token and attempts, beside the run folders, as the nodes see it."""
        return PurePosixPath(self.recipe.run.out) / ".launch" / self.run

    def recipe_text(self) -> str:
        return f"# {self.header}\n{dump_recipe(self.recipe)}"

    @property
    def header(self) -> str:
        """Says of every rendered file where it came from."""
        source = f"{self.loaded.path.name} (sha256 {self.loaded.hash})"
        return f"run {self.run}, rendered from {source} by grpo-dist {own_version()}"

    def entry(self, recipe: str, python: str | None = None) -> list[str]:
        """The command that the head runs; the same at every attempt."""
        command = [
            python or self.loaded.cluster.python, "-m", "grpo_dist.launch.entry", recipe, "--submission", self.id,
            "--marks", str(self.launch), "--version", f"grpo-dist=={own_version()}",
            "--version", f"ray=={ray_version()}",
        ]  # fmt: skip
        for name in self.loaded.cluster.secrets:
            command += ["--secret", name]
        return command if self.module == "grpo_dist.cli" else [*command, "--module", self.module]


def own_version() -> str:
    return version("grpo-dist")


def ray_version() -> str:
    return version("ray")


def make_submission(
    recipe: str | Path, cluster: str | Path, overrides: Sequence[str] = (), *, module: str = "grpo_dist.cli",
    env: Mapping[str, str] = os.environ, dry_run: bool = False,
) -> Submission:  # fmt: skip
    """Load and check both files.

    Raises:
        RecipeError: everything that is wrong, in one message.
    """
    loaded = load_cluster(cluster)
    asked = load_recipe(recipe, overrides)
    problems = [f"{loaded.path}: {problem}" for problem in fit_problems(loaded.cluster, asked)]
    if not dry_run and (missing := missing_secrets(loaded.cluster, env)):
        problems.append(
            f"{loaded.path}: secrets: {', '.join(missing)} not set in this environment, from where it is handed on"
        )
    if problems:
        raise RecipeError("\n".join(problems))
    bound = load_recipe(recipe, [*overrides, *placement_overrides(loaded), *storage_overrides(loaded, asked)])
    return Submission(f"{short_name(bound.run.name)}-{secrets.token_hex(3)}", bound, loaded, module)


def placement_overrides(loaded: LoadedCluster) -> list[str]:
    """Binds every role to its nodes by label; nothing to bind when there is only one kind of node."""
    cluster = loaded.cluster
    if cluster.backend == "local" or cluster.backend == "ray":
        return [
            f"{section}.placement.labels={_flow(cluster.roles.of(role).labels)}"
            for role, section in PLACED.items()
            if cluster.roles.of(role).labels
        ]
    if len(cluster.roles.groups()) == 1:
        return []
    return [
        f"{section}.placement.labels={_flow({ROLE_LABEL: cluster.roles.host_of(role)})}"
        for role, section in PLACED.items()
    ]


def storage_overrides(loaded: LoadedCluster, recipe: Recipe) -> list[str]:
    """Absolute, so that it means the same on every node and outlives a job's working folder."""
    runs = loaded.cluster.storage.runs or PurePosixPath(recipe.run.out.resolve())
    return [f"run.out={_flow(str(runs))}"]


def short_name(run: str) -> str:
    """At most 38 characters of a DNS label (a RayJob's name has 47, seven go to the unique end)."""
    name = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    name = name if name[:1].isalpha() else f"r-{name}".rstrip("-")
    return name[:38].rstrip("-")


def shell(words: Sequence[str]) -> str:
    """One line of shell words. Commas are quoted too: in an array they look like separators, and are none."""
    return " ".join(f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word) for word in words)


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    import json

    return json.dumps(value)
