"""Kubernetes with the KubeRay operator, through kubectl: apply the rendered RayJob, ask, follow, stop.

Left out: installing the operator (docs/clusters.md says how), and a Python client: kubectl knows the user's contexts.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.submit.backend import Unreachable
from grpo_dist.submit.cluster import ClusterFile
from grpo_dist.submit.kuberay import manifests, render
from grpo_dist.submit.plan import Submission
from grpo_dist.submit.records import JobState, Phase, Record

_PHASES: dict[str, Phase] = {"SUCCEEDED": "succeeded", "FAILED": "failed", "STOPPED": "stopped", "RUNNING": "running"}


class KubernetesBackend:
    """One RayJob per run."""

    def render(self, submission: Submission) -> str:
        return render(submission)

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        cluster = submission.loaded.cluster
        where = {
            "namespace": cluster.kubernetes.namespace,
            "context": cluster.kubernetes.context,
            "python": cluster.python,
        }
        if shutil.which("kubectl") is None:
            raise UserError("kubectl is not on PATH")
        _refuse_early(cluster, where)
        for document in manifests(submission):
            say(_kubectl(where, ["apply", "-f", "-"], stdin=yaml.safe_dump(document)).strip())
        return Record(
            run=submission.run, submission=submission.id, backend="kubernetes", job=submission.id,
            run_dir=str(submission.run_dir), launch=str(submission.launch),
            cluster_file=str(submission.loaded.path.absolute()), where=where,
        )  # fmt: skip

    def state(self, record: Record) -> JobState:
        try:
            found = json.loads(_kubectl(record.where, ["get", "rayjob", record.job, "-o", "json"]))
        except Unreachable as error:
            if "NotFound" in str(error):
                return JobState("unknown", None, f"RayJob {record.job} does not exist any more")
            raise
        return state_of(found)

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        """The driver's output through the head pod's submitter; of a worker through the files in its pod."""
        pod, container = self._head(record), "ray-job-submitter"
        if role is not None:
            yield from self._worker_log(record, role, rank)
            return
        shown = 0
        while True:
            over = not follow or self.state(record).phase not in ("pending", "running")
            if pod is not None:
                text = _kubectl(record.where, ["logs", pod, "-c", container], seconds=120)
                lines = text.splitlines() if over else text.split("\n")[:-1]
                yield from lines[shown:]
                shown = max(shown, len(lines))
            if over:
                return
            time.sleep(2)
            newest = self._head(record)
            if newest != pod:  # a retry has a head of its own
                pod, shown = newest, 0

    def progress(self, record: Record) -> dict[str, Any] | None:
        pod = self._head(record)
        if pod is None:
            return None
        words = ["-m", "grpo_dist.launch.peek", "--launch", record.launch, "--run", record.run_dir]
        try:
            said = _kubectl(record.where, ["exec", pod, "-c", "ray-head", "--", record.where["python"], *words])
        except Unreachable:
            return None  # the pod is starting or ending; the state is known all the same
        answer: dict[str, Any] = json.loads(said)
        return answer

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        state = self.state(record)
        if state.ended:
            say(f"the run has already ended: {state.phase}")
            return
        pod = self._head(record)
        if pod is not None and not now:
            words = ["-m", "grpo_dist.launch.driver", "--marks", record.launch, "--signal", "TERM"]
            said = _kubectl(record.where, ["exec", pod, "-c", "ray-head", "--", record.where["python"], *words])
            if "no driver" not in said:
                # Without this the operator would take the stopped run for a failed one and start it again.
                patch = json.dumps({"spec": {"backoffLimit": 0}})
                _kubectl(record.where, ["patch", "rayjob", record.job, "--type=merge", "-p", patch])
                say("asked to save and stop at the next step boundary")
                return
        _kubectl(record.where, ["delete", "rayjob", record.job, "--wait=false"])
        say("RayJob deleted: its pods get their grace period to save" if not now else "RayJob deleted")

    @staticmethod
    def _head(record: Record) -> str | None:
        """The newest head pod of the run."""
        selector = f"grpo.dev/submission={record.submission},ray.io/node-type=head"
        found = json.loads(_kubectl(record.where, ["get", "pods", "-l", selector, "-o", "json"]))["items"]
        live = [pod for pod in found if pod["status"].get("phase") in ("Running", "Succeeded", "Failed")]
        newest = sorted(live, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        return str(newest[-1]["metadata"]["name"]) if newest else None

    def _worker_log(self, record: Record, role: str, rank: int) -> Iterator[str]:
        from grpo_dist.submit.logs import worker_place

        node, pid = worker_place(self.progress(record), role, rank)
        pods = json.loads(
            _kubectl(record.where, ["get", "pods", "-l", f"grpo.dev/submission={record.submission}", "-o", "json"])
        )
        name = next((p["metadata"]["name"] for p in pods["items"] if p["status"].get("podIP") == node), None)
        if name is None:
            raise GrpoDistError(f"no pod has the address {node} of {role}-{rank} any more")
        command = f"cat /tmp/ray/session_latest/logs/worker-*-{pid}.err /tmp/ray/session_latest/logs/worker-*-{pid}.out"
        yield from _kubectl(record.where, ["exec", str(name), "--", "sh", "-c", command], seconds=120).splitlines()


def state_of(rayjob: dict[str, Any]) -> JobState:
    """From a RayJob's status. The exit code is in the message of Ray's job only."""
    status = rayjob.get("status") or {}
    deployment, job = str(status.get("jobDeploymentStatus") or ""), str(status.get("jobStatus") or "")
    message = str(status.get("message") or "")
    if deployment == "Retrying":
        return JobState("requeued", None, f"starts again, {status.get('failed', 0)} failed so far")
    if job == "SUCCEEDED":
        return JobState("succeeded", 0, "")
    if deployment == "Failed" or job == "FAILED":
        found = re.search(r"exit code (\d+)", message)
        code = int(found[1]) if found else 1
        why = str(status.get("reason") or "") + (f": {message}" if message else "")
        return JobState("stopped" if code == 130 else "failed", code, why.strip(": ")[:300])
    if job in _PHASES:
        return JobState(_PHASES[job], 130 if job == "STOPPED" else None, "")
    cluster = (status.get("rayClusterStatus") or {}).get("state") or "no cluster yet"
    return JobState("pending", None, f"{deployment or 'not seen by the KubeRay operator yet'} ({cluster})")


def _refuse_early(cluster: ClusterFile, where: dict[str, Any]) -> None:
    """Everything that must be there before pods are asked for, in one message."""
    problems = []
    if not _exists(where, ["crd", "rayjobs.ray.io"]):
        problems.append("the KubeRay operator is not installed (no RayJob definition)")
    for volume in cluster.storage.volumes:
        if not _exists(where, ["pvc", volume.claim]):
            problems.append(f"storage.volumes: no PersistentVolumeClaim {volume.claim} in {where['namespace']}")
    if cluster.secrets:
        name = cluster.kubernetes.secret
        have = _kubectl(where, ["get", "secret", name, "--ignore-not-found", "-o", "json"]).strip()
        keys = set((json.loads(have).get("data") or {}) if have else {})
        if absent := [one for one in cluster.secrets if one not in keys]:
            problems.append(
                f"secrets: Secret {name} has no entry {', '.join(absent)}: kubectl create secret generic {name} "
                f"--from-file={absent[0]}=FILE"
            )
    if problems:
        raise UserError("\n".join(problems))


def _exists(where: dict[str, Any], what: Sequence[str]) -> bool:
    return bool(_kubectl(where, ["get", *what, "--ignore-not-found", "-o", "name"]).strip())


def _kubectl(where: dict[str, Any], words: Sequence[str], *, stdin: str | None = None, seconds: float = 60) -> str:
    command = ["kubectl", f"--namespace={where['namespace']}", f"--request-timeout={seconds:.0f}s"]
    if where.get("context"):
        command.append(f"--context={where['context']}")
    try:
        done = subprocess.run([*command, *words], input=stdin, capture_output=True, text=True, timeout=seconds + 10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"kubectl {words[0]}: {error}") from error
    if done.returncode:
        raise Unreachable(f"kubectl {' '.join(words[:3])}: {done.stderr.strip()[-600:]}")
    return done.stdout
