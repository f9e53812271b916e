"""What runs on the head of a cluster: last checks on the spot, then the training run itself, in place of this process.

    secrets there? versions equal? started before? ─► exec: python -m grpo_dist.cli train RECIPE [--resume]

A scheduler that restarts a submission (Slurm's requeue, a retried RayJob, a resubmitted Ray job) calls the same line
again; the mark it left the first time turns it into a resume. Names of secrets arrive here, values never do: they
are in the environment of the node already.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.launch.driver import mark_driver


def missing_secrets(names: Sequence[str], env: Mapping[str, str]) -> list[str]:
    return [name for name in names if not env.get(name)]


def check_versions(wanted: Mapping[str, str]) -> None:
    """Raises UserError for every package that is absent here or differs from what the submitter has."""
    wrong = []
    for package, want in wanted.items():
        try:
            have = version(package)
        except PackageNotFoundError:
            have = "none"
        if have.split("+")[0] != want.split("+")[0]:
            wrong.append(f"{package}: {want} where the run was submitted, {have} here")
    if wrong:
        raise UserError(f"versions differ on {os.uname().nodename}: " + "; ".join(wrong))


def started_before(marks: Path, submission: str) -> bool:
    """Whether this submission has been here; leaves its mark."""
    marks.mkdir(parents=True, exist_ok=True)
    mark = marks / f"started-{submission}"
    if mark.exists():
        return True
    mark.touch()
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grpo_dist.launch.entry")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--submission", required=True, help="id that stays the same when the scheduler tries again")
    parser.add_argument("--marks", required=True, type=Path, help="folder that outlives a try (shared storage)")
    parser.add_argument("--secret", action="append", default=[], help="environment variable that must be set")
    parser.add_argument("--version", action="append", default=[], help="package==version that must be installed here")
    parser.add_argument("--module", default="grpo_dist.cli", help="what to run")
    options = parser.parse_args(arguments)
    try:
        if missing := missing_secrets(options.secret, os.environ):
            raise UserError(
                f"secret {', '.join(missing)} is not in the environment of {os.uname().nodename}: the cluster file "
                "lists it; set it where the nodes are started (docs/security.md)"
            )
        check_versions(dict(one.split("==", 1) for one in options.version))
        resume = ["--resume"] if started_before(options.marks, options.submission) else []
        mark_driver(options.marks)
    except (UserError, OSError) as error:
        print(f"grpo-dist: {error}", file=sys.stderr)
        return 2
    # The same process goes on: signals and the exit code are the run's own.
    return os.execv(
        sys.executable, [sys.executable, "-m", options.module, "train", options.recipe, *options.overrides, *resume]
    )


if __name__ == "__main__":
    sys.exit(main())
