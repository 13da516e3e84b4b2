// Which instruction set this process uses, found once at run time.
#pragma once

namespace infer {

// Ordered: a CPU that has one has all before it.
enum class Isa { kNone = 0, kAvx2 = 1, kAvx512Vnni = 2, kAmx = 3 };

// The best set of this CPU, or the one that INFER_NATIVE_ISA (avx2, avx512, amx) asks for.  kNone
// if the CPU has none, or not the one asked for: then isa_error() says why.
Isa best_isa();

// Empty when best_isa() is usable, else one line.
const char* isa_error();

const char* isa_name(Isa isa);

// Empty if this process can use AMX's tiles for int8, which it asks Linux for, and they compute what
// AVX512 does; else why not.  For CPUs with AVX512 only; costs a millisecond once.
const char* amx_error();

}  // namespace infer
