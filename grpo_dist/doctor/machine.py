"""What one machine says of itself: versions, GPUs, memory and limits, network, sandbox, environment.

    look() ─► rows (ok | warn | fail, subject, text with what to do) and facts to be compared between nodes

Runs on this machine for `grpo-dist doctor`, in an actor on every node of a cluster, and by itself through ssh:
`python -m grpo_dist.doctor.machine` prints both as JSON. Nothing is changed; ray and vllm are not imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from grpo_dist.errors import UserError
from grpo_dist.launch.checks import node_findings
from grpo_dist.launch.netinfo import own_address
from grpo_dist.launch.ports import port_is_free

Level = Literal["ok", "warn", "fail"]
SHOWN = ("torch", "ray", "vllm", "deepspeed", "transformers")
COMPARED = ("grpo-dist", *SHOWN)
DRIVER_FOR_CUDA = {13: 580, 12: 525}  # least NVIDIA driver branch
FREE = 0.95  # of a GPU's memory


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the doctor. ``node`` is empty for this machine."""

    level: Level
    subject: str
    text: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What a machine says."""

    rows: tuple[Row, ...]
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows], "facts": self.facts}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Look:
        return cls(tuple(Row(**row) for row in said["rows"]), dict(said["facts"]))


def look(interface: str | None = None, *, in_cluster: bool = False) -> Look:
    """Everything about this machine; a few seconds, torch is imported. ``in_cluster``: a Ray is meant to run here."""
    gpus, gpu_rows = graphics()
    rows = [
        *version_rows(), *gpu_rows, *torch_rows(bool(gpus)), *limit_rows(),
        *network_rows(interface, in_cluster=in_cluster), *environment_rows(os.environ), sandbox_row(),
    ]  # fmt: skip
    facts = {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), **versions(COMPARED)},
        "gpus": len(gpus),
        "driver": gpus[0]["driver_version"] if gpus else "",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "GLOO_"))},
    }
    return Look(tuple(rows), facts)


# ---- versions


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Installed versions; "" for what is missing. The CPU build of vLLM counts as vllm."""
    found = {}
    for name in names:
        for real in (name, f"{name}-cpu"):
            try:
                found[name] = importlib.metadata.version(real)
                break
            except importlib.metadata.PackageNotFoundError:
                found[name] = ""
    return found


def version_rows() -> Iterator[Row]:
    """Python and every pinned package, against what this installation declares."""
    wrong = []
    for text in importlib.metadata.requires("grpo-dist") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = versions((wanted.name,))[wanted.name]
        if not have:
            wrong.append(f"{wanted.name} is missing")
        elif not wanted.specifier.contains(have, prereleases=True):
            wrong.append(f"{wanted.name} {have}, wanted {wanted.specifier}")
    shown = ", ".join(f"{name} {have or 'missing'}" for name, have in versions(SHOWN).items())
    text = f"python {platform.python_version()}, {shown}"
    if not versions(("vllm",))["vllm"]:
        wrong.append("vllm is missing: pip install 'grpo-dist[gpu]' (or [cpu])")
    if wrong:
        yield Row("fail", "versions", f"{text}; {'; '.join(wrong)}: install into a fresh environment (tools/venv.sh)")
    else:
        yield Row("ok", "versions", f"{text}: as pinned")


# ---- GPUs

_QUERY = ("index", "name", "driver_version", "memory.total", "memory.used", "compute_mode", "mig.mode.current")


def graphics() -> tuple[list[dict[str, str]], list[Row]]:
    """GPUs as nvidia-smi lists them, and what is wrong with them."""
    if shutil.which("nvidia-smi") is None:
        return [], [Row("ok", "GPUs", "none (no nvidia-smi): runs use gloo and CPUs")]
    try:
        listed = _smi(f"--query-gpu={','.join(_QUERY)}")
        busy = _smi("--query-compute-apps=pid,used_memory,process_name")
    except (OSError, subprocess.SubprocessError) as error:
        return [], [Row("fail", "GPUs", f"nvidia-smi does not answer ({error}): driver or device is broken, see dmesg")]
    gpus = [dict(zip(_QUERY, [part.strip() for part in line.split(",")], strict=False)) for line in listed]
    return gpus, list(graphics_rows(gpus, busy))


def graphics_rows(gpus: list[dict[str, str]], busy: list[str]) -> Iterator[Row]:
    """Judged apart from being asked, so that it can be tested without a GPU."""
    if not gpus:
        yield Row("fail", "GPUs", "nvidia-smi lists none: are they visible in this container (--gpus all)?")
        return
    names = sorted({gpu["name"] for gpu in gpus})
    yield Row("ok", "GPUs", f"{len(gpus)} x {' and '.join(names)}, driver {gpus[0]['driver_version']}")
    if len(names) > 1:
        yield Row("warn", "GPUs", "different models on one node: the slowest sets the pace of a collective")
    for gpu in gpus:
        total, used = _number(gpu["memory.total"]), _number(gpu["memory.used"])
        if used > (1 - FREE) * total:
            yield Row(
                "warn", f"GPU {gpu['index']}",
                f"{used:.0f} of {total:.0f} MiB are in use: end what holds it ({'; '.join(busy) or 'not listed'})",
            )  # fmt: skip
        if gpu.get("mig.mode.current", "").lower() == "enabled":
            yield Row("warn", f"GPU {gpu['index']}", "MIG is on: ranks and engines need whole GPUs")
        if gpu.get("compute_mode", "Default") not in ("Default", ""):
            yield Row(
                "warn", f"GPU {gpu['index']}",
                f"compute mode {gpu['compute_mode']}: vLLM's processes need Default (nvidia-smi -c 0)",
            )  # fmt: skip


def torch_rows(gpus: bool) -> Iterator[Row]:
    """Whether torch was built for what is here."""
    import torch

    cuda = torch.version.cuda
    if not gpus:
        if cuda:
            yield Row("ok", "torch", f"built for CUDA {cuda}, there is no GPU to use")
        return
    if cuda is None:
        yield Row(
            "fail", "torch", "a CPU build although there are GPUs: pip install -e '.[gpu]' in a fresh environment"
        )
        return
    listed, least = _smi("--query-gpu=driver_version"), DRIVER_FOR_CUDA.get(int(cuda.split(".")[0]), 0)
    if listed and _number(listed[0].split(".")[0]) < least:
        yield Row("fail", "driver", f"{listed[0]}, CUDA {cuda} needs branch {least} or newer")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        yield Row("ok", "torch", f"CUDA {cuda}, NCCL {nccl}, sees {torch.cuda.device_count()} GPUs")
    else:
        yield Row("fail", "torch", f"built for CUDA {cuda} but cannot use it: driver too old, or CUDA_VISIBLE_DEVICES")


def _smi(query: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=True
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


# ---- memory, disk, limits


def limit_rows() -> Iterator[Row]:
    """/dev/shm, temporary space, open files, locked memory, host memory."""
    import psutil

    levels: dict[str, Level] = {"ok": "ok", "warning": "warn", "fatal": "fail"}
    temp = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for finding in node_findings(temp):
        yield Row(levels[finding.level], finding.subject, finding.text)
    memory = psutil.virtual_memory()
    yield Row(
        "ok" if memory.available > 4 << 30 else "warn", "memory",
        f"{memory.available / 1e9:.0f} of {memory.total / 1e9:.0f} GB free, {os.cpu_count()} cores"
        + ("" if memory.available > 4 << 30 else ": an engine alone takes 2 GB, Ray ends workers above 95 %"),
    )  # fmt: skip
    here = shutil.disk_usage(Path.cwd()).free
    enough = here > 10 << 30
    yield Row(
        "ok" if enough else "warn", "disk", f"{here / 1e9:.0f} GB free in {Path.cwd()}"
        + ("" if enough else ": runs and checkpoints go below it unless run.out says otherwise"),
    )  # fmt: skip
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").is_dir() and soft != resource.RLIM_INFINITY:
        yield Row("warn", "locked memory", f"limit {soft >> 10} KiB: InfiniBand wants ulimit -l unlimited")


# ---- network


RAY_PORTS = {6379: "GCS", 8265: "dashboard", 10001: "client", 52365: "agent"}


def network_rows(interface: str | None, *, in_cluster: bool = False) -> Iterator[Row]:
    """The address that other nodes would be told, and whether Ray's usual ports are free."""
    try:
        chosen = own_address(interface)
        yield Row("ok", "address", f"{chosen.ip} on {chosen.name}")
    except UserError as error:
        yield Row("fail" if interface else "warn", "address", f"{error} (matters with more than one node)")
    if in_cluster:
        return
    taken = [f"{port} ({name})" for port, name in RAY_PORTS.items() if not port_is_free(port)]
    if taken:
        yield Row(
            "warn", "ports",
            f"in use: {', '.join(taken)}: a Ray runs here already; `submit` goes around them, `ray start` does not",
        )  # fmt: skip
    else:
        yield Row("ok", "ports", "Ray's usual ones are free")


def environment_rows(env: Mapping[str, str]) -> Iterator[Row]:
    """Variables that are known to break things."""
    if (value := env.get("VLLM_PORT")) is not None:
        yield Row("warn", "VLLM_PORT", f"{value}: engines of one node would clash; they drop it, unset it elsewhere")
    if env.get("NCCL_CUMEM_ENABLE"):
        yield Row("warn", "NCCL_CUMEM_ENABLE", "must be the same in all workers, and is best left alone: unset it")
    if env.get("RAY_process_group_cleanup_enabled") in ("0", "false"):
        yield Row("warn", "Ray", "RAY_process_group_cleanup_enabled=0: a killed engine leaves its processes: unset it")
    if env.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES") in ("1", "true"):
        yield Row(
            "warn", "Ray", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set: a worker would see every GPU: unset it "
            "before Ray starts",
        )  # fmt: skip
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY") if env.get(name)]
    if proxies and not (env.get("no_proxy") or env.get("NO_PROXY")):
        yield Row(
            "warn", "proxy", f"{proxies[0]} is set and no_proxy is not: traffic between nodes may go to the proxy"
        )


@functools.cache
def sandbox_row() -> Row:
    """How code of models would be confined here."""
    from grpo_dist.verifiers.sandbox import strongest

    level = strongest().level
    if level == "limits":
        return Row(
            "warn", "sandbox", "code verifiers would run with limits only: install bubblewrap, or allow user namespaces"
        )
    return Row("ok", "sandbox", f"code verifiers run in {level}")


def main() -> int:
    """For ssh: rows and facts as one line of JSON."""
    print(json.dumps(look(os.environ.get("GRPO_INTERFACE")).as_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
