"""Whole runs of a tiny model, held to numbers: engines use exactly the learner's weights after every publication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.train import run
from tests.integration.runs import events, metrics, recipe_for, rollouts
from tests.unit.test_tracking import history, stored_records

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]

STEPS = 3


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact")


def shape(name: str, engines: int = 1, ranks: int = 1, tensor_parallel: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "steps": STEPS},
        "rollout": {
            "workers": engines, "tensor_parallel": tensor_parallel, "group_size": 4, "groups_per_step": 4,
            "sampling": {"max_tokens": 12, "temperature": 0.9},
        },
        "learner": {"ranks": ranks, "learning_rate": 1e-3, "micro_batch_tokens": 128},
    } | more  # fmt: skip


def train(out: Path, model: Path, sections: dict[str, Any]) -> Path:
    recipe = recipe_for(out, model, **sections)
    assert run(recipe) == 0
    return recipe.run_dir


def assert_engines_hold_the_learners_weights(folder: Path) -> None:
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Step n samples from version n - 1: steps 2 and 3 look at the publications of changed weights.
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert all(row["weights/checksum_ok"] == 1 for row in rows)
    assert [row["weights/version"] for row in rows] == [1, 2, 3]
    assert all(row["rollout/staleness_max"] == 0 for row in rows)
    published = events(folder, "published")
    assert [e["version"] for e in published] == [0, 1, 2, 3]
    assert len({e["digest"] for e in published}) == 4  # the weights did change, every time
    assert all(row["train/grad_norm"] > 0 for row in rows)


@pytest.fixture(scope="module")
def one_engine(out: Path, tiny_model: Path) -> Path:
    return train(out, tiny_model, shape("one-engine"))


def test_one_engine_one_rank(one_engine: Path) -> None:
    assert_engines_hold_the_learners_weights(one_engine)


@pytest.mark.parametrize("engines", [2, 3])
def test_more_engines_hold_the_same_weights_and_sample_the_same_tokens(
    engines: int, one_engine: Path, out: Path, tiny_model: Path
) -> None:
    folder = train(out, tiny_model, shape(f"{engines}-engines", engines=engines))
    assert_engines_hold_the_learners_weights(folder)
    assert rollouts(folder) == rollouts(one_engine)
    keys = ("rollout/reward_mean", "train/loss", "train/grad_norm")
    assert [[row[k] for k in keys] for row in metrics(folder)] == [
        [row[k] for k in keys] for row in metrics(one_engine)
    ]
    used = {row["engine"] for file in (folder / "rollouts").glob("*.jsonl") for row in _rows(file)}
    assert len(used) == engines  # they did share the work


def test_untied_embeddings_two_ranks(out: Path, tiny_model_untied: Path) -> None:
    assert_engines_hold_the_learners_weights(train(out, tiny_model_untied, shape("untied", ranks=2)))


def test_three_ranks(one_engine: Path, out: Path, tiny_model: Path) -> None:
    folder = train(out, tiny_model, shape("three-ranks", ranks=3))
    assert_engines_hold_the_learners_weights(folder)
    assert metrics(folder)[0]["train/grad_norm"] == pytest.approx(metrics(one_engine)[0]["train/grad_norm"], rel=1e-5)


def test_an_engine_of_two_ranks_and_adapters_that_train(out: Path, tiny_model: Path) -> None:
    """LoRA: what the engine holds is the merged model, which the learner never makes; the base is the reference."""
    sections = shape("adapters", tensor_parallel=2, algorithm={"kl": {"beta": 0.05}})
    sections["learner"] |= {"learning_rate": 1e-2, "lora": {"rank": 4}}
    folder = train(out, tiny_model, sections)
    assert_engines_hold_the_learners_weights(folder)
    rows = metrics(folder)
    assert rows[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["train/kl"] > 1e-6


def test_with_learning_rate_zero_nothing_moves(
    out: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the sign of a gamed reward in this run (form pays, answers are wrong) is told everywhere."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sections = shape("frozen", run={"name": "frozen", "steps": 5}, algorithm={"kl": {"beta": 0.1}})
    sections["learner"] = {"learning_rate": 0.0}
    form = {"name": "regex", "pattern": r"\d.*\d", "match": "search"}
    sections["verifiers"] = {"use": [{"name": "exact"}, form, {"name": "exact", "label": "audited", "audit": 1.0}]}
    sections["tracking"] = {"wandb": {"mode": "offline"}}
    folder = train(out, tiny_model, sections)
    warning = "100% of the reward goes to wrong answers: gate it with `requires`"
    assert f"warning: {warning}" in capfd.readouterr().out
    assert [e["text"] for e in events(folder, "warning")].count(warning) == 1
    kept = [one for file in folder.glob("wandb/*run-*/*.wandb") for one in stored_records(file)]
    assert f"step 1: {warning}" in [one.alert.text for one in kept if one.WhichOneof("record_type") == "alert"]
    first = next(row for row in history(folder) if row["step"] == 1 and "train/loss" in row)
    for name in ("audit_gap", "audited", "form_share", "repetition", "length_drift", "duplicates"):
        assert first[f"watch/{name}"] == pytest.approx(metrics(folder)[0][f"watch/{name}"])
    rows = metrics(folder)
    assert len(rows) == 5
    for row in rows:
        assert row["train/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert row["train/ratio_min"] == pytest.approx(1, abs=1e-5)
        assert row["train/kl"] == pytest.approx(0, abs=1e-6)
        assert row["train/clip_fraction"] == 0
    assert len({e["digest"] for e in events(folder, "published")}) == 1


def test_one_version_behind_while_weights_arrive_in_flight(out: Path, tiny_model: Path) -> None:
    """k = 1: publications cut completions, spans name the versions, none is more than one behind, none is lost.

    That each span's log-probabilities are those of its version is held by test_transfer. Each step makes two passes of two
    mini-batches with a reference that follows: one publication a step all the same.
    """
    sections = shape("in-flight", run={"name": "in-flight", "steps": 6})
    sections["rollout"] |= {"max_staleness": 1, "sampling": {"max_tokens": 200, "stop": []}}
    sections["data"] = {"max_prompt_tokens": 16}
    sections["learner"] = {"learning_rate": 1e-3, "micro_batch_tokens": 2048, "updates_per_batch": 2, "epochs": 2}
    sections["algorithm"] = {"kl": {"beta": 0.05, "reference": "refresh", "refresh_every": 3}}
    folder = train(out, tiny_model, sections)
    rows = metrics(folder)
    assert [(row["train/updates"], row["train/skipped"]) for row in rows] == [(4, 0)] * 6
    assert [e["version"] for e in events(folder, "published")] == list(range(7))
    assert max(row["train/ratio_max"] for row in rows) > 1.01  # the later updates are off the policy that sampled
    assert all(row["train/tokens"] == 2 * row["rollout/completion_tokens"] for row in rows)
    assert rows[0]["mismatch/logprob_abs_max"] < 1e-4  # of the first update alone
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert max(row["rollout/mixed_version_fraction"] for row in rows) > 0  # some were cut
    samples = [row for step in rollouts(folder) for row in step]
    for step, step_rows in enumerate(rollouts(folder), 1):
        for row in step_rows:
            spans = row["versions"]
            assert [s[0] for s in spans] == sorted(s[0] for s in spans)
            assert all(step - 2 <= version <= step - 1 for version, _, _ in spans)
    assert len({(row["group_id"], row["index"]) for row in samples}) == len(samples) == 6 * 16


def _rows(file: Path) -> list[dict[str, Any]]:
    from tests.integration.runs import jsonl

    return jsonl(file)
