#!/usr/bin/env bash
# The kernels' tests under Python 3.12 with the JAX of the GPU machines, and the gate that compiles
# kernels for GPUs that are not here.  With the argument `gate`: the gate's whole table instead.
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

# The gate's compiler: JAX's CUDA plugin without what only a GPU needs, and ptxas where there is
# none; jax-triton and its Triton (188 MB, 670 MB on disk) for the kernels written by hand.  These
# wheels are large; where they cannot be had, what compiles is skipped.
gate_stamp=$venv/.stamp-gate
version=$("$venv/bin/python" -c 'import jax; print(jax.__version__)')
triton=($(grep -E '^(jax-triton|triton)==' constraints.txt))
if [ "$(cat "$gate_stamp" 2>/dev/null)" != "$version ${triton[*]}" ]; then
  wheels=("jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" "${triton[@]}")
  command -v ptxas >/dev/null || wheels+=("nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*")
  if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${wheels[@]}"; then
    echo "$version ${triton[*]}" >"$gate_stamp"
  elif [ "${REQUIRE_GATE:-}" = 1 ]; then
    echo "gate: REQUIRE_GATE=1, and ${wheels[*]} cannot be installed" >&2
    exit 1
  else
    echo "gate: skipped, ${wheels[*]} cannot be installed"
  fi
fi

if [ "${1:-}" = gate ]; then
  shift
  exec "$venv/bin/python" scripts/gpu_gate.py "$@"
fi
"$venv/bin/python" -c 'import jax, sys; print("kernels: Python", sys.version.split()[0], "jax", jax.__version__)'
# The interpreters' programs are compiled fast (tests/conftest.py); what compiles for a GPU is not.
# No tests at all is pytest's exit code 5: that fails, too.
INFER_TEST_COMPILE=fast "$venv/bin/python" -m pytest -m kernels -n "${WORKERS:-2}" --dist worksteal \
  2>&1 | tee "$log"
