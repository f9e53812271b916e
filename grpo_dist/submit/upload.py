"""What is sent along to a cluster that does not share this machine's files: one zip, looked at before it leaves.

Left out on purpose: version control, environments, caches, runs and checkpoints, and what .gitignore-like patterns in
``ray.excludes`` name. Too much is refused with the biggest files named, before anything is uploaded.
"""

from __future__ import annotations

import fnmatch
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_dist.errors import UserError

ALWAYS_LEFT_OUT = (
    ".git", ".hg", ".svn", ".venv", "venv", "env", "__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", "node_modules", "wandb", "runs", "checkpoints", "*.egg-info", ".launch", "ray_token",
    ".env", ".netrc", "*.pem",
    "*.key", "id_rsa*", "id_ed25519*",
)  # fmt: skip


def files_of(folder: Path, excludes: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """(file, name in the zip) of everything that goes along, sorted."""
    patterns = [*ALWAYS_LEFT_OUT, *excludes]

    def out(relative: str) -> bool:
        name = relative.rsplit("/", 1)[-1]
        return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(relative, p.rstrip("/")) for p in patterns)

    for base, folders, names in os.walk(folder):
        here = Path(base).relative_to(folder)
        folders[:] = sorted(one for one in folders if not out((here / one).as_posix()))
        for name in sorted(names):
            relative = (here / name).as_posix()
            if not out(relative) and (Path(base) / name).is_file():
                yield Path(base) / name, relative


def pack(recipe: str, folder: Path | None, excludes: Sequence[str], limit: int) -> bytes:
    """The zip: the folder's files and the recipe as ``grpo-recipe.yaml``. Same content, same bytes.

    Raises:
        UserError: more than ``limit`` bytes; names the biggest files.
    """
    found = list(files_of(folder, excludes)) if folder is not None else []
    sizes = sorted(((path.stat().st_size, name) for path, name in found), reverse=True)
    if (total := sum(size for size, _ in sizes)) > 4 * limit:  # no point in compressing that
        raise UserError(_too_big(folder, total, limit, sizes, "before compression"))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "grpo-recipe.yaml", recipe.encode(), 0o644)
        for path, name in found:
            _add(archive, name, path.read_bytes(), path.stat().st_mode & 0o777)
    data = target.getvalue()
    if len(data) > limit:
        raise UserError(_too_big(folder, len(data), limit, sizes, "compressed"))
    return data


def _add(archive: zipfile.ZipFile, name: str, data: bytes, mode: int) -> None:
    info = zipfile.ZipInfo(name)  # a fixed date: the same files give the same bytes, and are uploaded once
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


def _too_big(folder: Path | None, total: int, limit: int, sizes: Sequence[tuple[int, str]], how: str) -> str:
    biggest = "\n".join(f"  {size / 1e6:8.1f} MB  {name}" for size, name in sizes[:8])
    return (
        f"ray.working_dir: {folder} has {total / 1e6:.0f} MB ({how}), {limit / 1e6:.0f} MB can be sent; leave files "
        f"out with ray.excludes, or put data on storage that the nodes see. The biggest:\n{biggest}"
    )
