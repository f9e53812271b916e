"""Token ids travel end to end: a completion whose text encodes to other tokens is trained on as it was sampled."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from grpo_dist.algorithms.advantages import assign_advantages
from grpo_dist.config import AlgorithmSection
from grpo_dist.data.batching import build_batch
from grpo_dist.types import Completion, VersionSpan
from grpo_dist.verifiers.worker import items_of
from tests.unit.samples import group

A, B, AB, STOP = 3, 4, 5, 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Knows "a", "b" and, by a merge, "ab": sampling may say a then b, encoding never does."""
    vocabulary = {"<pad>": 0, "<x>": 1, "<y>": 2, "a": A, "b": B, "ab": AB, "<stop>": STOP}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<stop>"])
    return made


def test_what_was_sampled_is_trained_and_the_verifier_sees_the_text(tokenizer: Tokenizer) -> None:
    sampled = (A, B, A, B, STOP)
    text = tokenizer.decode(list(sampled), skip_special_tokens=True)
    assert text == "abab"
    assert tokenizer.encode(text).ids == [AB, AB]  # other tokens, fewer of them, and no stop token
    logprobs = (-0.5, -0.25, -1.5, -0.75, -2.0)
    one = Completion(sampled, logprobs, text, "stop", (VersionSpan(0, 0, 5),))
    other = Completion((AB, STOP), (-1.0, -3.0), "ab", "stop", (VersionSpan(0, 0, 2),))
    scored = group([1.0, 0.0], completions=[one, other])

    assert [item.completion for item in items_of(scored.rollout)] == ["abab", "ab"]
    samples = assign_advantages([scored], AlgorithmSection())
    batch = build_batch(samples, ranks=1, micro_batch_tokens=100)
    (micro,) = batch.shards[0]
    assert batch.loss_tokens == 7
    found = {
        int(index): (micro.token_ids[part][micro.loss_mask[part]], micro.behavior_logprobs[part][micro.loss_mask[part]])
        for index, part in zip(micro.sample_indices, _parts(micro.segment_lengths), strict=True)
    }
    assert found[0][0].tolist() == list(sampled)
    assert found[0][1].tolist() == pytest.approx(logprobs)
    assert found[1][0].tolist() == [AB, STOP]


def _parts(lengths: np.ndarray) -> list[slice]:
    ends = np.cumsum(lengths)
    return [slice(int(end - n), int(end)) for end, n in zip(ends, lengths, strict=True)]
