"""The ``grpo-dist`` command: words to calls, errors to messages and exit codes. Heavy libraries load inside the verbs.

0 done · 1 the run failed · 2 the input is wrong · 85 saved, requeue me · 130 interrupted after a clean save
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from grpo_dist import cli_before
from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.recipe_file import find_recipe, load_recipe, placed, recipe_description, shipped_recipes
from grpo_dist.recipe_keys import recipe_keys


def _leave(status: object, **_: object) -> None:
    """What a verb returns is the exit status; typer itself would forget it."""
    if isinstance(status, int):
        raise typer.Exit(status)


app = typer.Typer(
    name="grpo-dist",
    result_callback=_leave,
    help="Distributed GRPO: Ray actors, vLLM rollouts, DeepSpeed ZeRO-3 learners.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
cli_before.register(app)

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. learner.learning_rate=1e-6.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under ./runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of this name, if there is one.")] = False,
) -> None:
    """Train to the end of the recipe."""
    words = [*(overrides or ()), *(["run.resume=true"] if resume else ())]
    loaded = load_recipe(recipe, words)
    from grpo_dist.check import ray_temp_room
    from grpo_dist.train import run

    problem, warning = ray_temp_room()
    if problem is not None:
        raise UserError(problem)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)
    with placed(recipe, words):
        status = run(loaded)
    if status == 0 and loaded.model.path == "quickstart":
        from grpo_dist.quickstart.summary import closing_words

        print(closing_words(loaded.run_dir))
    raise typer.Exit(status)


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    offline: Annotated[bool, typer.Option("--offline", help="Neither model, data nor machines are looked at.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for every problem at once, without starting an engine."""
    try:
        loaded = load_recipe(recipe, overrides or ())
    except UserError as error:
        if as_json:
            print(json.dumps({"ok": False, "problems": str(error).split("\n"), "warnings": [], "facts": {}}, indent=2))
        raise
    from grpo_dist.check import check as look

    with placed(recipe, overrides or ()) as place:
        report = look(loaded, offline=offline)
        report.problems = list(map(place, report.problems))
    if as_json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        width = max(len(name) for name in report.facts)
        for name, text in report.facts.items():
            print(f"{name:<{width}}  {text}")
        for text in report.warnings:
            print(f"warning: {text}")
        good = "the recipe is sound; what is listed as skipped was not looked at" if offline else "ready to train"
        print(good if report.ok else f"{len(report.problems)} problem(s), listed on standard error")
    if not report.ok:
        raise UserError("\n".join(report.problems))


@app.command(name="eval")
def evaluate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint folder, or an exported model folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """pass@1 and pass@k on the evaluation set."""
    loaded = load_recipe(recipe, overrides or ())
    if checkpoint is None:
        raise UserError("eval needs --checkpoint DIR: a checkpoint of a run, or an exported model folder")
    if not checkpoint.is_dir():
        raise UserError(f"--checkpoint {checkpoint}: no such folder")
    from grpo_dist.saved import evaluate_saved

    with placed(recipe, overrides or ()):
        values = evaluate_saved(loaded, checkpoint)
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        for name, value in values.items():
            print(f"{name}  {value:.4f}" if isinstance(value, float) else f"{name}  {value}")


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="Folder to write the model to; must not exist or be empty.")],
    step: Annotated[int | None, typer.Option(help="By default the newest good checkpoint.")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: already exists and is not an empty folder")
    folder = run_folder(run)
    from grpo_dist.saved import export_saved

    checkpoint = export_saved(folder, step, out)
    print(f"wrote {out} from {checkpoint}")


@app.command()
def score(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL rows {prompt?, completion, answer, verifier?}.")],
    verifier: Annotated[str | None, typer.Option(help="Judges the rows that name none.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Score with the verifiers of this recipe instead.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Answers judged at a time.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that one verdict may take.")] = 10.0,
) -> int:
    """Score rows with the verifiers of training; one JSON verdict per row, in order, on standard output."""
    from grpo_dist.verifiers.score import score_file

    if recipe is None:
        summary = score_file(file, sys.stdout, verifier=verifier, workers=workers, timeout=timeout)
    elif verifier is not None:
        raise UserError("--recipe and --verifier exclude each other: the recipe names its verifiers")
    else:
        uses = load_recipe(recipe).verifiers.use
        with placed(recipe):
            summary = score_file(file, sys.stdout, uses=uses, workers=workers, timeout=timeout)
    print("\n".join(summary.lines()), file=sys.stderr)
    return 0


@app.command()
def replay(
    run: RunArgument,
    step: Annotated[int, typer.Option(help="The step whose rollouts are scored again.")],
    workers: Annotated[int, typer.Option(min=1, help="Answers judged at a time.")] = 1,
) -> int:
    """Score the dumped rollouts of a step again: do rewards and advantages agree with what was trained on?"""
    folder = run_folder(run)
    from grpo_dist.replay import replay as score_again

    found = score_again(folder, step, workers=workers)
    print("\n".join(found.lines()))
    return 0 if found.agrees else 1


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="File to write; by default report.html in the run's folder.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the main curves into this PNG file instead.")] = None,
) -> None:
    """Write a self-contained report.html from the run folder alone."""
    folder = run_folder(run)
    from grpo_dist.monitor.report import write_picture, write_report

    if picture is not None:
        print(f"picture: {write_picture(folder, picture)}")
    else:
        print(f"report: {write_report(folder, out).absolute()}")


RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, its submission id, or its folder.")]


@app.command()
def submit(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file: which back end, which nodes, which roles.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print exactly what would be sent.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run and end with its exit status.")] = False,
) -> int:
    """Submit to Ray Jobs, Slurm, Kubernetes or hosts, as the cluster file says."""
    if cluster is None:
        raise UserError("submit needs --cluster FILE (cluster_configs/ has examples)")
    from grpo_dist.submit import verbs

    return verbs.submit(recipe, cluster, overrides or (), dry_run=dry_run, wait=wait)


@app.command()
def jobs(
    cluster: Annotated[
        Path | None, typer.Option(help="Ask this cluster; otherwise what was submitted from here.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """What runs."""
    from grpo_dist.submit import verbs

    return verbs.jobs(cluster=cluster, as_json=as_json)


@app.command()
def status(run: RunName, as_json: AsJson = False) -> int:
    """How far a submitted run is, and what each worker does."""
    from grpo_dist.submit import verbs

    return verbs.status(run, as_json=as_json)


@app.command()
def logs(
    run: RunName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the run ends, with its exit status.")
    ] = False,
    role: Annotated[str | None, typer.Option(help="learner, rollout or verifier; by default the driver.")] = None,
    rank: Annotated[int, typer.Option(help="Which worker of the role.")] = 0,
) -> int:
    """The output of a submitted run."""
    from grpo_dist.submit import verbs

    return verbs.logs(run, role=role, rank=rank, follow=follow)


@app.command()
def stop(
    run: RunName,
    now: Annotated[bool, typer.Option("--now", help="At once, without saving.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 0,
) -> int:
    """Stop a submitted run: it saves at the next step boundary."""
    from grpo_dist.submit import verbs

    return verbs.stop(run, now=now, wait=wait)


@app.command()
def recipes(
    schema: Annotated[bool, typer.Option("--schema", help="Every key with its type, default and description.")] = False,
    show: Annotated[str | None, typer.Option(help="Print one recipe.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped recipes."""
    if show is not None:
        print(find_recipe(show).read_text(encoding="utf-8"), end="")
    elif schema:
        print_schema(as_json)
    else:
        found = {name: recipe_description(file) for name, file in shipped_recipes().items()}
        if as_json:
            print(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            width = max(len(name) for name in found)
            for name, text in found.items():
                print(f"{name:<{width}}  {text}")


def print_schema(as_json: bool) -> None:
    """Every key of a recipe."""
    keys = recipe_keys()
    if as_json:
        rows = [
            {"key": k.path, "type": k.type, "default": k.default, "required": k.required, "description": k.description}
            for k in keys
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for key in keys:
        if key.is_section:
            print(f"\n{key.path}: {key.description}")
        else:
            default = "required" if key.required else f"default {key.default}"
            print(f"  {key.path}  <{key.type}>  {default}\n      {key.description}")


def run_folder(run: Path) -> Path:
    """A run's folder from its path, or from its name under ./runs. Raises UserError."""
    for folder in (run, Path("runs") / run):
        if (folder / "recipe.yaml").is_file():
            return folder
    raise UserError(f"{run}: neither this folder nor runs/{run} holds a run (no recipe.yaml)")


# ---- errors and exit codes


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; the exit status."""
    try:
        app(list(arguments), prog_name="grpo-dist")
    except SystemExit as leave:  # how typer ends, also after a usage error (2) or a closed pipe (1)
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except KeyboardInterrupt:
        return 130
    except GrpoDistError as error:
        print(f"grpo-dist: {_with_causes(error)}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the last frame: a fault of ours is shown whole, its first cause last
        traceback.print_exc()
        cause = first_cause(error)
        print(f"grpo-dist: failed: {type(cause).__name__}: {cause}", file=sys.stderr)
        return 1
    return 0


def _with_causes(error: BaseException) -> str:
    """The message, and for a failed run also what it came from."""
    text = str(error)
    cause = first_cause(error)
    if not isinstance(error, UserError) and cause is not error and str(cause) not in text:
        text += f"\n  first cause: {type(cause).__name__}: {cause}"
    return text


def first_cause(error: BaseException) -> BaseException:
    """Where a chain of errors began, through the wrappers that Ray puts around an actor's own error."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        below = error.__cause__ or getattr(error, "cause", None)
        if below is None and not error.__suppress_context__:
            below = error.__context__
        if not isinstance(below, BaseException):
            break
        error = below
    return error


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
