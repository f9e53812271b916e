"""What one engine returns: tokens, log-probabilities, finish reasons, seeds; and how its actor answers and dies.

The model folder is hostile on purpose: its generation_config asks for another distribution, and names two stop ids.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from grpo_dist.config import EvalSampling, TrainSampling
from grpo_dist.rollout.engine import SamplingSpec
from tests.conftest import build_tiny_model
from tests.integration.engines import Worker, hf_logprobs, load, request, settings, start_workers, worst_error

pytestmark = pytest.mark.ray

EOS, OTHER_STOP = 2, 40
SPEC = SamplingSpec(max_tokens=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_tiny_model(tmp_path_factory.mktemp("hostile") / "model", tied=False)
    wishes = {
        "eos_token_id": [EOS, OTHER_STOP], "do_sample": True, "repetition_penalty": 1.3, "temperature": 0.3,
        "top_p": 0.5, "top_k": 5,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(wishes))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def worker(ray_cluster: None, folder: Path) -> Iterator[Worker]:
    worker = start_workers({"rollout-0": settings(folder)})["rollout-0"]
    yield worker
    worker.end()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_the_learners_scaled_log_softmax(worker: Worker, model: Any, temperature: float) -> None:
    spec = SamplingSpec(max_tokens=48, temperature=temperature)
    groups = [worker.generate(request(i, seed=100 * i), spec, 8) for i in range(2)]
    assert max(worst_error(g, {0: model}, temperature) for g in groups) < 1e-5


def test_raw_logprobs_would_be_noticed(worker: Worker, model: Any) -> None:
    group = worker.generate(request(0, seed=1), SamplingSpec(max_tokens=48, temperature=0.5))
    assert worst_error(group, {0: model}, temperature=1.0) > 0.1


def test_the_model_folders_sampling_wishes_are_ignored_and_reported(worker: Worker) -> None:
    sampling = worker.info["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["repetition_penalty"]) == (1.0, 1.0, 1.0)
    ignored = {"repetition_penalty": 1.3, "temperature": 0.3, "top_p": 0.5, "top_k": 5}
    assert worker.info["generation_config_ignored"] == ignored
    # top_k 5 would never draw a token that is not among the five best; 4 x 48 tokens of a flat policy do.
    group = worker.generate(request(3, seed=5), SPEC)
    assert min(min(c.logprobs) for c in group.completions) < -4


def test_both_stop_ids_end_a_completion_and_belong_to_it(worker: Worker) -> None:
    assert worker.info["stop_token_ids"] == [EOS, OTHER_STOP]
    groups = [worker.generate(request(i, seed=64 * i), SamplingSpec(max_tokens=200), 32) for i in range(2)]
    completions = [c for g in groups for c in g.completions]
    ends = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert ends == {EOS, OTHER_STOP}
    assert not any({EOS, OTHER_STOP} & set(c.token_ids[:-1]) for c in completions)
    assert all(len(c.token_ids) == 200 for c in completions if c.finish_reason == "length")
    assert all("<eos>" not in c.text for c in completions)


def test_length_is_the_only_truncation(worker: Worker) -> None:
    group = worker.generate(request(0, seed=9), SamplingSpec(max_tokens=3), 16)
    for c in group.completions:
        ended = c.token_ids[-1] in (EOS, OTHER_STOP)
        assert c.finish_reason == ("stop" if ended else "length")
        assert len(c.token_ids) == 3 or ended


def test_a_stop_string_ends_a_completion(worker: Worker, model: Any) -> None:
    spec = SamplingSpec(max_tokens=200, stop=("a", "e"))
    group = worker.generate(request(1, seed=3), spec, 16)
    by_string = [c for c in group.completions if c.text.endswith(("a", "e"))]
    assert by_string
    assert all(c.finish_reason == "stop" and c.text[:-1].count("a") == 0 for c in by_string)
    assert worst_error(group, {0: model}) < 1e-5


def test_text_is_what_the_tokens_say(worker: Worker, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for c in worker.generate(request(2, seed=8), SPEC).completions:
        assert c.text == tokenizer.decode(c.token_ids, skip_special_tokens=True)


def test_a_group_is_its_seeds(worker: Worker) -> None:
    group = worker.generate(request(0, seed=1000), SPEC, 8)
    again = worker.generate(request(0, seed=1000), SPEC, 8)
    alone = [worker.generate(request(0, seed=1000 + i), SPEC, 1).completions[0] for i in range(8)]
    tail = worker.generate(request(0, seed=1004), SPEC, 4)
    assert again.completions == group.completions
    assert list(group.completions) == alone
    assert tail.completions == group.completions[4:]
    assert len({c.token_ids for c in group.completions}) == 8  # one prompt, eight different answers


def test_tokens_do_not_depend_on_the_order_of_arrival_or_on_company(worker: Worker) -> None:
    requests = [request(i, seed=16 * i) for i in range(24)]

    def run(order: list[int], gap: float) -> dict[int, Any]:
        refs = {}
        for i in order:
            refs[i] = worker.actor.generate.remote(requests[i], SPEC, 4)
            time.sleep(gap)
        return {i: ray.get(ref, timeout=120).completions for i, ref in refs.items()}

    shuffled = list(range(24))
    random.Random(0).shuffle(shuffled)
    forward = run(list(range(24)), 0.0)
    assert run(shuffled, 0.01) == forward
    assert {i: worker.generate(requests[i], SPEC).completions for i in (0, 7, 23)} == {
        i: forward[i] for i in (0, 7, 23)
    }


def test_greedy_samples_are_equal_and_greedy(worker: Worker, model: Any) -> None:
    group = worker.generate(request(4, seed=1), SamplingSpec(max_tokens=12, temperature=0.0), 3)
    first = group.completions[0]
    assert group.completions == (first,) * 3
    best = [
        int(model(torch.tensor([[*group.prompt.token_ids, *first.token_ids[:i]]])).logits[0, -1].argmax())
        for i in range(len(first.token_ids))
    ]
    assert list(first.token_ids) == best


def test_evaluation_sampling_leaves_training_as_it_was(worker: Worker) -> None:
    train = TrainSampling(max_tokens=24)
    before = worker.generate(request(6, seed=2), SamplingSpec.of(train))
    worker.generate(request(6, seed=2), SamplingSpec.of(EvalSampling(temperature=0.0, top_p=0.9), train))
    assert worker.generate(request(6, seed=2), SamplingSpec.of(train)).completions == before.completions


def test_a_prompt_longer_than_the_context_is_refused_and_the_engine_lives(worker: Worker) -> None:
    with pytest.raises(ValueError, match="prompt has 501 tokens, the engine's context is 448"):
        worker.generate(request(0, seed=0, tokens=(5,) * 500), SPEC)
    assert worker.generate(request(0, seed=0), SPEC).completions


def test_control_calls_are_not_held_up_by_waiting_requests(worker: Worker) -> None:
    refs = [worker.actor.generate.remote(request(i, seed=16 * i), SamplingSpec(max_tokens=300), 8) for i in range(40)]
    assert worker.call("ping") == "rollout-0"
    worker.call("pause")
    ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=0.5)
    assert len(waiting) > 0  # paused in the middle: nothing was aborted
    assert ray.wait(waiting, num_returns=1, timeout=1.0)[0] == []  # and nothing goes on
    assert worker.call("resume") > 0
    assert len(ray.get(refs, timeout=120)) == 40
    assert len(ready) < 40


def test_seeds_of_a_paused_run_are_those_of_an_undisturbed_one(worker: Worker) -> None:
    requests = [request(i, seed=16 * i) for i in range(8)]
    spec = SamplingSpec(max_tokens=150)
    undisturbed = [worker.generate(r, spec).completions for r in requests]
    refs = [worker.actor.generate.remote(r, spec, 4) for r in requests]
    for _ in range(3):
        time.sleep(0.05)
        worker.call("pause")
        worker.call("resume")
    disturbed = [g.completions for g in ray.get(refs, timeout=120)]
    assert [[c.token_ids for c in g] for g in disturbed] == [[c.token_ids for c in g] for g in undisturbed]


def test_logprob_of_another_token_is_not_taken(worker: Worker, model: Any) -> None:
    group = worker.generate(request(5, seed=5), SPEC)
    c = group.completions[0]
    swapped = [*c.token_ids[:-2], c.token_ids[-1], c.token_ids[-2]]
    wrong = hf_logprobs(model, group.prompt.token_ids, swapped)
    assert abs(float(wrong[-2]) - c.logprobs[-2]) > 1e-3 or c.token_ids[-1] == c.token_ids[-2]


def test_a_dead_engine_takes_its_actor_with_it(worker: Worker) -> None:
    """Last in this module: the engine is gone afterwards."""
    children = worker.processes("EngineCore")
    assert children
    pending = worker.actor.generate.remote(request(0, seed=0), SamplingSpec(max_tokens=400), 16)
    children[0].kill()
    with pytest.raises(RayActorError):
        ray.get(pending, timeout=60)
    with pytest.raises(RayActorError):
        worker.call("ping")
