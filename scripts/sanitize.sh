#!/usr/bin/env bash
# sanitize.sh PYTHON: the native operations in ASan and UBSan, and their threads in TSan.
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

# With AMX emulated: the library's self-test and whatever has 16 rows go through its tiles.
CXX=g++ "$python" -m infer.native.build --sanitize --emulate-tiles "$folder/native.so"
# In a process of their own each; what most of tests/native does besides is wait for XLA's compiler,
# which is slow when it has to ask ASan for memory.
export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16:malloc_context_size=8
export UBSAN_OPTIONS=print_stacktrace=1 JAX_PLATFORMS=cpu INFER_NATIVE_LIBRARY=$folder/native.so
# XLA compiles fast here (tests/conftest.py), and each program once.
export XLA_FLAGS="--xla_backend_optimization_level=0"
export JAX_COMPILATION_CACHE_DIR=$folder/xla JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
preload="$runtime $(g++ -print-file-name=libstdc++.so)"
count=0
for isa in "" avx2; do
  for operation in $("$python" -m tests.native.hostile); do
    if ! LD_PRELOAD=$preload INFER_NATIVE_ISA=$isa "$python" -m tests.native.hostile "$operation" 3 60 \
        >"$folder/log" 2>&1; then
      tail -n 60 "$folder/log"
      echo "sanitizers: $operation failed with INFER_NATIVE_ISA=$isa" >&2
      exit 1
    fi
    count=$((count + 60))
  done
done
LD_PRELOAD=$preload "$python" -m tests.native.row_counts 16 65 >"$folder/log" 2>&1 || {
  tail -n 60 "$folder/log"
  echo "sanitizers: products with many rows failed" >&2
  exit 1
}
INFER_TEST_COMPILE=fast LD_PRELOAD=$preload "$python" -m pytest -q -p no:cacheprovider -m "not slow" \
  tests/native/test_repack.py tests/native/test_rope_write.py 2>&1 | tee "$folder/log"
echo "sanitizers: TSan on the threads, ASan and UBSan on $count calls: nothing found" | tee "$log"
