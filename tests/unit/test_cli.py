"""The command: exit codes, one readable message, lazy imports (field faults h4, f8, f10, f12)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_dist import cli
from grpo_dist.errors import GrpoDistError, Interrupted, UserError, WorkerLost
from grpo_dist.recipe_file import shipped_recipes
from tests.conftest import tiny_recipe


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.run_command(words)
    out, err = capfd.readouterr()
    return status, out, err


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_model: Path) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny_recipe(
        run={"out": str(tmp_path / "runs")},
        model={"path": str(tiny_model)},
        data={"source": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 16},
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def test_recipes_lists_what_ships(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capfd, "recipes")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == sorted(shipped_recipes())
    assert all(len(line.split()) > 3 for line in out.splitlines())


def test_recipes_as_json_schema_and_show(capfd: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capfd, "recipes", "--json")[1])["quickstart"].startswith("Toy policy")
    keys = json.loads(run(capfd, "recipes", "--schema", "--json")[1])
    assert {k: v for k, v in keys[3 + 1].items() if k in ("key", "required")} == {"key": "run.steps", "required": True}
    assert "rollout.group_size  <integer>  default 16" in run(capfd, "recipes", "--schema")[1]
    assert yaml.safe_load(run(capfd, "recipes", "--show", "quickstart")[1])["run"]["name"] == "quickstart"


def test_light_verbs_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom grpo_dist.cli import run_command\n"
        "codes = [run_command(['recipes']), run_command(['--help']), run_command(['train', 'quickstart', 'a.b=1'])]\n"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'wandb', 'transformers', 'matplotlib', 'datasets', 'numpy'}\n"
        "print(codes, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 2] []"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "quickstart", "learner.learnig_rate=1e-6"], "did you mean learner.learning_rate?"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", "quickstart", "rollout.group_size=1"], "group_size: must be at least 2"),
        (["train", "quickstart", "rollout.sampling.temperature=0"], "temperature: must be at least 0.01"),
        (["train", "quickstart", "rollout.sampling.top_p=0.9"], "top_p: must be 1.0"),
        (["check", "quickstart", "model.dtype=int8"], "model.dtype"),
        (["eval", "quickstart"], "eval needs --checkpoint DIR"),
        (["eval", "quickstart", "--checkpoint", "/nowhere"], "/nowhere: no such folder"),
        (["export", "/nowhere", "--out", "/tmp/x-does-not-exist"], "holds a run"),
        (["report", "/nowhere"], "holds a run"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(capfd: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    status, out, err = run(capfd, *words)
    assert status == 2
    assert says in err
    assert err.startswith("grpo-dist: ")
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("words", [["nonsense"], ["train"], ["train", "quickstart", "--nonsense"], ["export", "x"]])
def test_wrong_usage_is_exit_2(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    status, _, err = run(capfd, *words)
    assert status == 2
    assert "Usage" in err


def test_export_does_not_write_into_a_full_folder(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    assert run(capfd, "export", "x", "--out", str(tmp_path))[0] == 2


class TestErrors:
    """What `train` raises, as exit codes; by a train that fails in each way."""

    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
        def make(error: BaseException) -> tuple[int, str]:
            def run_(recipe: object) -> int:
                raise error

            monkeypatch.setitem(sys.modules, "grpo_dist.train", type(sys)("grpo_dist.train"))
            sys.modules["grpo_dist.train"].run = run_  # type: ignore[attr-defined]
            status, _, err = run(capfd, "train", "quickstart")
            return status, err

        return make

    def test_user_error(self, failing) -> None:
        assert failing(UserError("no such thing")) == (2, "grpo-dist: no such thing\n")

    def test_failed_run(self, failing) -> None:
        status, err = failing(WorkerLost("rollout", "rollout-0", "killed"))
        assert (status, err) == (1, "grpo-dist: rollout worker rollout-0 was lost: killed\n")

    def test_failed_run_names_its_first_cause(self, failing) -> None:
        error = GrpoDistError("the step failed")
        error.__cause__ = OSError("disk full")
        status, err = failing(error)
        assert status == 1
        assert err.splitlines()[-1] == "  first cause: OSError: disk full"

    @pytest.mark.parametrize("code", [85, 130])
    def test_interrupted(self, failing, code: int) -> None:
        assert failing(Interrupted("stopped, saved", code)) == (code, "grpo-dist: stopped, saved\n")

    def test_ctrl_c_before_anything(self, failing) -> None:
        assert failing(KeyboardInterrupt())[0] == 130

    def test_a_fault_of_ours_shows_its_trace_and_ends_with_the_first_cause(self, failing) -> None:
        outer = RuntimeError("actor died")
        outer.__cause__ = ZeroDivisionError("division by zero")
        status, err = failing(outer)
        assert status == 1
        assert "Traceback" in err
        assert err.splitlines()[-1] == "grpo-dist: failed: ZeroDivisionError: division by zero"

    def test_no_local_values_in_a_trace(self, failing, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "dummy-secret-123")
        assert "dummy-secret-123" not in failing(RuntimeError("x"))[1]


class TestCheck:
    def test_a_good_recipe(self, capfd: pytest.CaptureFixture[str], recipe_file: Path) -> None:
        status, out, _ = run(capfd, "check", str(recipe_file))
        assert status == 0
        assert "2 groups x 4 completions = 8 samples a step" in out
        assert "16 training prompts" in out
        assert "-> reward 1.0 (exact 1)" in out
        assert out.splitlines()[-1] == "ready to train"

    def test_as_json(self, capfd: pytest.CaptureFixture[str], recipe_file: Path) -> None:
        status, out, _ = run(capfd, "check", str(recipe_file), "--json")
        report = json.loads(out)
        assert (status, report["ok"], report["problems"]) == (0, True, [])
        assert report["facts"]["parameters"].replace(",", "").isdigit()

    def test_all_problems_in_one_go(self, capfd: pytest.CaptureFixture[str], recipe_file: Path, tmp_path: Path) -> None:
        """h4: a bad verifier, a missing model folder, five bad rows, too many workers."""
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 5 + '{"prompt": "1+2=", "answer": "3"}\n')
        status, out, err = run(
            capfd, "check", str(recipe_file), "verifiers.use.0.name=exakt", "rollout.workers=500", "rollout.engine.x=1"
        )
        assert status == 2
        assert "did you mean 'exact'?" in err
        assert "the cluster cannot hold this run" in err
        assert "rollout: 500 x" in err
        assert err.count("rows.jsonl:") >= 5
        assert "problem(s), listed on standard error" in out
        status, _, err = run(
            capfd, "check", str(recipe_file), f"model.path={tmp_path}/none", "verifiers.use.0.name=exakt"
        )
        assert status == 2
        assert "no such folder" in err
        assert "did you mean 'exact'?" in err

    def test_problems_as_json(self, capfd: pytest.CaptureFixture[str], recipe_file: Path) -> None:
        status, out, _ = run(capfd, "check", str(recipe_file), "learner.rnks=1", "--json")
        assert status == 2
        assert json.loads(out)["problems"][0].endswith("learner.rnks: unknown key; did you mean learner.ranks?")

    def test_a_prompt_budget_beyond_the_context(self, capfd: pytest.CaptureFixture[str], recipe_file: Path) -> None:
        status, _, err = run(capfd, "check", str(recipe_file), "data.max_prompt_tokens=510")
        assert status == 2
        assert "exceed the model's context of 512" in err

    def test_little_room_for_ray(
        self, capfd: pytest.CaptureFixture[str], recipe_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """f10: a temporary folder without room is refused before Ray fills it."""
        from grpo_dist import check

        monkeypatch.setattr(check, "RAY_TEMP_NEEDED", 1 << 60)
        monkeypatch.setenv("RAY_TMPDIR", "/tmp")
        for verb in ("check", "train"):
            status, _, err = run(capfd, verb, str(recipe_file))
            assert status == 2
            assert "/tmp: " in err
            assert "set RAY_TMPDIR to a folder with room" in err

    def test_a_disk_too_small_for_checkpoints(
        self, capfd: pytest.CaptureFixture[str], recipe_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from grpo_dist import check

        monkeypatch.setattr(check, "free_bytes", lambda path: 1_000_000)
        monkeypatch.setattr(check, "RAY_TEMP_NEEDED", 0)
        status, _, err = run(capfd, "check", str(recipe_file), "checkpoint.keep=3")
        assert status == 2
        assert "checkpoints need about" in err

    def test_quickstart_without_building_the_policy(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        status, out, _ = run(capfd, "check", "quickstart")
        assert status == 0
        assert "6,305 training prompts" in out
        assert "256 held out" in out
        assert "302,720" in out
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [0, 1, 3, 85, 130])
def test_what_a_verb_returns_is_the_exit_status(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As `logs -f` and `submit --wait` do: they end with the run's own code."""
    from grpo_dist.submit import verbs

    monkeypatch.setattr(verbs, "logs", lambda run, **options: code)
    assert run(capfd, "logs", "some-run", "-f")[0] == code


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("grpo-dist")
    done = subprocess.run([command, "recipes"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = Path(sys.executable).with_name("grpo-dist")
    done = subprocess.run(
        f"{command} recipes --schema | head -1", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr


class TestSubmission:
    def test_a_dry_run_prints_what_would_be_sent(self, capfd: pytest.CaptureFixture[str]) -> None:
        cluster = Path(__file__).parents[2] / "cluster_configs/slurm/one-node-8gpu.yaml"
        status, out, _ = run(capfd, "submit", "quickstart", "--cluster", str(cluster), "--dry-run")
        assert status == 0
        assert "#SBATCH" in out

    @pytest.mark.parametrize(
        "words", [["submit", "quickstart"], ["status", "no-such-run"], ["logs", "no-such-run"], ["stop", "no-such-run"]]
    )
    def test_what_is_not_there_is_exit_2(
        self, capfd: pytest.CaptureFixture[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        status, _, err = run(capfd, *words)
        assert status == 2
        assert err.startswith("grpo-dist: ")
        assert "Traceback" not in err


def test_score_prints_one_verdict_a_row(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "7", "answer": "7"}\n{"completion": "8", "answer": "7"}\n')
    status, out, err = run(capfd, "score", str(rows), "--verifier", "exact")
    assert status == 0
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [1.0, 0.0]
    assert "2 rows, 1 correct, 0 without a verdict" in err
    assert "one verdict took p50" in err
    assert "the slowest rows: " in err


def test_score_with_the_verifiers_of_a_recipe(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, recipe_file: Path
) -> None:
    rows = tmp_path / "answers.jsonl"
    rows.write_text('{"completion": "so #7", "answer": "7"}\n')
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["verifiers"]["use"] = [{"name": "exact", "after": "#", "weight": 2}]
    recipe_file.write_text(yaml.safe_dump(recipe))
    status, out, _ = run(capfd, "score", str(rows), "--recipe", str(recipe_file))
    assert (status, json.loads(out)["reward"]) == (0, 2.0)
    status, _, err = run(capfd, "score", str(rows), "--recipe", str(recipe_file), "--verifier", "math")
    assert status == 2
    assert "exclude each other" in err
    recipe["verifiers"]["use"] = [{"name": "exact", "aftr": "#"}]
    recipe_file.write_text(yaml.safe_dump(recipe))
    for verb in ("check", "score"):
        words = [str(recipe_file)] if verb == "check" else [str(rows), "--recipe", str(recipe_file)]
        status, _, err = run(capfd, verb, *words)
        assert status == 2
        assert f"{recipe_file}:" in err
        assert "verifiers.use.0.aftr: 'exact' has no such option" in err


def test_replay_of_what_is_not_there_is_exit_2(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capfd, "replay", str(tmp_path), "--step", "1")
    assert status == 2
    assert "holds a run" in err
