"""TRL's side of ``benchmarks.peers``, in a process of its own: GRPOTrainer with its own generation on the same prompts.

    python -m benchmarks._trl JOB.json      # written by benchmarks.peers; a JSON line per step on standard output

The trainer gets what makes it fast here and comparable: weights in the recipe's type, no gradient checkpointing (its
default would compute everything twice), no reference model, prompts already rendered, rewards by the recipe's own
verifiers in this process. Sampling, batch, rates and clipping are those of the recipe.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_dist.config import VerifierUse
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.registry import Judge, build


class StepTimes(TrainerCallback):
    """Seconds of each step from its first to its last moment, and of generation and rewards in it."""

    def __init__(self) -> None:
        self.began, self.generate, self.verify, self.tokens, self.reward = 0.0, 0.0, 0.0, 0, 0.0
        self.cpu = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.cpu, self.generate, self.verify = time.monotonic(), time.process_time(), 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.monotonic() - self.began
        row = {
            "step": state.global_step, "seconds": seconds, "generate": self.generate, "verify": self.verify,
            "learn": seconds - self.generate - self.verify, "tokens": self.tokens, "reward": self.reward,
            "cpu": time.process_time() - self.cpu,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


class Trainer(GRPOTrainer):
    """GRPOTrainer with a clock around its own generation."""

    times: StepTimes

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        out = super()._generate_single_turn(*args, **kwargs)
        self.times.generate += time.monotonic() - began
        self.times.tokens = sum(len(ids) for ids in out[0])
        return out


def reward_function(judge: Judge, times: StepTimes) -> Any:
    def recipe_reward(prompts: list[str], completions: list[str], row: list[str], **_: Any) -> list[float]:
        began, rewards = time.monotonic(), []
        for prompt, completion, text in zip(prompts, completions, row, strict=True):
            fields = json.loads(text)
            item = VerifyItem(
                id=fields["id"], prompt=prompt, completion=completion, finish_reason="stop", answer=fields["answer"],
                extra=fields["extra"],
            )  # fmt: skip
            rewards.append(judge.judge(item).reward or 0.0)
        times.reward, times.verify = sum(rewards) / len(rewards), times.verify + time.monotonic() - began
        return rewards

    return recipe_reward


def main(file: str) -> None:
    job = json.loads(Path(file).read_text())
    torch.set_num_threads(job["threads"])
    times = StepTimes()
    config = GRPOConfig(
        output_dir=job["out"], use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, seed=job["seed"], max_steps=job["steps"], shuffle_dataset=False,
        per_device_train_batch_size=job["batch"], num_generations=job["group_size"],
        gradient_accumulation_steps=job["groups"] * job["group_size"] // job["batch"],
        max_completion_length=job["max_tokens"], temperature=job["temperature"],
        learning_rate=job["learning_rate"], lr_scheduler_type="constant", beta=0.0, adam_beta2=job["beta2"],
        max_grad_norm=job["grad_clip"], bf16=job["dtype"] == "bfloat16", gradient_checkpointing=False,
        model_init_kwargs={"dtype": job["dtype"]},
    )  # fmt: skip
    judge = build([VerifierUse.model_validate(use) for use in job["verifiers"]])
    rows = [{"prompt": p["prompt"], "row": json.dumps(p)} for p in job["prompts"]]
    trainer = Trainer(
        model=job["model"], reward_funcs=reward_function(judge, times), args=config,
        train_dataset=Dataset.from_list(rows), callbacks=[times],
    )  # fmt: skip
    trainer.times = times
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
