"""Recipes: typed values, lines in messages, nearest keys, all problems at once (field faults h1, h3, f12)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_dist.config import Recipe
from grpo_dist.errors import RecipeError
from grpo_dist.recipe_file import dump_recipe, find_recipe, load_recipe, placed, recipe_description, shipped_recipes
from grpo_dist.verifiers.registry import build
from grpo_dist.yaml_lines import YamlError, read_yaml, write_yaml

SMALLEST = """\
run: {name: test, steps: 2}
model: {path: tiny}
data: {source: rows.jsonl}
verifiers:
  use:
    - name: exact
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        file = tmp_path / "r.yaml"
        file.write_text(text)
        return file

    return _write


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, overrides)
    text = re.sub(rf"{re.escape(str(file))}:(\d)", r"line \1", str(caught.value))
    return text.replace(str(file), "file").split("\n")


def test_smallest_recipe_has_documented_defaults(write) -> None:
    recipe = load_recipe(write(SMALLEST))
    assert (recipe.rollout.group_size, recipe.rollout.groups_per_step, recipe.rollout.max_staleness) == (16, 32, 0)
    assert recipe.verifiers.use[0].name == "exact"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1.5E+3", 1500.0), (".5", 0.5), ("-2", -2), ("010", 10), ("0x1f", 31), ("1_000", 1000),
        ("true", True), ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("~", None),
        ("", None), ("'1e-6'", "1e-6"), ("[1, 2e-1]", [1, 0.2]), ("{a: 1e-6}", {"a": 1e-6}), ("1e", "1e"), ("e5", "e5"),
    ],
)  # fmt: skip
def test_scalars_are_read_by_yaml_1_2(text: str, value: object) -> None:
    got = read_yaml(f"key: {text}").data["key"]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("value", ["1e-6", "true", "null", "12", "no", "", "a: b", "- x", 1e-6, 3, True, None, [], {}])
def test_values_survive_writing_and_reading(value: object) -> None:
    got = read_yaml(write_yaml({"key": value})).data["key"]
    assert got == value
    assert type(got) is type(value)


def test_merge_keys_and_anchors(write) -> None:
    text = "base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\n"
    assert read_yaml(text).data == {"base": {"x": 1, "y": 2}, "mine": {"x": 1, "y": 3}}


def test_an_alias_inside_itself_is_refused() -> None:
    with pytest.raises(YamlError, match="contains itself"):
        read_yaml("a: &a [*a]")


class TestUnknownKeys:
    def test_misspelt(self, write) -> None:
        file = write(SMALLEST + "learner:\n  learnig_rate: 1e-6\n")
        assert problems(file) == [
            "line 8: learner.learnig_rate: unknown key; did you mean learner.learning_rate?",
        ]

    def test_right_key_at_the_wrong_level(self, write) -> None:
        file = write(SMALLEST + "learning_rate: 1e-6\n")
        assert problems(file) == ["line 7: learning_rate: unknown key here; it belongs to learner.learning_rate"]

    def test_one_level_too_deep(self, write) -> None:
        file = write(SMALLEST + "rollout:\n  sampling:\n    group_size: 4\n")
        assert problems(file) == [
            "line 9: rollout.sampling.group_size: unknown key here; it belongs to rollout.group_size"
        ]

    def test_misspelt_and_at_the_wrong_level(self, write) -> None:
        file = write(SMALLEST + "model_: 1\nrun_: {learnin_rate: 1}\nlearnin_rate: 3\n")
        assert "line 9: learnin_rate: unknown key here; it belongs to learner.learning_rate" in problems(file)

    def test_nothing_like_it_lists_what_there_is(self, write) -> None:
        file = write(SMALLEST + "weights:\n  zzzzqq: 1\n")
        (line,) = problems(file)
        assert line.startswith("line 8: weights.zzzzqq: unknown key; the keys here are backend, verify")

    def test_given_twice(self, write) -> None:
        file = write(SMALLEST + "learner:\n  ranks: 1\n  ranks: 2\n")
        assert problems(file) == ["line 9: learner.ranks: given twice, first in line 8"]

    def test_section_given_twice(self, write) -> None:
        file = write(SMALLEST + "run: {name: other, steps: 1}\n")
        assert problems(file) == ["line 7: run: given twice, first in line 1"]

    def test_in_an_override(self, write) -> None:
        (line,) = problems(write(SMALLEST), "learner.learnig_rate=1e-6")
        assert line == (
            "override 'learner.learnig_rate=1e-6': learner.learnig_rate: unknown key; "
            "did you mean learner.learning_rate?"
        )


class TestValues:
    def test_group_of_one(self, write) -> None:
        (line,) = problems(write(SMALLEST + "rollout:\n  group_size: 1\n"))
        assert line.startswith("line 8: rollout.group_size: must be at least 2, got 1: the advantage")

    def test_temperature_zero(self, write) -> None:
        (line,) = problems(write(SMALLEST), "rollout.sampling.temperature=0")
        assert "rollout.sampling.temperature: must be at least 0.01 for training rollouts, got 0.0" in line

    @pytest.mark.parametrize("word", ["top_p=0.9", "top_k=5", "min_p=0.1"])
    def test_truncated_sampling(self, write, word: str) -> None:
        (line,) = problems(write(SMALLEST), f"rollout.sampling.{word}")
        assert f"rollout.sampling.{word.split('=')[0]}" in line
        assert "for training rollouts" in line
        assert load_recipe(write(SMALLEST), ["evaluate.sampling.top_p=0.9"]).evaluate.sampling.top_p == 0.9

    def test_fewer_samples_than_ranks(self, write) -> None:
        (line,) = problems(write(SMALLEST), "learner.ranks=9", "rollout.group_size=2", "rollout.groups_per_step=4")
        assert line == (
            "override 'rollout.groups_per_step=4' and override 'rollout.group_size=2' and override 'learner.ranks=9': "
            "rollout.groups_per_step 4 x rollout.group_size 2 = 8 samples a step, fewer than learner.ranks 9: "
            "some ranks would never train"
        )

    def test_what_an_override_brings_about_is_the_overrides(self, write) -> None:
        """A key of the file that an overridden one contradicts is not to blame."""
        file = write(SMALLEST + "algorithm:\n  objective: gmpo\n  kl: {beta: 0.1}\nlearner: {ranks: 2}\n")
        (line,) = problems(file, "algorithm.kl.place=reward")
        assert line.startswith("override 'algorithm.kl.place=reward': algorithm.objective: gmpo needs one advantage")
        (line,) = problems(file, "learner.updates_per_batch=99")
        assert line.startswith("override 'learner.updates_per_batch=99': learner.updates_per_batch 99 is more than")
        (line,) = problems(write(SMALLEST + "algorithm:\n  objective: gmpo\n  kl: {beta: 1, place: reward}\n"))
        assert line.startswith("line 8: algorithm.objective: gmpo needs")

    def test_a_key_taken_out_as_wrong_is_not_missing(self, write) -> None:
        words = ["algorithm.kl.reference=refresh", "algorithm.kl.refresh_every=0"]
        (line,) = problems(write(SMALLEST), *words)
        assert line.endswith("algorithm.kl.refresh_every: wanted greater than 0, found 0")
        (line,) = problems(write(SMALLEST), words[0])
        assert line == (
            "override 'algorithm.kl.reference=refresh': algorithm.kl.reference: refresh needs kl.refresh_every (steps) "
            "and no kl.ema"
        )

    def test_a_constant_divisor_of_nothing(self, write) -> None:
        (line,) = problems(write(SMALLEST), "algorithm.divisor=constant", "algorithm.divisor_tokens=0")
        assert line.endswith("algorithm.divisor_tokens: wanted greater than 0, found 0")
        chosen = load_recipe(write(SMALLEST), ["algorithm.divisor=constant", "rollout.sampling.max_tokens=77"])
        assert chosen.algorithm.divisor_tokens == 77

    @pytest.mark.parametrize("beta", ["beta1", "beta2"])
    def test_a_moment_that_never_forgets(self, write, beta: str) -> None:
        (line,) = problems(write(SMALLEST), f"learner.optimizer.{beta}=1")
        assert line.endswith(f"learner.optimizer.{beta}: wanted less than 1, found 1")

    def test_varlen_is_for_half_precision(self, write) -> None:
        (line,) = problems(write(SMALLEST), "model.attention=varlen", "model.dtype=float32")
        assert "model.attention: varlen needs dtype bfloat16 or float16, got float32" in line

    def test_missing_key_says_what_it_is_for(self, write) -> None:
        (line,) = problems(write(SMALLEST.replace(", steps: 2", "")))
        assert (
            line
            == "line 1: run.steps: missing; wanted integer (> 0): Steps: a batch, its optimizer updates (one by default), one publication."
        )

    def test_missing_section(self, write) -> None:
        (line,) = problems(write(SMALLEST.replace("model: {path: tiny}\n", "")))
        assert line.startswith("file: model: missing")

    def test_wrong_type_shows_wanted_and_found(self, write) -> None:
        file = write(SMALLEST + "learner:\n  ranks: many\nmodel_x: 1\n".replace("model_x: 1\n", ""))
        (line,) = problems(file)
        assert line.startswith("line 8: learner.ranks: wanted")
        assert line.endswith("found 'many'")

    def test_a_number_as_name_asks_for_quotes(self, write) -> None:
        (line,) = problems(write(SMALLEST), "run.name=12")
        assert line.endswith("found 12 (write it in quotes)")

    def test_keys_that_belong_to_us(self, write) -> None:
        assert "engine.model: is set by grpo_dist" in problems(write(SMALLEST), "rollout.engine.model=x")[0]
        assert "deepspeed.fp16: is set by grpo_dist" in problems(write(SMALLEST), "learner.deepspeed.fp16={}")[0]

    @pytest.mark.parametrize("value", ["abc", "[1]", "0", "true", "1.5"])
    def test_context_that_is_no_number(self, write, value: str) -> None:
        (line,) = problems(write(SMALLEST), f"rollout.engine.max_model_len={value}")
        assert "rollout.engine.max_model_len: must be a positive integer, got" in line

    @pytest.mark.parametrize(
        "key",
        [
            "run.seed", "run.steps", "rollout.group_size", "rollout.groups_per_step", "rollout.max_staleness",
            "rollout.sampling.max_tokens", "data.max_prompt_tokens", "checkpoint.every", "verifiers.children",
        ],
    )  # fmt: skip
    def test_absurd_counts(self, write, key: str) -> None:
        (line,) = problems(write(SMALLEST), f"{key}={10**20}")
        assert f": {key}: " in line

    def test_bounds_that_must_fit(self, write) -> None:
        assert load_recipe(write(SMALLEST), [f"run.seed={2**31 - 1}"]).run.seed == 2**31 - 1
        assert "must be at most 2147483647" in problems(write(SMALLEST), f"run.seed={2**31}")[0]

    @pytest.mark.parametrize("value", ["3", "[]", "null", "{stage: 2}", "{stage: '3'}"])
    def test_the_stage_is_ours(self, write, value: str) -> None:
        (line,) = problems(write(SMALLEST), f"learner.deepspeed={{zero_optimization: {value}}}")
        assert "learner.deepspeed.zero_optimization" in line
        load_recipe(write(SMALLEST), ["learner.deepspeed={zero_optimization: {stage: 3, overlap_comm: true}}"])

    @pytest.mark.parametrize(
        ("word", "says"),
        [
            ("verifiers.use=[3]", "verifiers.use.0: wanted a mapping of keys, found 3"),
            ("verifiers.use=[{weight: 1}]", "verifiers.use.0.name: missing"),
            ("verifiers.use=[]", "verifiers.use: wanted at least one entry, found an empty list"),
            ("learner=3", "learner: wanted a mapping of keys, found 3"),
            ("rollout.engine=3", "rollout.engine: wanted a mapping of keys, found 3"),
            ("run.out=3", "run.out: wanted a path, found 3"),
            ("run.name=a/b", "run.name: wanted letters, digits and any of . _ -"),
            ("data.mix=3", "data.mix: wanted a list, found 3"),
        ],
    )
    def test_one_plain_message(self, write, word: str, says: str) -> None:
        (line,) = problems(write(SMALLEST), word)
        assert says in line

    def test_all_problems_at_once(self, write) -> None:
        file = write(
            """\
run: {name: x, step: 3}
model:
  path: m
  dtype: float31
data: {source: a}
rollout:
  group_size: 1
  sampling: {temperature: 0, top_p: 0.9, top_k: 4}
  engine: {model: x}
learner:
  ranks: -2
  learnig_rate: 1e-6
verifiers: {timeout: soon}
"""
        )
        keys = [line.split(": ")[1] for line in problems(file, "nonsense")[:-1]]
        assert keys == [
            "run.steps", "run.step", "model.dtype", "rollout.group_size", "rollout.sampling.temperature",
            "rollout.sampling.top_p", "rollout.sampling.top_k", "rollout.engine.model", "learner.ranks",
            "learner.learnig_rate", "verifiers.timeout", "verifiers.use",
        ]  # fmt: skip
        assert problems(file, "nonsense")[-1].startswith("override 'nonsense': wanted key=value")


class TestOverrides:
    def test_are_typed(self, write) -> None:
        recipe = load_recipe(
            write(SMALLEST),
            [
                "learner.learning_rate=1e-6", "run.resume=true", "rollout.sampling.stop=[a, 'no']",
                "verifiers.use.0.weight=2", "rollout.engine.hf_overrides.head_dtype=float32", "data.system_prompt=",
            ],
        )  # fmt: skip
        assert recipe.learner.learning_rate == 1e-6
        assert recipe.run.resume is True
        assert recipe.rollout.sampling.stop == ("a", "no")
        assert recipe.verifiers.use[0].weight == 2
        assert recipe.rollout.engine == {"hf_overrides": {"head_dtype": "float32"}}
        assert recipe.data.system_prompt is None

    def test_value_may_hold_an_equals_sign(self, write) -> None:
        assert load_recipe(write(SMALLEST), ["data.system_prompt=a=b"]).data.system_prompt == "a=b"

    def test_last_one_wins(self, write) -> None:
        assert load_recipe(write(SMALLEST), ["run.steps=3", "run.steps=4"]).run.steps == 4

    @pytest.mark.parametrize(
        ("word", "says"),
        [
            ("steps", "wanted key=value"),
            ("=3", "wanted key=value"),
            ("run..steps=3", "wanted key=value"),
            ("verifiers.use.1.name=x", "the list has 1"),
            ("run.name.first=x", "run.name has no keys"),
            ("run.steps=[", "the value is not valid YAML"),
        ],
    )
    def test_that_cannot_be_applied(self, write, word: str, says: str) -> None:
        (line,) = problems(write(SMALLEST), word)
        assert line.startswith(f"override {word!r}: ")
        assert says in line

    def test_do_not_hide_a_section_that_is_empty_in_the_file(self, write) -> None:
        assert load_recipe(write(SMALLEST + "learner:\n"), ["learner.ranks=2"]).learner.ranks == 2


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "found nothing"),
            ("- a\n- b\n", "found no mapping"),
            ("run: {name: [}\n", "not valid YAML"),
            ("run: !!python/object:os.system {}\n", "not a plain value: tag"),
            ("? [a]\n: 1\n", "a key must be a word"),
        ],
    )
    def test_that_are_no_recipe(self, write, text: str, says: str) -> None:
        assert any(says in line for line in problems(write(text)))

    def test_that_would_fill_the_memory(self, write) -> None:
        bomb = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
        assert "more than 100000 values" in problems(write(bomb))[0]
        for depth in (100, 5000):
            assert "nested more than 64 levels deep" in problems(write("run: " + "[" * depth + "]" * depth))[0]

    def test_line_of_a_yaml_error(self, write) -> None:
        assert problems(write("run:\n  name: x\n steps: 3\n"))[0].startswith("line 3: not valid YAML")

    def test_not_text(self, tmp_path: Path) -> None:
        file = tmp_path / "r.yaml"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(RecipeError, match="not UTF-8"):
            load_recipe(file)

    def test_missing_file_names_the_nearest_shipped_recipe(self) -> None:
        with pytest.raises(RecipeError, match=r"quikstart: no such file.*quickstart.*did you mean quickstart"):
            load_recipe("quikstart")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="is a folder"):
            find_recipe(tmp_path)


class TestShipped:
    @pytest.mark.parametrize("name", sorted(shipped_recipes()))
    def test_loads_and_has_a_description(self, name: str) -> None:
        recipe = load_recipe(name)
        assert recipe.description
        assert recipe_description(find_recipe(name)) == recipe.description

    @pytest.mark.parametrize("name", sorted(shipped_recipes()))
    def test_survives_dump_and_load(self, name: str, tmp_path: Path) -> None:
        recipe = load_recipe(name, ["learner.learning_rate=1e-06"])
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "recipe.yaml") == recipe

    def test_quickstart_is_the_measured_setting(self) -> None:
        recipe = load_recipe("quickstart")
        assert (recipe.run.steps, recipe.rollout.groups_per_step, recipe.rollout.group_size) == (20, 32, 16)
        assert (recipe.learner.learning_rate, recipe.learner.schedule.warmup_steps) == (2e-4, 5)
        assert (recipe.learner.optimizer.beta1, recipe.learner.optimizer.beta2) == (0.9, 0.99)
        assert (recipe.algorithm.kl.beta, recipe.learner.grad_clip, recipe.rollout.sampling.max_tokens) == (
            0.0,
            1.0,
            16,
        )
        assert (recipe.data.evaluation.size, recipe.evaluate.every, recipe.data.template) == (256, 5, "raw")


def test_what_is_found_later_gets_its_place_too(write) -> None:
    file = write(SMALLEST + "      aftr: x\n")
    uses = load_recipe(file).verifiers.use
    with pytest.raises(RecipeError) as error, placed(file):
        build(uses)
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if "aftr" in text)
    assert str(error.value).startswith(f"{file}:{line}: verifiers.use.0.aftr: 'exact' has no such option")
    assert "did you mean 'after'" in str(error.value)
    words = ["verifiers.use.0.aftr=3"]
    with pytest.raises(RecipeError) as error, placed(write(SMALLEST), words):
        build(load_recipe(write(SMALLEST), words).verifiers.use)
    assert str(error.value).startswith("override 'verifiers.use.0.aftr=3': verifiers.use.0.aftr: ")
    with placed(file) as place:
        assert place("no key here: x\nfigs.use: 3") == "no key here: x\nfigs.use: 3"


class TestSecrets:
    def test_a_key_that_names_a_secret(self, write) -> None:
        (line,) = problems(write(SMALLEST), "rollout.engine.hf_token=abc")
        assert "rollout.engine.hf_token: looks like a secret; secrets come from the environment only" in line

    def test_the_value_of_a_secret_variable(self, write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "dummy-secret-123")
        found = problems(write(SMALLEST), "tracking.wandb.tags=[dummy-secret-123]")
        assert "contains the value of WANDB_API_KEY" in found[0]

    def test_ordinary_keys_pass(self, write) -> None:
        load_recipe(write(SMALLEST), ["rollout.engine.max_num_batched_tokens=512", "learner.micro_batch_tokens=64"])

    def test_the_environment_never_changes_a_recipe(self, write, monkeypatch: pytest.MonkeyPatch) -> None:
        before = load_recipe(write(SMALLEST))
        for name in ("STEPS", "RUN_STEPS", "GRPO_DIST_RUN_STEPS", "WANDB_PROJECT", "WANDB_MODE", "RUN__STEPS"):
            monkeypatch.setenv(name, "7")
        assert load_recipe(write(SMALLEST)) == before


def test_a_recipe_is_frozen(write) -> None:
    recipe = load_recipe(write(SMALLEST))
    assert isinstance(recipe, Recipe)
    with pytest.raises(ValueError, match="frozen"):
        recipe.run.steps = 5  # type: ignore[misc]
