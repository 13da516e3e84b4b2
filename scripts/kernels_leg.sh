#!/usr/bin/env bash
# The kernels' tests under Python 3.12 with the JAX of the GPU machines.
# Without a Python 3.12 it says so and passes; with REQUIRE_GATE=1 it fails.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-kernels
log=$venv/test.log

# A python3.12 on PATH may be a shim that cannot run: only one that answers counts.
find_python() {
  local candidate
  shopt -s nullglob
  for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3 \
      "$HOME"/.pyenv/versions/3.12*/bin/python3; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

if ! python=$(find_python); then
  rm -f "$log"
  echo "kernels' tests: no Python 3.12 that runs, neither python3.12 on PATH nor one of pyenv's"
  if [ "${REQUIRE_GATE:-}" = 1 ]; then
    echo "kernels' tests: REQUIRE_GATE=1, so this fails" >&2
    exit 1
  fi
  exit 0
fi

bash scripts/make_venv.sh "$venv" "$python"
stamp=$venv/.stamp-test
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
  touch "$stamp"
fi
"$venv/bin/python" -c 'import jax, sys; print("kernels: Python", sys.version.split()[0], "jax", jax.__version__)'
# No tests at all is pytest's exit code 5: that fails, too.
"$venv/bin/python" -m pytest -m kernels -n "${WORKERS:-2}" 2>&1 | tee "$log"
