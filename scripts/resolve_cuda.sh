#!/usr/bin/env bash
# resolve_cuda.sh PYTHON: check that the CUDA extras resolve.  Nothing is installed, and pip reads
# metadata by range requests instead of downloading gigabytes of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
report=$(mktemp)
trap 'rm -f "$report"' EXIT
for extra in cuda12 cuda13; do
  "$python" -m pip install --quiet --quiet --disable-pip-version-check --dry-run --ignore-installed \
    --use-feature=fast-deps --only-binary=:all: --report "$report" ".[$extra]"
  "$python" - "$extra" "$report" <<'PY'
import json
import sys

extra, path = sys.argv[1:]
with open(path) as file:
    found = {p["metadata"]["name"]: p["metadata"]["version"] for p in json.load(file)["install"]}
plugin = f"jax-{extra}-plugin"
if plugin not in found:
    sys.exit(f"infer[{extra}] resolved without {plugin}")
shown = ", ".join(f"{name} {found[name]}" for name in ("jax", plugin, "jax-triton", "triton"))
print(f"infer[{extra}] resolves to {len(found)} packages: {shown}")
PY
done
