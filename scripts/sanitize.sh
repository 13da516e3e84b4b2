#!/usr/bin/env bash
# sanitize.sh PYTHON: the native operations' tests in ASan and UBSan, and their threads in TSan.
# Leaks are not looked for: Python's own would be all there is to see.  Without g++ it says so and
# passes; another compiler's runtime would have another name.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
log=$(dirname "$(dirname "$python")")/sanitize.log
runtime=$(g++ -print-file-name=libasan.so 2>/dev/null || true)
if [ "${runtime#/}" = "$runtime" ]; then
  echo "sanitizers: not run, there is no g++ with libasan" | tee "$log"
  exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# A driver without Python: its runtime and XLA's threads are not built for TSan.
g++ -std=c++17 -O1 -g -fsanitize=thread -pthread -Iinfer/native/src \
  tests/native/threads_driver.cc infer/native/src/threads.cc -o "$folder/threads"
# Without a fixed address space old versions of TSan do not start.
INFER_NUM_THREADS=4 TSAN_OPTIONS=halt_on_error=1 setarch "$(uname -m)" -R "$folder/threads"

CXX=g++ "$python" -m infer.native.build --sanitize "$folder/native.so"
# Handlers are called from XLA's threads, whose stacks ASan did not make.
env LD_PRELOAD="$runtime $(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1 \
  INFER_NATIVE_LIBRARY="$folder/native.so" INFER_TEST_XLA_CACHE="$folder/xla" \
  "$python" -m pytest -q -p no:cacheprovider -m "not slow" tests/native 2>&1 | tee "$folder/log"
echo "sanitizers: TSan on the threads; ASan and UBSan: $(tail -n 1 "$folder/log")" | tee "$log"
