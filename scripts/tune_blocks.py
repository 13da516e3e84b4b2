"""Measure block sizes on this machine's GPU; write the fastest for the ops to use.

    python scripts/tune_blocks.py                      every shape, half an hour at most
    python scripts/tune_blocks.py --only "Q4_K 16x"    some of them
    python scripts/tune_blocks.py --list               what would be measured
    python scripts/tune_blocks.py --smoke --out FOLDER tiny shapes, interpreted, on any machine

Times the candidates of tests/cases/tuning.py (products with packed, 8-bit and experts' weights at
real models' shapes) and of the kernels' own cases, beside the size that the kernel chooses by
itself, and writes <folder>/<chip>/<kernel>.json as each shape ends: the fastest sizes if they are
2 % faster than the kernel's own and compute the same, else none.  The folder is
infer/pallas/tuned, which the ops read.  Commit it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from infer.pallas.tuned import FOLDER  # noqa: E402
from scripts.gate import measure  # noqa: E402


def main() -> int:
    """Run the command line; return 1 if a shape could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, interpreted; with --out")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the cases, measure nothing")
    parser.add_argument("--budget", type=float, default=1800, help="seconds in all")
    parser.add_argument("--out", type=Path, help=f"default: {FOLDER.relative_to(ROOT)}")
    args = parser.parse_args()
    if args.smoke and args.out is None:
        print(
            "tune_blocks: --smoke measures an interpreter: name a folder by --out", file=sys.stderr
        )
        return 2
    if not args.smoke and not args.list and jax.default_backend() != "gpu":
        print("tune_blocks: JAX sees no GPU here; --smoke runs anywhere", file=sys.stderr)
        return 2
    folder = args.out or FOLDER
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        print(f"tune_blocks: {folder} is no folder that can be written", file=sys.stderr)
        return 2
    end = time.monotonic() + args.budget
    run = measure.Run(smoke=args.smoke, only=args.only, end=end, tuned_folder=folder)
    cases = measure.tuning_cases(run)
    if not cases:
        print(f"tune_blocks: no case has {args.only!r} in its name; see --list", file=sys.stderr)
        return 2
    if args.list:
        for case in cases:
            print(f"{case.name} ({len(case.tuning.sizes) if case.tuning else 0} candidates)")
        return 0
    found = measure.tuning(run, lambda name, entry: print(line_of(name, entry), flush=True))
    written = sum("fields" in entry for entry in found.values())
    print(f"tune_blocks: {written} of {len(found)} shapes measured, in {folder / run.chip}")
    return 0 if written == len(found) else 1


def line_of(name: str, entry: dict[str, Any]) -> str:
    """Return what was found for one case as one line of text."""
    if "fields" not in entry:
        return f"{name}: {entry.get('stopped') or entry['default_s']}"
    fields = json.dumps(entry["fields"]) if entry["fields"] else "the kernel's own"
    micro = lambda key: f"{entry[key] * 1e6:.1f} us"
    return f"{name}: {micro('time_s')} with {fields}, {micro('default_s')} with its own"


if __name__ == "__main__":
    sys.exit(main())
