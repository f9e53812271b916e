"""The toy task and how its policy is built, cached and shared. The whole warm-up (40 s) runs in the whole-run tests."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_dist.errors import UserError
from grpo_dist.quickstart import task
from grpo_dist.quickstart.policy import (
    WarmUp,
    build_quickstart_policy,
    character_tokenizer,
    default_cache,
    demonstrations,
    quickstart_policy_folder,
    random_policy,
    rate_share,
)
from grpo_dist.quickstart.summary import closing_words

SHORT = WarmUp(worked_steps=2, mixed_steps=1, batch=4, hidden=32, layers=1, mlp=32)


class TestTask:
    def test_answers(self) -> None:
        assert task.prompt((7, 5, 8, 6)) == "7+5+8+6="
        assert task.worked_answer((7, 5, 8, 6)) == "12,20,26#26"
        assert task.worked_answer((1, 1, 1, 1)) == "2,3,4#4"

    def test_guesses_are_right_once_in_eleven(self) -> None:
        rng = random.Random(0)
        guesses = [task.guessed_answer((7, 5, 8, 6), rng) for _ in range(11_000)]
        assert set(guesses) == {f"#{n}" for n in range(21, 32)}
        assert abs(guesses.count("#26") / 11_000 - 1 / 11) < 0.01

    def test_held_out_prompts_are_never_trained_on(self) -> None:
        training, held_out = task.split_terms()
        assert (len(training), len(held_out), len(set(held_out))) == (9**4 - 256, 256, 256)
        assert not set(training) & set(held_out)
        assert task.split_terms() == (training, held_out)

    def test_rows(self) -> None:
        training, held_out = task.quickstart_rows()
        assert (len(training), len(held_out)) == (6305, 256)
        assert training[0] == {"prompt": "1+1+1+1=", "answer": "4"}
        assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}
        assert all(sum(map(int, row["prompt"][:-1].split("+"))) == int(row["answer"]) for row in training + held_out)


class TestClosingWords:
    def test_say_what_the_run_says(self, tmp_path: Path) -> None:
        rows = [{"step": s, "rollout/completion_tokens_mean": 6.0 + s} for s in range(1, 6)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (tmp_path / "evals.jsonl").write_text('{"step": 0, "eval/pass@1": 0.4}\n{"step": 5, "eval/pass@1": 0.9}\n')
        first, second, skill = closing_words(tmp_path).split("\n")
        assert first == "pass@1 on held-out prompts: 0.400 before, 0.900 after"
        assert second == "tokens per completion: 7.0 at first, 11.0 at the end"
        assert "The skill of adding was already there from the warm-up" in skill

    def test_of_a_run_without_numbers(self, tmp_path: Path) -> None:
        assert closing_words(tmp_path).startswith("The policy came with two habits")


class TestSettings:
    def test_are_the_measured_ones(self) -> None:
        assert (WarmUp().worked_steps, WarmUp().mixed_steps, WarmUp().batch, WarmUp().learning_rate) == (
            500,
            250,
            64,
            2e-3,
        )
        assert (len(WarmUp().characters), len(set(WarmUp().characters))) == (52, 52)
        assert sum(p.numel() for p in random_policy(WarmUp()).parameters()) == 302_720

    def test_rate(self) -> None:
        settings = WarmUp()
        assert rate_share(0, settings) == pytest.approx(1 / 50)
        assert rate_share(49, settings) == rate_share(449, settings) == 1.0
        assert rate_share(600, settings) == pytest.approx(1 - 0.95 / 2)
        assert rate_share(750, settings) == pytest.approx(0.05)

    def test_key_changes_with_every_setting(self) -> None:
        keys = {WarmUp().key, *(replace(WarmUp(), **{k: v}).key for k, v in (("seed", 1), ("mlp", 8), ("format", 2)))}
        assert len(keys) == 4


class TestTokenizer:
    def test_one_token_a_character_and_one_bos(self) -> None:
        tokenizer = character_tokenizer()
        ids = tokenizer("7+5=").input_ids
        assert (ids[0], len(ids), len(tokenizer)) == (tokenizer.bos_token_id, 5, 55)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "7+5="
        assert tokenizer("7+5=", add_special_tokens=False).input_ids == ids[1:]

    def test_survives_its_folder(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        character_tokenizer().save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded("12,20#26").input_ids == character_tokenizer()("12,20#26").input_ids
        assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 0)


def test_demonstrations_train_the_answer_and_its_end_only() -> None:
    ids, targets = demonstrations([(7, 5, 8, 6)], replace(SHORT, batch=1), 0.0, random.Random(0))
    assert ids.tolist() == [[1, *(3 + WarmUp().characters.index(c) for c in "7+5+8+6=12,20,26#26"), 2]]
    assert targets.tolist() == [[-100] * 9 + ids[0, 9:].tolist()]
    assert ids.shape[1] == 21


class TestBuild:
    def test_builds_once_and_loads(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        state = torch.random.get_rng_state()
        threads = torch.get_num_threads()
        said: list[str] = []
        folder = build_quickstart_policy(tmp_path, replace(SHORT, worked_steps=50), tell=said.append)
        assert folder == quickstart_policy_folder(tmp_path, replace(SHORT, worked_steps=50))
        assert said == [said[0]]
        assert said[0].startswith("warming up the quickstart policy: step 50 of 51")
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 55
        before = folder.stat().st_mtime_ns
        assert build_quickstart_policy(tmp_path, replace(SHORT, worked_steps=50)) == folder
        assert folder.stat().st_mtime_ns == before
        assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]

    def test_same_settings_same_weights(self, tmp_path: Path) -> None:
        one, two = (build_quickstart_policy(tmp_path / name, SHORT) for name in "ab")
        assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()

    def test_what_a_killed_build_left_is_not_taken(self, tmp_path: Path) -> None:
        target = quickstart_policy_folder(tmp_path, SHORT)
        left = target.with_name(f".{target.name}.999")
        left.mkdir(parents=True)
        (left / "config.json").write_text("{")
        folder = build_quickstart_policy(tmp_path, SHORT)
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 55
        assert not left.exists()

    def test_two_at_once_build_once(self, tmp_path: Path) -> None:
        code = (
            "import sys\nfrom dataclasses import replace\nfrom pathlib import Path\n"
            "from grpo_dist.quickstart import policy\n"
            "settings = policy.WarmUp(worked_steps=20, mixed_steps=30, batch=4, hidden=32, layers=1, mlp=32)\n"
            "said = []\n"
            "policy.build_quickstart_policy(Path(sys.argv[1]), settings, tell=said.append)\n"
            "print(len(said))"
        )
        both = [
            subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert sorted(p.communicate(timeout=120)[0].split()[-1] for p in both) == ["0", "1"]

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="set XDG_CACHE_HOME to a folder that can be written"):
            build_quickstart_policy(tmp_path / "file" / "below", SHORT)

    def test_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert default_cache() == Path("/somewhere/grpo_dist")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_cache() == Path.home() / ".cache" / "grpo_dist"
