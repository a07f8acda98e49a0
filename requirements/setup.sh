#!/usr/bin/env bash
# Builds .venv: a Python from 3.11 to 3.13, the CPU build of torch, the pinned packages of cpu.txt, this checkout. `make setup` runs it.
# A failure says what is wrong and leaves no .venv/.ready, so that the next call goes on from where this one stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
torch_version=2.13.0

fail() {
  printf 'set-up failed: %s\n' "$1" >&2
  exit 1
}

step() {
  local what=$1
  shift
  printf '%s ...\n' "$what"
  if ! "$@" >>.venv/setup.log 2>&1; then
    local reason
    reason=$(grep '^ERROR' .venv/setup.log | tail -n 1 | cut -c 1-200)
    fail "$what: ${reason:-$(tail -n 1 .venv/setup.log)} (whole log: .venv/setup.log). Mend that, then run \`make setup\` again."
  fi
}

install_torch() {
  # First where pip is set up to look (a wheel folder, a mirror), then PyTorch's own index: PyPI carries the CUDA build only.
  .venv/bin/python -m pip install --no-deps "torch==$torch_version+cpu" ||
    .venv/bin/python -m pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch_version+cpu"
}

python=""
for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 found. Install one, or name it: make setup PYTHON=/path/to/python3.11"

rm -f .venv/.ready
"$python" -m venv .venv >/dev/null ||
  fail "$python cannot make a virtual environment. On Debian and Ubuntu install its venv package (python3-venv)."
: >.venv/setup.log
step "torch $torch_version, CPU build" install_torch
step "pinned packages of requirements/cpu.txt" .venv/bin/python -m pip install --no-deps -r requirements/cpu.txt
step "this checkout, editable" .venv/bin/python -m pip install --no-deps --no-build-isolation -e .
step "check that everything imports" .venv/bin/python requirements/check.py
touch .venv/.ready
echo "ready: .venv"
