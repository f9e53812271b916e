"""The verbs of the command line that look before a run: plan and doctor. What they do is in planner.py and doctor/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command()(plan)
    app.command()(doctor)


def plan(
    words: Annotated[
        list[str], typer.Argument(metavar="[groups|memory|fleet] RECIPE [KEY=VALUE]...", help="What to plan.")
    ],
    cluster: Annotated[Path | None, typer.Option(help="Cluster file: compare with its nodes.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of a GPU, e.g. 79Gi.")] = None,
    as_json: AsJson = False,
) -> int:
    """Memory, batch arithmetic and GPU counts of a recipe, computed without loading anything."""
    from grpo_dist import planner

    return planner.plan(words, cluster=cluster, gpu_memory=gpu_memory, as_json=as_json)


def doctor(
    cluster: Annotated[Path | None, typer.Option(help="Cluster file: look at the place it names.")] = None,
    as_json: AsJson = False,
) -> int:
    """Is this machine, and the cluster, fit for a run? What to do about what is not."""
    from grpo_dist.doctor.verb import doctor as look

    return look(cluster=cluster, as_json=as_json)
