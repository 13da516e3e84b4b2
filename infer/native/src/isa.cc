#include "isa.h"

#include <cpuid.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "handler.h"

#ifndef INFER_SOURCE_HASH
#define INFER_SOURCE_HASH ""
#endif

namespace infer {
namespace {

struct Choice {
  Isa isa = Isa::kNone;
  char error[320] = "";
};

bool has_f16c() {  // clang 16 has no builtin for it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

Isa isa_of_cpu() {
  // These builtins ask the operating system too (XGETBV): it must save the wide registers.
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        has_f16c())) {
    return Isa::kNone;
  }
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))) {
    return Isa::kAvx2;
  }
  return Isa::kAvx512Vnni;
}

Choice choose() {
  Choice choice;
  Isa cpu = isa_of_cpu();
  const char* asked = std::getenv("INFER_NATIVE_ISA");
  const bool any = asked == nullptr || *asked == '\0';
  const char* no_amx = "";
  // Not for those who chose a lesser set: nothing is asked of Linux for them.
  if (cpu == Isa::kAvx512Vnni && (any || std::strcmp(asked, isa_name(Isa::kAmx)) == 0)) {
    no_amx = amx_error();
    if (*no_amx == '\0') cpu = Isa::kAmx;
  }
  if (any) {
    choice.isa = cpu;
    if (cpu == Isa::kNone) {
      std::snprintf(choice.error, sizeof choice.error,
                    "this CPU has no AVX2, FMA and F16C, which the native operations need");
    }
    return choice;
  }
  for (Isa isa : {Isa::kAvx2, Isa::kAvx512Vnni, Isa::kAmx}) {
    if (std::strcmp(asked, isa_name(isa)) != 0) continue;
    if (isa <= cpu) {
      choice.isa = isa;
    } else {
      std::snprintf(choice.error, sizeof choice.error,
                    "INFER_NATIVE_ISA is %s, and the best set here is %s%s%s; unset it", asked,
                    isa_name(cpu), *no_amx != '\0' ? ": " : "", no_amx);
    }
    return choice;
  }
  std::snprintf(choice.error, sizeof choice.error,
                "INFER_NATIVE_ISA is '%.40s'; it can be avx2, avx512 or %s", asked,
                isa_name(Isa::kAmx));
  return choice;
}

const Choice& choice() {
  static const Choice made = choose();
  return made;
}

}  // namespace

Isa best_isa() { return choice().isa; }

const char* isa_error() { return choice().error; }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512Vnni:
      return "avx512";
    case Isa::kAmx:
#ifdef INFER_EMULATE_TILES
      return "amx-emulated";
#else
      return "amx";
#endif
    case Isa::kNone:
      break;
  }
  return "none";
}

}  // namespace infer

extern "C" INFER_EXPORT const char* infer_native_isa() {
  return infer::isa_name(infer::best_isa());
}
extern "C" INFER_EXPORT const char* infer_native_error() { return infer::isa_error(); }
extern "C" INFER_EXPORT const char* infer_native_sources() { return INFER_SOURCE_HASH; }
