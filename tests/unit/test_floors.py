"""The house of ARCHITECTURE: a module imports only from its own floor and those below. Read from the real sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpo_dist

ROOT = Path(grpo_dist.__file__).parent

# The longest matching prefix decides. A module that matches none fails the test: it needs a floor first.
FLOORS = {
    "types": 0, "config": 0, "deepspeed_keys": 0, "errors": 0, "yaml_lines": 0, "recipe_keys": 0, "recipe_file": 0,
    "algorithms": 1, "verifiers": 1, "metrics": 1, "plan": 1,
    "data": 2, "rollout.pipeline": 2, "rollout.selection": 2, "rollout.seeds": 2, "evaluate": 2,
    "rollout": 3, "learner": 3, "weights": 3, "monitor": 3,
    "rollout.worker": 4, "learner.rank": 4, "verifiers.worker": 4, "verifiers.reward_worker": 4,
    "fleet": 5,
    "train": 6, "run": 6, "saved": 6, "step_clock": 6, "signals": 6, "model_folder": 6, "check": 6, "replay": 6,
    "quickstart": 6, "submit": 6, "launch": 6,
    "planner": 6, "doctor": 6,
    "cli": 7, "cli_before": 7,
}  # fmt: skip
HEAVY = {"ray", "vllm", "deepspeed", "wandb"}
HEAVY_FREE_FLOORS = (0, 1, 2)

# One heavy library per room: where it may be imported at all.
ONLY_IN = {
    "deepspeed": ("learner.",),
    "wandb": ("monitor.wandb_child",),
    "matplotlib": ("monitor.report", "monitor.charts"),
    "vllm": ("rollout.", "weights."),
}


def modules() -> dict[str, Path]:
    found = {}
    for file in ROOT.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found[name] = file
    return found


def floor(module: str) -> int | None:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (level := FLOORS.get(".".join(parts[:end]))) is not None:
            return level
    return None


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import statement, those inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.startswith("grpo_dist.") and inner.removeprefix("grpo_dist.") in modules()
                yield (inner if is_module else node.module, node.lineno)


def sources() -> dict[str, Path]:
    return {name: file for name, file in modules().items() if file.name != "__init__.py"}


def test_every_module_has_a_floor() -> None:
    assert [name for name in sources() if floor(name) is None] == []


def test_no_module_imports_from_a_floor_above() -> None:
    climbs = []
    for name, file in sources().items():
        for imported, line in imports(file):
            if imported.startswith("grpo_dist."):
                target = imported.removeprefix("grpo_dist.")
                if (floor(target) or 0) > (floor(name) or 0):
                    climbs.append(f"{name}:{line} (F{floor(name)}) imports {target} (F{floor(target)})")
    assert climbs == []


def test_low_floors_name_no_heavy_library() -> None:
    named = [
        f"{name}:{line} imports {imported}"
        for name, file in sources().items()
        if floor(name) in HEAVY_FREE_FLOORS
        for imported, line in imports(file)
        if imported.split(".")[0] in HEAVY
    ]
    assert named == []


def test_low_floors_load_no_heavy_library() -> None:
    low = sorted(f"grpo_dist.{name}" for name in sources() if floor(name) in HEAVY_FREE_FLOORS)
    code = (
        "import importlib, sys\n"
        f"for name in {low!r}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_heavy_libraries_stay_in_their_rooms() -> None:
    strays = [
        f"{name}:{line} imports {imported}"
        for name, file in sources().items()
        for imported, line in imports(file)
        if (rooms := ONLY_IN.get(imported.split(".")[0])) is not None and not f"{name}.".startswith(rooms)
    ]
    assert strays == []


# Not declared by name, but by a package that is declared and cannot do without it.
BROUGHT = {
    "pydantic_core": "pydantic", "tokenizers": "transformers", "huggingface_hub": "transformers", "pyarrow": "datasets",
    "referencing": "jsonschema", "aiohttp": "ray", "requests": "ray",
}  # fmt: skip
CALLED = {"pyyaml": "yaml"}  # package -> module, where the names differ


def test_every_library_is_declared() -> None:
    """A clean environment has what the code imports; checked here because the developer's has more."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    packages = {re.split(r"[\[<>=~! ]", one)[0].lower() for one in wanted}
    declared = {CALLED.get(name, name.replace("-", "_")) for name in packages} | {"vllm"}
    used = {imported.split(".")[0] for file in sources().values() for imported, _ in imports(file)}
    third = {name for name in used if name not in sys.stdlib_module_names and name != "grpo_dist"}
    assert sorted(name for name in third if BROUGHT.get(name, name) not in declared) == []


def test_init_files_are_empty() -> None:
    assert [name for name, file in modules().items() if file.name == "__init__.py" and file.read_text().strip()] == []


def test_the_floor_table_finds_a_climb(tmp_path: Path) -> None:
    """The reader of imports sees plain, from-, nested and submodule imports."""
    file = tmp_path / "x.py"
    file.write_text(
        "import ray.util\nfrom grpo_dist import config\nfrom grpo_dist.types import Prompt\n"
        "def f():\n    from grpo_dist.fleet import pool\n"
    )
    assert [name for name, _ in imports(file)] == [
        "ray.util", "grpo_dist.config", "grpo_dist.types", "grpo_dist.fleet.pool",
    ]  # fmt: skip
    assert (floor("fleet.pool"), floor("rollout.worker"), floor("rollout.engine"), floor("nowhere")) == (5, 4, 3, None)
