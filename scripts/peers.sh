#!/usr/bin/env bash
# peers.sh [FOLDER]: the environment that benchmarks compare with (default .venv-peers): torch for
# the CPU, transformers, and llama.cpp built from source by clang with OpenMP for this CPU.
# The stock build is no fair peer: gcc 12 loses the AMX tile configuration (SIGILL at the first long
# prompt), and a plain clang build finds neither OpenMP nor AMX.  PYTHON chooses the interpreter.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$here/.venv-peers}
python=${PYTHON:-python3}
torch=2.13.0
llama=0.3.36
clang=16

bash "$here/scripts/make_venv.sh" "$venv" "$python"
venv_python=$venv/bin/python
pip() { "$venv_python" -m pip install --quiet --disable-pip-version-check "$@"; }
has() { "$venv_python" -c "$1" 2>/dev/null; }

system_info() {
  "$venv_python" - <<'PYTHON'
import llama_cpp
print("llama.cpp", llama_cpp.__version__, llama_cpp.llama_print_system_info().decode())
PYTHON
}

# Prints the options of the CPU's vector units that ggml can use; what it lacks stays off.
cpu_options() {
  local flags pair option
  flags=" $(grep -m1 -E '^flags' /proc/cpuinfo 2>/dev/null | cut -d: -f2) "
  echo -n "-DGGML_OPENMP=ON "
  if [[ $(uname -m) != x86_64 ]]; then echo -n "-DGGML_NATIVE=ON"; return; fi
  echo -n "-DGGML_NATIVE=OFF"
  for pair in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 \
      avx512vbmi:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16 \
      amx_tile:AMX_TILE amx_int8:AMX_INT8 amx_bf16:AMX_BF16; do
    option=${pair#*:}
    case $flags in
      *" ${pair%%:*} "*) echo -n " -DGGML_$option=ON" ;;
      *) echo -n " -DGGML_$option=OFF" ;;
    esac
  done
}

find_compiler() {
  if command -v "clang-$clang" >/dev/null && openmp_works; then return; fi
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "peers: installing clang-$clang and libomp-$clang-dev" >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "clang-$clang" "libomp-$clang-dev" >/dev/null
  fi
  if ! command -v "clang-$clang" >/dev/null || ! openmp_works; then
    echo "peers: llama.cpp needs clang-$clang and its OpenMP; install them (Debian: apt-get install" \
      "clang-$clang libomp-$clang-dev) and run this again" >&2
    exit 1
  fi
}

openmp_works() {
  echo 'int main(void) { return 0; }' | "clang-$clang" -fopenmp -x c - -o /dev/null 2>/dev/null
}

if ! has "import torch; assert torch.__version__.split('+')[0] == '$torch'"; then
  echo "peers: torch $torch" >&2
  # An index with CPU-only wheels of torch, if there is one: TORCH_INDEX=... (they are smaller).
  pip "torch==$torch" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
fi
has 'import transformers, accelerate, gguf, sentencepiece' ||
  pip transformers accelerate gguf sentencepiece numpy

if ! system_info 2>/dev/null | grep -q "llama.cpp $llama .*OPENMP = 1"; then
  find_compiler
  echo "peers: building llama-cpp-python $llama (about ten minutes on two cores)" >&2
  options=$(cpu_options)
  CC=clang-$clang CXX=clang++-$clang CMAKE_ARGS="$options" \
    pip --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python \
    "llama-cpp-python==$llama"
  pip "llama-cpp-python==$llama"  # what it depends on
  echo "clang-$clang $options" >"$venv/llama_cpp_build.txt"  # benchmarks report it
fi

info=$(system_info 2>/dev/null)
echo "$info"
case $info in
  *"OPENMP = 1"*) ;;
  *) echo "peers: this llama.cpp has no OpenMP; it would be no fair peer" >&2; exit 1 ;;
esac
