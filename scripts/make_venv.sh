#!/usr/bin/env bash
# make_venv.sh FOLDER PYTHON: make a virtual environment unless a working one is there.
set -euo pipefail
folder=$1 python=$2
if "$folder/bin/python" -c 'import pip' 2>/dev/null; then exit 0; fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "infer needs Python 3.11 or newer, and '$python' is not; run: make PYTHON=/path/to/python3.11" >&2
  exit 1
fi
rm -rf "$folder"
if ! "$python" -m venv "$folder"; then
  echo "'$python' cannot make virtual environments; install its venv module (Debian: python3-venv)" >&2
  exit 1
fi
