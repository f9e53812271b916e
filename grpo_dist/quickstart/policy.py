"""Builds the toy policy: a 0.3M-parameter Qwen3 with a character tokenizer, warmed up on answers to the toy task.

    settings ─hash─► cached folder?  ── yes ─► its path
                          no ─► [file lock] random model ─500 steps worked─250 steps mixed─► saved aside ─► renamed

The warm-up teaches two habits: showing the work (right, long) and guessing (mostly wrong, short), with guessing on top.
So GRPO has something to choose: the skill is already there, and the reward decides which habit wins.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers.utils import logging as transformers_logging

from grpo_dist.quickstart import task
from grpo_dist.quickstart.cache import default_cache, made_once

CHARACTERS = "0123456789+-*/=,#.:;?!()[]<> abcdefghijklmnopqrstuvw"  # 52
PAD, BOS, EOS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Everything that decides the policy's weights; the cache is keyed by it."""

    format: int = 1  # raise it when the code below changes what comes out
    characters: str = CHARACTERS
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 256
    context: int = 64
    seed: int = 0
    worked_steps: int = 500
    mixed_steps: int = 250
    guessed_share: float = 0.7  # of the mixed steps
    batch: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    decay_share: float = 0.4  # the last part of the steps falls linearly …
    final_share: float = 0.05  # … to this part of the rate
    grad_clip: float = 1.0

    @property
    def steps(self) -> int:
        return self.worked_steps + self.mixed_steps

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def quickstart_policy_folder(cache: Path | None = None, settings: WarmUp | None = None) -> Path:
    """Where the policy is or will be."""
    return (cache or default_cache()) / f"quickstart-{(settings or WarmUp()).key}"


def build_quickstart_policy(
    cache: Path | None = None,
    settings: WarmUp | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """The folder of the warmed-up policy, built on first use (about 40 s on one core).

    Two processes that ask at once build it once. ``tell`` gets a line now and then.

    Raises:
        UserError: the cache folder cannot be written.
    """
    settings = settings or WarmUp()

    def write(folder: Path) -> None:
        model = warm_up(settings, tell)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        character_tokenizer(settings.characters).save_pretrained(folder)

    return made_once(quickstart_policy_folder(cache, settings), write, "the quickstart policy")


def character_tokenizer(characters: str = CHARACTERS) -> Any:
    """A transformers tokenizer with one token per character; adds <bos> in front, as most models' tokenizers do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    table = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS} | {c: i + 3 for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return fast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=WarmUp().context,
        clean_up_tokenization_spaces=False,
    )


def policy_config(settings: WarmUp) -> Any:
    """The model's transformers configuration."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(settings.characters) + 3,
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )


def random_policy(settings: WarmUp) -> Any:
    """The untrained model, fixed by the seed; leaves torch's own random state as it was."""
    from transformers import Qwen3ForCausalLM

    build: Any = Qwen3ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return build(policy_config(settings)).to(torch.float32)


def warm_up(settings: WarmUp, tell: Callable[[str], None]) -> Any:
    """Supervised training on both kinds of answers; returns the model."""
    model = random_policy(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, settings))
    training, _ = task.split_terms()
    rng = random.Random(settings.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small for more; and the same sums on every machine
    model.train()
    try:
        for step in range(settings.steps):
            guessed = settings.guessed_share if step >= settings.worked_steps else 0.0
            ids, targets = demonstrations(training, settings, guessed, rng)
            logits = model(ids).logits  # (batch, length, vocabulary)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            optimizer.step()
            schedule.step()
            if (step + 1) % 50 == 0:
                tell(f"warming up the quickstart policy: step {step + 1} of {settings.steps}, loss {loss.item():.3f}")
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def rate_share(step: int, settings: WarmUp) -> float:
    """Share of the learning rate at a step: rises over warmup_steps, falls over the last decay_share to final_share."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    falls_from = settings.steps * (1 - settings.decay_share)
    if step < falls_from:
        return 1.0
    done = (step - falls_from) / (settings.steps - falls_from)
    return 1.0 - (1.0 - settings.final_share) * done


def demonstrations(
    terms: Sequence[task.Terms], settings: WarmUp, guessed_share: float, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch: token ids (batch, length) and targets, -100 where nothing is learned (prompt and padding)."""
    number = {c: i + 3 for i, c in enumerate(settings.characters)}
    rows, prompts = [], []
    for _ in range(settings.batch):
        chosen = rng.choice(terms)
        guessed = rng.random() < guessed_share
        answer = task.guessed_answer(chosen, rng) if guessed else task.worked_answer(chosen)
        question = task.prompt(chosen)
        rows.append([BOS, *(number[c] for c in question + answer), EOS])
        prompts.append(1 + len(question))
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), PAD)
    targets = torch.full((len(rows), length), -100)
    for i, (row, start) in enumerate(zip(rows, prompts, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        targets[i, start : len(row)] = torch.tensor(row[start:])
    return ids, targets
