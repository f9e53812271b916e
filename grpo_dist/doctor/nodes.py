"""The nodes of a Ray cluster, asked by an actor on each: their own look, what differs between them, who reaches whom.

    connect ─► nodes and roles ─► an actor pinned to each ─► look │ clock │ reach │ all-reduce ─► a probe per free GPU

Every wait has a limit; a node that says nothing is a row, not a hang. Ray must be there already (RAY_ADDRESS).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_dist.doctor.machine import FREE, Look, Row, look
from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.fleet.cluster import cluster
from grpo_dist.fleet.preflight import Place, Probe, among
from grpo_dist.submit.cluster import ROLE_LABEL, ClusterFile

LOOK_SECONDS = 90.0  # torch loads from slow storage
TALK_SECONDS = 60.0
SKEW = 1.0  # seconds
SHARE = 0.8  # of the median speed: below it a GPU is throttled or broken
MATRIX = 8192


class NodeProbe(Probe):
    """Stands on a node: a preflight's probe that also looks at its machine."""

    def look(self, interface: str | None) -> dict[str, Any]:
        return look(interface, in_cluster=True).as_dict()

    def now(self) -> float:
        return time.time()


class GpuProbe:
    """Stands on one GPU."""

    def measure(self) -> dict[str, Any]:
        """What Ray gave to this actor: one GPU, its identity, free memory, speed of a bf16 product."""
        import torch

        count = torch.cuda.device_count()
        if count != 1:
            return {"visible": count}
        free, total = torch.cuda.mem_get_info()
        one = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
        product = one @ one
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(10):
            product = one @ one
        torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / 10
        return {
            "visible": 1,
            "uuid": str(torch.cuda.get_device_properties(0).uuid),
            "free": free / total,
            "finite": bool(product.isfinite().all()),
            "teraflops": 2 * MATRIX**3 / seconds / 1e12,
        }


def cluster_rows(loaded: ClusterFile | None) -> list[Row]:
    """Everything about the cluster that RAY_ADDRESS names."""
    try:
        with cluster():
            return [
                Row(
                    "ok", "Ray", f"{os.environ['RAY_ADDRESS']} answers, {_authentication()}, version {ray.__version__}"
                ),
                *_nodes(loaded),
            ]
    except UserError as error:
        return [Row("fail", "Ray", str(error).replace("\n", ";"))]


def _authentication() -> str:
    return "with its token" if os.environ.get("RAY_AUTH_MODE") == "token" else "without a token (docs/security.md)"


def _nodes(loaded: ClusterFile | None) -> Iterator[Row]:
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    living = [node for node in known if node["Alive"]]
    for node in known:
        yield node_row(node)
    if loaded is not None:
        yield from role_rows(loaded, living)
    interface = loaded.interface if loaded is not None else None
    actors = {str(node["NodeID"]): _probe(str(node["NodeID"])) for node in living}
    try:
        looks = yield from _looks(living, actors, interface)
        yield from difference_rows(looks)
        yield from gpu_count_rows(living, looks)
        yield from _clocks(living, actors)
        answering = [node for node in living if str(node["NodeManagerAddress"]) in looks]
        yield from _talk(answering, actors)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    yield from gpu_rows(_measure_gpus(living))


def _probe(node: str) -> Any:
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}}
    return ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=pinned, runtime_env=environment).remote()


def node_row(node: Mapping[str, Any]) -> Row:
    """A node as Ray knows it."""
    name = str(node["NodeManagerAddress"])
    if not node["Alive"]:
        why = node.get("DeathReasonMessage") or "no reason known"
        return Row("warn", "node", f"is dead: {why}", name)
    have = node.get("Resources", {})
    labels = ", ".join(f"{k}={v}" for k, v in sorted((node.get("Labels") or {}).items()) if not k.startswith("ray.io/"))
    return Row("ok", "node", f"CPU {have.get('CPU', 0):g}, GPU {have.get('GPU', 0):g}; {labels or 'no labels'}", name)


def role_rows(loaded: ClusterFile, living: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Nodes by role, against the cluster file."""
    groups = loaded.roles.groups()
    if loaded.backend in ("local", "ray") or len(groups) == 1:
        wanted = sum(group.count for _, group in groups)
        if loaded.backend not in ("local", "ray") and len(living) < wanted:
            yield Row("fail", "nodes", f"{len(living)} of {wanted} live: the others have not joined or are gone")
        return
    for role, group in groups:
        count = sum((node.get("Labels") or {}).get(ROLE_LABEL) == role for node in living)
        if count < (group.min if group.min is not None else group.count):
            text = f"{count} of {group.count} nodes live: the others have not joined or are gone"
            yield Row("fail", f"role {role}", text)
        else:
            yield Row("ok", f"role {role}", f"{count} nodes live")


def _looks(
    living: Sequence[Mapping[str, Any]], actors: Mapping[str, Any], interface: str | None
) -> Generator[Row, None, dict[str, Look]]:
    """Rows of every node; returns what each said, by address."""
    looks: dict[str, Look] = {}
    calls = {str(node["NodeID"]): actors[str(node["NodeID"])].look.remote(interface) for node in living}
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=LOOK_SECONDS)
    for node in living:
        name = str(node["NodeManagerAddress"])
        try:
            said = Look.from_dict(ray.get(calls[str(node["NodeID"])], timeout=1))
        except ray.exceptions.RayError as error:
            yield silent_row(name, error)
            continue
        looks[name] = said
        yield from (replace(row, node=name) for row in said.rows)
    return looks


def silent_row(name: str, error: Exception) -> Row:
    """A node that Ray calls alive and that starts no worker."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ray.exceptions.GetTimeoutError):
        first = f"no answer within {LOOK_SECONDS:g} s"
    return Row("fail", "node", f"starts no worker: {first}; is grpo-dist installed there? see raylet.err on it", name)


def difference_rows(looks: Mapping[str, Look]) -> Iterator[Row]:
    """What must be equal everywhere and is not."""
    if len(looks) < 2:
        return
    (first, ours), *others = looks.items()
    same = True
    for name, theirs in others:
        for kind in ("versions", "environment"):
            mine, other = ours.facts[kind], theirs.facts[kind]
            wrong = [f"{k} {other.get(k, 'not set')}, not {mine.get(k, 'not set')}" for k in sorted({*mine, *other})
                     if mine.get(k) != other.get(k)]  # fmt: skip
            if wrong:
                same = False
                level = "fail" if kind == "versions" else "warn"
                yield Row(level, kind, f"differs from {first}: {'; '.join(wrong)}", name)  # type: ignore[arg-type]
    if same:
        yield Row("ok", "nodes", f"{len(looks)} have the same versions and the same NCCL_* and GLOO_* variables")


def gpu_count_rows(living: Sequence[Mapping[str, Any]], looks: Mapping[str, Look]) -> Iterator[Row]:
    """GPUs of the machine against what Ray was told to hand out."""
    for node in living:
        name, told = str(node["NodeManagerAddress"]), int(node.get("Resources", {}).get("GPU", 0))
        if name in looks and looks[name].facts["gpus"] != told:
            yield Row(
                "fail" if told > looks[name].facts["gpus"] else "warn", "GPUs",
                f"Ray hands out {told}, the machine has {looks[name].facts['gpus']}: ray start --num-gpus", name,
            )  # fmt: skip


def _clocks(living: Sequence[Mapping[str, Any]], actors: Mapping[str, Any]) -> Iterator[Row]:
    """Clocks against this machine's: the shortest of five round trips bounds the error."""
    worst = 0.0
    for node in living:
        name = str(node["NodeManagerAddress"])
        best = (float("inf"), 0.0)  # (round trip, offset)
        try:
            for _ in range(5):
                began = time.time()
                theirs = ray.get(actors[str(node["NodeID"])].now.remote(), timeout=5)
                ended = time.time()
                best = min(best, (ended - began, theirs - (began + ended) / 2))
        except ray.exceptions.RayError:
            continue  # it has its row already
        worst = max(worst, abs(best[1]))
        if abs(best[1]) - best[0] / 2 > SKEW:
            yield Row("warn", "clock", f"{best[1]:+.1f} s from this machine's: run an NTP client there", name)
    if worst <= SKEW:
        yield Row("ok", "clocks", f"at most {worst:.2f} s apart")


def _talk(living: Sequence[Mapping[str, Any]], actors: Mapping[str, Any]) -> Iterator[Row]:
    """Connections both ways and an all-reduce over gloo, between nodes."""
    if len(living) < 2:
        return
    places = [Place(str(node["NodeManagerAddress"]), actors[str(node["NodeID"])]) for node in living]
    try:
        text = asyncio.run(among(places, backend="gloo", seconds=TALK_SECONDS))
        yield Row("ok", "network", text)
    except GrpoDistError as error:
        yield Row("fail", "network", str(error).removeprefix("preflight: ").replace("\n", ";"))


def _measure_gpus(living: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(node, measurement) of every GPU that is free now."""
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    actors: list[Any] = []
    calls: list[tuple[str, Any]] = []
    for node in living:
        identity = str(node["NodeID"])
        pinned = NodeAffinitySchedulingStrategy(identity, soft=False)
        for _ in range(int(free.get(identity, {}).get("GPU", 0))):
            actor: Any = ray.remote(GpuProbe).options(num_cpus=0, num_gpus=1, scheduling_strategy=pinned).remote()
            actors.append(actor)
            calls.append((str(node["NodeManagerAddress"]), actor.measure.remote()))
    found = []
    for name, call in calls:
        try:
            found.append((name, ray.get(call, timeout=LOOK_SECONDS)))
        except ray.exceptions.RayError as error:
            found.append((name, {"error": str(error).strip().splitlines()[-1]}))
    for actor in actors:
        ray.kill(actor)
    return found


def gpu_rows(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Row]:
    """Judged apart from being measured, so that it can be tested without a GPU."""
    good = [said for _, said in found if "teraflops" in said]
    speeds = sorted(said["teraflops"] for said in good)
    middle = speeds[len(speeds) // 2] if speeds else 0.0
    seen: dict[str, str] = {}
    for name, said in found:
        if "error" in said:
            yield Row("fail", "GPU", f"cannot be used: {said['error']}", name)
        elif said["visible"] != 1:
            yield Row("fail", "GPU", f"a worker with one GPU sees {said['visible']}: unset CUDA_VISIBLE_DEVICES", name)
        elif seen.setdefault(said["uuid"], name) != name or sum(s.get("uuid") == said["uuid"] for s in good) > 1:
            yield Row("fail", "GPU", f"{said['uuid']} was given to two workers: two Rays on one machine?", name)
        elif not said["finite"]:
            yield Row("fail", "GPU", f"{said['uuid']} computes wrong numbers: take it out", name)
        elif said["teraflops"] < SHARE * middle:
            text = f"{said['uuid']}: {said['teraflops']:.0f} TFLOP/s, the median is {middle:.0f}: throttled?"
            yield Row("warn", "GPU", text, name)
        elif said["free"] < FREE:
            yield Row("warn", "GPU", f"{said['uuid']}: only {said['free']:.0%} of its memory is free", name)
    if good:
        yield Row("ok", "GPUs", f"{len(good)} measured: {speeds[0]:.0f} to {speeds[-1]:.0f} TFLOP/s in bf16")
