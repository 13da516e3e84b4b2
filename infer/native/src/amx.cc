// Whether this process can use AMX's tiles for int8.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "activations.h"

namespace infer {
namespace {

#ifdef INFER_EMULATE_TILES

const char* refusal() { return ""; }

#else

// Of Linux's <asm/prctl.h>, 5.16 and later, and the state component of the tiles' data.
constexpr int kRequestPermission = 0x1023, kTileData = 18;

bool cpu_has_int8_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTile) == 0 || (d & kInt8) == 0) {
    return false;
  }
  // Palette 1: eight tiles of 16 rows of 64 bytes.
  return __get_cpuid_count(0x1d, 1, &a, &b, &c, &d) != 0 && (b & 0xffff) >= 64 && b >> 16 >= 8 &&
         (c & 0xffff) >= 16;
}

bool system_saves_tiles() {
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr unsigned kTileConfigAndData = 3u << 17;
  return (a & kTileConfigAndData) == kTileConfigAndData;
}

const char* refusal() {
  static char text[120];
  if (!cpu_has_int8_tiles()) return "this CPU has no AMX for int8";
  if (!system_saves_tiles()) return "the operating system does not save AMX's tiles";
  // For the process, once: Linux makes room for 8 KB more of registers in each thread that uses them.
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    std::snprintf(text, sizeof text, "Linux refuses AMX's tiles to this process (arch_prctl: %s)",
                  std::strerror(errno));
    return text;
  }
  return "";
}

#endif

// ---- The self-test ------------------------------------------------------------------------------

// Any numbers will do, as long as they are always the same.
class Noise {
 public:
  uint32_t next() { return (state_ = state_ * 1664525u + 1013904223u) >> 8; }

 private:
  uint32_t state_ = 1;
};

// Where a block of 16 rows has its float16 (gemm_kernels.h): the first byte and the last but one.
constexpr int kHalves[][2] = {{},         {},         {},         {256, 288},
                                      {256, 320}, {320, 352}, {320, 384}, {512, 544},
                                      {0, 64},    {0, 64},    {0, 32}};

// Packed panels of random codes and of scales of either sign between 1/128 and 1/64.
std::vector<uint8_t> random_panels(Format format, int in, int panels, Noise& noise) {
  std::vector<uint8_t> data(panels * panel_bytes(Spec(static_cast<int>(format)), in));
  const auto [first, end] = kHalves[static_cast<int>(format)];
  for (size_t i = 0; i < data.size(); ++i) {
    const int at = static_cast<int>(i % block_bytes(format));
    data[i] = static_cast<uint8_t>(noise.next());
    if (at >= first && at < end && at % 2 == 1) data[i] = (data[i] & 0x83) | 0x20;
  }
  return data;
}

// Whether AMX has AVX512's bits for rows that fill two tiles and one that fills none.
bool same_bits(Format format, int in, const Rows& x, int rows, Noise& noise) {
  const std::vector<uint8_t> weight = random_panels(format, in, 2, noise);
  const int64_t bytes = panel_bytes(Spec(static_cast<int>(format)), in);
  const Weight w{format, weight.data(), 2 * kPanel, in, bytes, 0, false};
  const uint8_t *a = w.panel(0), *b = w.panel(1);
  std::vector<float> got(2 * rows * kPanel), want(got.size());
  float* y = got.data();
  {
    const TilesFor tiles(kernels_amx(), rows);
    kernels_amx().panels(w, a, b, x, 0, rows, y, y + rows * kPanel);
  }
  y = want.data();
  kernels_avx512().panels(w, a, b, x, 0, rows, y, y + rows * kPanel);
  return std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0;
}

bool self_test() {
  constexpr int kCount = 2 * kTileRows + 1, kMostIn = 512;
  const IeeeMode mode;
  Noise noise;
  Needs quants;
  quants.quants = true;
  Scratch scratch;
  if (!scratch.reserve(rows_bytes(kCount, kMostIn, quants))) return false;
  for (int f = 0; f < kFormats; ++f) {
    const Format format = static_cast<Format>(f);
    if (is_float(format) || is_planar(format)) continue;  // planar ones go as with AVX512
    const int in = block_width(format) == 256 ? kMostIn : 9 * kGroup;
    Scratch room;
    const Rows x = take_rows(room, kCount, in, quants);
    std::vector<float> values(in);
    for (int row = 0; row < kCount; ++row) {
      for (float& v : values) v = static_cast<float>(noise.next() % 2001) - 1000.0f;
      kernels_avx512().prepare(values.data(), nullptr, 0.0f, x, row);
    }
    if (!same_bits(format, in, x, kCount, noise)) return false;
  }
  return true;
}

const char* find_error() {
  if (const char* reason = refusal(); *reason != '\0') return reason;
  if (self_test()) return "";
  // Never seen, so worth a line even to those who asked for nothing.
  const char* reason = "AMX's products differ from AVX512's in the self-test";
  std::fprintf(stderr, "infer: native operations do without AMX: %s\n", reason);
  return reason;
}

}  // namespace

const char* amx_error() {
  static const char* const found = find_error();
  return found;
}

}  // namespace infer
