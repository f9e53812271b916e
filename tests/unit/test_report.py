"""The report: one self-contained page from a run folder alone, also of a run that is young, killed or hostile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_dist import cli
from grpo_dist.config import Recipe
from grpo_dist.errors import UserError
from grpo_dist.monitor.charts import CHARTS, points, reward_parts
from grpo_dist.monitor.records import RunFolder
from grpo_dist.monitor.report import report_html, write_picture, write_report
from tests.conftest import tiny_recipe
from tests.unit.test_records import sample, scored_group


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    recipe = Recipe.model_validate(
        tiny_recipe(run={"out": str(tmp_path), "name": "demo"}) | {"description": "A <demo>"}
    )
    with RunFolder.open(recipe) as folder:
        folder.append_event("engine_started", worker="rollout-0", pid=3)
        folder.append_eval(0, {"eval/pass@1": 0.25})
        for step in range(1, 6):
            values = {
                "rollout/reward_mean": step / 10,
                "train/loss": -0.1 / step,
                "time/step": 1.5,
                "train/tokens": 100.0,
            }
            values |= {"time/learn": 0.5, "time/rollout_wait": 0.7, "rollout/staleness_mean": 0.0}
            folder.append_metrics(step, values)
            group = scored_group(step, [1.0, 0.0, None])
            folder.write_rollouts(step, [group], [sample(step, 0, 1.0), sample(step, 1, -1.0)])
        folder.append_event("engine_lost", worker="rollout-0", why="<script>alert(1)</script>")
        folder.append_eval(5, {"eval/pass@1": 0.75})
    return recipe.run_dir


def test_the_page(run_dir: Path) -> None:
    file = write_report(run_dir)
    text = file.read_text()
    assert file == run_dir / "report.html"
    for wanted in ("5 of 2", "0.100 → 0.500", "0.250 → 0.750", "1.50 s", "500", "A &lt;demo&gt;"):
        assert wanted in text
    for title in ("Reward", "Time of a step", "Staleness", "Loss"):
        assert f">{title}<" in text
    assert "Gradient norm" not in text  # no values: no empty chart
    assert text.count("<svg") == 5  # four charts and the time line
    assert "group_size: 4" in text
    assert "step 1</summary>" in text
    assert "step 5</summary>" in text
    assert "advantage" in text


def test_it_is_self_contained(run_dir: Path) -> None:
    text = report_html(RunFolder.read(run_dir))
    outside = re.findall(r"""(?:src|href)=["']?(?!#)[^"'>]+""", text)
    assert outside == []
    assert "<script" not in text
    assert "@import" not in text


def test_texts_of_models_are_shown_and_not_run(run_dir: Path) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in report_html(RunFolder.read(run_dir))


def test_ids_of_charts_do_not_clash(run_dir: Path) -> None:
    clips = re.findall(r'<clipPath id="([^"]+)"', report_html(RunFolder.read(run_dir)))
    assert len(clips) == len(set(clips)) > 3


def test_a_run_without_a_step(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(tiny_recipe(run={"out": str(tmp_path)}))
    RunFolder.open(recipe).close()
    assert "No step has finished yet" in write_report(recipe.run_dir).read_text()
    with pytest.raises(UserError, match="nothing to draw"):
        write_picture(recipe.run_dir, tmp_path / "x.png")


def test_a_line_cut_off_by_a_kill(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rollout/rew')
    assert "0.100 → 0.500" in write_report(run_dir).read_text()


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no recipe\.yaml"):
        write_report(tmp_path)


def test_a_place_that_cannot_be_written(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_report(run_dir, tmp_path / "none" / "report.html")


def test_the_command(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["report", str(run_dir), "--out", str(tmp_path / "r.html")]) == 0
    assert cli.run_command(["report", str(run_dir), "--picture", str(tmp_path / "p.png")]) == 0
    assert capfd.readouterr().out == f"report: {tmp_path / 'r.html'}\npicture: {tmp_path / 'p.png'}\n"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_points_leave_out_what_is_missing() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": 4}]
    assert points(rows, "a") == ([1.0, 4.0], [1.0, 4.0])
    assert points(rows, "b") == ([], [])


def test_parts_of_the_reward_only_when_there_are_several() -> None:
    assert reward_parts([{"step": 1, "reward/exact_mean": 1.0}]) is None
    chart = reward_parts([{"step": 1, "reward/exact_mean": 1.0, "reward/format_mean": 0.5}])
    assert chart is not None
    assert [line.label for line in chart.lines] == ["exact", "format"]


def test_every_chart_names_metrics_of_the_contract() -> None:
    rooms = ("rollout/", "verify/", "reward/", "train/", "mismatch/", "weights/", "fleet/", "time/", "eval/")
    assert [line.metric for chart in CHARTS for line in chart.lines if not line.metric.startswith(rooms)] == []
