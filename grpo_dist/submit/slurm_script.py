"""A Slurm batch script for a submission: readable, complete, the same that `--dry-run` prints and `sbatch` gets.

    nodes all alike   one job, `srun` starts a node runner on each, roles by place
    nodes that differ a heterogeneous job, a component per role, one `srun` step over all of them

Slurm tells only the batch shell that time is up (--signal=B:USR1): signals to a step would hit Ray's own processes at
the same moment. The shell passes it on as a word in a file, the run saves and ends with 85, the job is requeued.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.submit.cluster import ClusterFile, RoleNodes
from grpo_dist.submit.plan import Submission, shell

# Of the submitter's environment only these and the secrets go along; everything else comes from `setup`.
INHERITED = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "SHELL", "TMPDIR")


def render(submission: Submission) -> str:
    """The whole script."""
    cluster = submission.loaded.cluster
    lines = [
        "#!/usr/bin/env bash",
        f"# {submission.header}. Edit that file, not this one.",
        *_directives(submission),
        "",
        "set -u -o pipefail",
        f"launch={shell([str(submission.launch)])}",
        'attempt="${SLURM_RESTART_COUNT:-0}"',
        'folder="$launch/attempt-$attempt"',
        'mkdir -p "$folder"',
        "unset SLURM_EXPORT_ENV  # srun would hand on only what sbatch was told to",
        *[f"export {name}={shell([value])}" for name, value in cluster.environment.items()],
        *cluster.setup,
        "",
        "# The head of the run reads these words: save and requeue, save and stop.",
        """trap 'printf requeue > "$folder/.control" && mv "$folder/.control" "$folder/control"' USR1""",
        """trap 'printf stop > "$folder/.control" && mv "$folder/.control" "$folder/control"' TERM INT""",
        "",
        *([] if alike(cluster) else _whole(cluster)),
        *_step(submission),
        "step=$!",
        'wait "$step"; code=$?',
        "# A signal ends `wait`, not the step.",
        'while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done',
        "",
        "# The step ends with the largest code of its tasks; the run's own code is in exit.json.",
        """said="$(sed -n 's/.*"code": *\\([0-9]*\\).*/\\1/p' "$folder/exit.json" 2> /dev/null)\"""",
        '[ -n "$said" ] && code="$said"',
        'echo "run ended with $code"',
        *_requeue(cluster),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def alike(cluster: ClusterFile) -> bool:
    """Whether one component can hold all roles."""
    shapes = [(g.gpus, g.cpus, g.memory, g.slurm) for _, g in cluster.roles.groups()]
    return all(shape == shapes[0] for shape in shapes)


def _directives(submission: Submission) -> list[str]:
    cluster, slurm = submission.loaded.cluster, submission.loaded.cluster.slurm
    first = [
        f"--job-name={submission.id}",
        f"--output={submission.launch}/slurm-%j.out",
        "--open-mode=append",
        "--requeue" if cluster.preemption.requeue else "--no-requeue",
        f"--signal=B:USR1@{cluster.preemption.notice}",
        "--export=" + ",".join([*INHERITED, *cluster.secrets]),
    ]
    if cluster.time_limit is not None:
        first.append(f"--time={-(-cluster.time_limit // 60)}")
    for name in ("account", "qos", "reservation"):
        if value := getattr(slurm, name):
            first.append(f"--{name}={value}")
    groups = cluster.roles.groups()
    if alike(cluster):
        count = sum(group.count for _, group in groups)
        return _written([*first, *_component(cluster, groups[0][1], count)])
    lines = _written(first)
    for number, (role, group) in enumerate(groups):
        if number:
            lines.append("#SBATCH hetjob")
        lines.append(f"# {role}")
        lines += _written(_component(cluster, group, group.count))
    return lines


def _component(cluster: ClusterFile, group: RoleNodes, nodes: int) -> list[str]:
    slurm = cluster.slurm
    options = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    if partition := group.slurm.partition or slurm.partition:
        options.append(f"--partition={partition}")
    if group.cpus is not None:
        options.append(f"--cpus-per-task={group.cpus}")
    if group.gpus:
        options.append(f"--gres=gpu:{group.gpus}")
    if group.memory is not None:
        options.append(f"--mem={group.memory >> 20}M")
    elif slurm.exclusive:
        options.append("--mem=0")
    if slurm.exclusive:
        options.append("--exclusive")
    if group.slurm.constraint:
        options.append(f"--constraint={group.slurm.constraint}")
    return [*options, *slurm.options, *group.slurm.options]


def _written(options: Sequence[str]) -> list[str]:
    return [f"#SBATCH {option}" for option in options]


def _whole(cluster: ClusterFile) -> list[str]:
    """When the head's node fails, Slurm (22.05) queues only the head's component again and lets the others run: their
    nodes may come back as the head's, and no step over all of them can start. All are queued again then."""
    others = " ".join(f'"$SLURM_JOB_ID_HET_GROUP_{number}"' for number in range(1, len(cluster.roles.groups())))
    start = r"""'s/.* StartTime=\([^ ]*\).*/\1/p'"""
    return [
        "# After a failure of the head's node Slurm starts its component alone; then queue all of them again.",
        f"""began() {{ date -d "$(scontrol show job -o "$1" | head -n 1 | sed -n {start})" +%s; }}""",
        'if [ "$attempt" -gt 0 ]; then',
        f"  others=({others})",
        '  for part in "${others[@]}"; do',
        '    if [ "$(($(began "$SLURM_JOB_ID") - $(began "$part")))" -gt 10 ]; then',
        """      echo "only the head's component was queued again: queueing all of them\"""",
        '      scontrol requeue "$SLURM_JOB_ID"',
        "      exit 85",
        "    fi",
        "  done",
        "fi",
    ]


def _step(submission: Submission) -> list[str]:
    """Fills `nodes`, `node` and `run`, and starts one step over all components."""
    cluster = submission.loaded.cluster
    groups = cluster.roles.groups()
    roles = ",".join(f"{role}:{group.count}" for role, group in groups)
    run = submission.entry(f"{submission.launch}/recipe.yaml")
    lines = [
        f"run=({shell(run)})",
        "# Index 0 is the head. In a heterogeneous step the index counts over all components.",
        f"node=({shell([*cluster.slurm.wrap, cluster.python, '-m', 'grpo_dist.launch.node'])} \\",
        '  --folder "$folder" --expect "$nodes" --port-key "$SLURM_JOB_ID" \\',
        f"  {shell(['--roles', roles, *_common_options(cluster)])})",
    ]
    if alike(cluster):
        names = 'nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)"'
        return [names, *lines, f"srun {_srun(cluster, groups[0][1])} \\", f"  {_task(groups[0][1])} &"]
    names = " ".join(f'"$SLURM_JOB_NODELIST_HET_GROUP_{number}"' for number in range(len(groups)))
    lines.insert(0, f'nodes="$(for list in {names}; do scontrol show hostnames "$list"; done | paste -sd, -)"')
    for number, (_, group) in enumerate(groups):
        last = number == len(groups) - 1
        lines.append(f"{'  :' if number else 'srun'} --het-group={number} {_srun(cluster, group)} \\")
        lines.append(f"  {_task(group)} {'&' if last else chr(92)}")
    return lines


def _srun(cluster: ClusterFile, group: RoleNodes) -> str:
    options = ["--kill-on-bad-exit=0", "--export=ALL"]
    if group.cpus is not None:
        options.append(f"--cpus-per-task={group.cpus}")  # srun does not take it over from sbatch since 22.05
    return shell([*options, *cluster.slurm.srun])


def _task(group: RoleNodes) -> str:
    options = ["--gpus", str(group.gpus)]
    if group.object_store:
        options += ["--object-store", str(group.object_store)]
    for key, value in group.labels.items():
        options += ["--label", f"{key}={value}"]
    return f'"${{node[@]}}" {shell(options)} -- "${{run[@]}}"'


def _common_options(cluster: ClusterFile) -> list[str]:
    options = ["--wait", str(cluster.wait), "--grace", str(cluster.preemption.grace)]
    if cluster.interface:
        options += ["--interface", cluster.interface]
    if cluster.ports.gcs:
        options += ["--gcs-port", str(cluster.ports.gcs)]
    if cluster.ports.workers:
        options += ["--worker-ports", str(cluster.ports.workers)]
    return options


def _requeue(cluster: ClusterFile) -> list[str]:
    if not cluster.preemption.requeue:
        return []
    return ['if [ "$code" = 85 ]; then scontrol requeue "$SLURM_JOB_ID"; fi']
