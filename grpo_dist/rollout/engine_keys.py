"""Which keys ``rollout.engine`` may have, read from vLLM's source without importing it (that takes ten seconds)."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from grpo_dist.errors import UserError

_CLASSES = {"EngineArgs", "AsyncEngineArgs"}


def engine_keys() -> frozenset[str]:
    """Fields of vLLM's engine arguments; empty where vLLM is not installed or looks different."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    if not source.is_file():
        return frozenset()
    return frozenset(
        field.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def refuse_unknown_engine_keys(keys: Iterable[str]) -> None:
    """Raises UserError that names the key and the nearest one that vLLM has."""
    known = engine_keys()
    for key in keys:
        if known and key not in known:
            nearest = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean rollout.engine.{nearest[0]}?" if nearest else ""
            raise UserError(f"rollout.engine.{key}: vLLM's engine has no such argument{hint}")
