"""Sampling seeds: one per group, fixed by what is sampled and never by when or where.

vLLM gives sample i of a request with seed s the seed s + i. So a group owns a block of seeds: its seed is a multiple
of a power of two that is at least G, and blocks of two groups are equal or disjoint, never shifted into each other.
"""

from __future__ import annotations

import hashlib

_BITS = 62  # a seed travels as a signed 64-bit integer; seed + G must stay inside


def group_seed(run_seed: int, epoch: int, prompt_id: str, group_size: int) -> int:
    """Seed of sample 0 of a group; sample i uses seed + i (i < group_size).

    The same (run, epoch, prompt) gives the same seed in every process and after every restart, so a group that is sent
    again after a loss yields the same tokens, on any engine.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    key = f"{run_seed}/{epoch}/{prompt_id}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> (64 - _BITS)
    block = 1 << (group_size - 1).bit_length()  # smallest power of two >= group_size
    return number - number % block
