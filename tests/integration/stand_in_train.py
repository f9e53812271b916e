"""A STAND-IN for `grpo-dist train`, for tests of launching only: no model, no learning, a step is a short sleep.

It keeps what launchers rely on: joins the Ray that RAY_ADDRESS names, asks each role's nodes for a sign of life, writes
metrics.jsonl and a checkpoint per step, continues with --resume, ends with 130 after SIGTERM and 85 after SIGUSR1 (the
step finished and saved), with 1 when the run is called fail… (at step 2), and with 2 for a recipe it cannot read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

from grpo_dist.errors import RecipeError
from grpo_dist.recipe_file import load_recipe

STEP_SECONDS = 0.3
asked: list[int] = []


WORKERS: list[Any] = []  # alive as long as the run


def ask_roles(labels: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """One answer per role, from the node that the recipe's labels name: who, where, which process."""
    import ray

    ray.init(log_to_driver=False)

    @ray.remote(num_cpus=0.1)
    class Worker:
        def where(self) -> tuple[str, str, int]:
            print(f"stand-in worker says hello from {socket.gethostname()}", flush=True)
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    names = {node["NodeID"]: node["Labels"].get("grpo.dev/node") for node in ray.nodes()}
    found = []
    for role, wanted in labels.items():
        worker = Worker.options(label_selector=wanted).remote()  # type: ignore[attr-defined]
        node, ip, pid = ray.get(worker.where.remote(), timeout=60)
        found.append({"kind": f"{role}_started", "worker": f"{role}-0", "node": ip, "pid": pid, "name": names[node]})
        WORKERS.append(worker)
    return found


def main(arguments: list[str]) -> int:
    assert arguments[0] == "train"
    try:
        recipe = load_recipe(arguments[1])
    except RecipeError as error:
        print(f"grpo-dist: {error}", file=sys.stderr)
        return 2
    folder = recipe.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "checkpoint.json"
    state = (
        json.loads(saved.read_text()) if "--resume" in arguments and saved.exists() else {"step": 0, "wandb": "id-1"}
    )
    print(f"stand-in: starts at step {state['step']} with W&B id {state['wandb']}", flush=True)
    sections = {"learner": recipe.learner, "rollout": recipe.rollout, "verifier": recipe.verifiers}
    places = ask_roles({role: section.placement.labels for role, section in sections.items()})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # after ray.init, which takes SIGTERM for itself
        signal.signal(number, lambda received, _: asked.append(received))
    with (folder / "events.jsonl").open("a") as events:
        events.writelines(json.dumps({"time": time.time(), **place}) + "\n" for place in places)
    for step in range(state["step"] + 1, recipe.run.steps + 1):
        time.sleep(STEP_SECONDS)
        if recipe.run.name.startswith("fail") and step == 2:
            raise RuntimeError("stand-in: step 2 fails on purpose")
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "time": time.time(), "rollout/reward_mean": step / 100}) + "\n")
        print(f"stand-in: step {step}", flush=True)
        state["step"] = step
        aside = saved.with_suffix(".aside")
        aside.write_text(json.dumps(state))
        aside.replace(saved)
        if asked:
            code = 85 if asked[0] == signal.SIGUSR1 else 130
            print(f"stand-in: saved step {step}, ends with {code}", flush=True)
            return code
    print("stand-in: done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
