"""Every benchmark, one after another, each in a process of its own: ``make bench``, or ``python -m benchmarks NAME …``.

Each prints a table on standard error and one JSON line on standard output. Figures are ratios measured side by side in
one run; seconds of two machines, or of a busy and a quiet one, do not compare.

``objectives`` (short quickstarts, a minute each) and ``peers`` (needs TRL: ``make bench-peers``) only run when named.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def names() -> list[str]:
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


ONLY_WHEN_NAMED = {"objectives", "peers"}


def main(wanted: list[str]) -> int:
    if unknown := [name for name in wanted if name not in names()]:
        print(f"no benchmark {unknown[0]!r}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or sorted({*names()} - ONLY_WHEN_NAMED):
        print(f"== {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
