// AMX's tile registers: eight tables of up to 16 rows of 64 bytes, and the integer product of two.
//
// A thread configures its tiles, which says how many rows and bytes of each count, uses them and
// releases them.  With INFER_EMULATE_TILES the same interface is plain C++, so that what is built
// on it can be tested where there is no AMX; a step that the processor would refuse ends the
// process there too.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG,
// TILELOADD, TILESTORED, TILEZERO, TDPBSSD, TILERELEASE.
#pragma once

#include <cstdint>

#ifdef INFER_EMULATE_TILES
#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace infer::tiles {

constexpr int kTiles = 8, kMaxRows = 16, kMaxBytes = 64;

struct alignas(64) Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];  // of a row
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

#ifndef INFER_EMULATE_TILES

// The bytes of the instructions, because assemblers know them since binutils 2.35 only.  `volatile`
// and the clobber keep them all, in this order: a compiler sees no use of a configuration, and gcc
// 12 drops one that is made by its intrinsic.

inline void configure(const Config& config) {
  asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" : : "a"(&config) : "memory");  // ldtilecfg
}

inline void release() {
  asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0" : : : "memory");  // tilerelease
}

// Row r is read at p + r * stride.
template <int tile>
inline void load(const void* p, int64_t stride) {
  asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c0, 0x08"  // tileloadd (%rax,%rcx,1)
               :
               : "n"(0x04 + 8 * tile), "a"(p), "c"(stride)
               : "memory");
}

template <int tile>
inline void store(void* p, int64_t stride) {
  asm volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c0, 0x08"  // tilestored (%rax,%rcx,1)
               :
               : "n"(0x04 + 8 * tile), "a"(p), "c"(stride)
               : "memory");
}

template <int tile>
inline void zero() {
  asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0" : : "n"(0xc0 + 8 * tile) : "memory");  // tilezero
}

// c[m][n] += sum over k and i < 4 of a[m][4k + i] * b[k][4n + i]: signed bytes, int32 that wraps.
template <int c, int a, int b>
inline void dot() {
  asm volatile(".byte 0xc4, 0xe2, %c0, 0x5e, %c1"  // tdpbssd
               :
               : "n"(0x03 | (~b & 15) << 3), "n"(0xc0 + 8 * c + a)
               : "memory");
}

#else

struct State {
  Config config;
  uint8_t data[kTiles][kMaxRows][kMaxBytes];
};
inline thread_local State state{};

// What the processor answers with #UD or #GP.
inline void require(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "emulated tiles: %s\n", rule);
  std::abort();
}

inline int rows(int tile) {
  require(state.config.palette == 1, "a tile is used without a configuration");
  require(state.config.rows[tile] > 0, "a tile is used that is not configured");
  return state.config.rows[tile];
}
inline int bytes(int tile) { return state.config.bytes[tile]; }

inline void configure(const Config& config) {
  bool reserved = config.start_row != 0;
  for (uint8_t byte : config.reserved) reserved |= byte != 0;
  for (int i = 0; i < 16; ++i) {
    const int r = config.rows[i], b = config.bytes[i];
    require((r == 0) == (b == 0) && r <= kMaxRows && b <= kMaxBytes && (i < kTiles || r == 0),
            "a tile has at most 16 rows of 64 bytes");
  }
  require(config.palette == 1 && !reserved, "the palette is 1, and what is reserved 0");
  state = State{};
  state.config = config;
}

inline void release() { state = State{}; }

template <int tile>
inline void zero() {
  rows(tile);
  std::memset(state.data[tile], 0, sizeof state.data[tile]);
}

template <int tile>
inline void load(const void* p, int64_t stride) {
  zero<tile>();
  for (int r = 0; r < rows(tile); ++r) {
    std::memcpy(state.data[tile][r], static_cast<const char*>(p) + r * stride, bytes(tile));
  }
}

template <int tile>
inline void store(void* p, int64_t stride) {
  for (int r = 0; r < rows(tile); ++r) {
    std::memcpy(static_cast<char*>(p) + r * stride, state.data[tile][r], bytes(tile));
  }
}

template <int c, int a, int b>
inline void dot() {
  static_assert(c != a && c != b && a != b);
  require(rows(a) == rows(c) && bytes(b) == bytes(c) && bytes(a) == 4 * rows(b) &&
              bytes(c) % 4 == 0,
          "shapes of a product do not fit");
  // A test's way to an AMX that computes something else.
  static const bool wrong = std::getenv("INFER_EMULATE_WRONG_TILES") != nullptr;
  for (int m = 0; m < rows(c); ++m) {
    uint32_t sums[kMaxBytes / 4];
    std::memcpy(sums, state.data[c][m], sizeof sums);
    for (int k = 0; k < rows(b); ++k) {
      const int8_t* x = reinterpret_cast<const int8_t*>(state.data[a][m]) + 4 * k;
      const int8_t* w = reinterpret_cast<const int8_t*>(state.data[b][k]);
      for (int n = 0; n < bytes(c) / 4; ++n) {
        for (int i = 0; i < 4; ++i) sums[n] += static_cast<uint32_t>(x[i] * w[4 * n + i]);
      }
    }
    if (wrong) ++sums[m];
    std::memcpy(state.data[c][m], sums, sizeof sums);
  }
}

#endif

}  // namespace infer::tiles
