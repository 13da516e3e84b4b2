// Products of quantised weights by AMX: 16 rows of activations meet one group of a panel in one
// instruction.  Everything else is AVX512's; gemm_avx512.cc has both.
//
// A group of a panel, unpacked, is a table of 8 times 16 times 4 codes, which is how the second
// factor of a tile product lies; a group of 16 rows of activations is the first.  Codes less their
// zero point fit signed bytes, so a tile holds the very integers that `dot` computes, and floats
// are added as `tile` adds them: the bits are the same.
#pragma once

#include "gemm_kernels.h"
#include "tiles.h"

namespace infer::INFER_ISA {

// Sums of groups in flight, two (of two halves each, for Q6_K): 0 to 3.  Then a group of the rows
// and of the weights, and a half of one.
enum Tile { kSums = 0, kX = 4, kW = 5, kHalfX = 6, kHalfW = 7 };
inline constexpr tiles::Config kTiles{1,
                                      0,
                                      {},
                                      {64, 64, 64, 64, kGroup, 64, kGroup / 2, 64},
                                      {16, 16, 16, 16, kTileRows, kGroup / 4, kTileRows,
                                       kGroup / 8}};
static_assert(kTileRows == 16 && kPanel * sizeof(int32_t) == 64);

void configure_tiles() { tiles::configure(kTiles); }
void release_tiles() { tiles::release(); }

// Groups that are unpacked before 16 rows after the other meet them: the blocks of k-quants.
constexpr int kUnpacked = 8;

// `count` groups of the panel at p, their codes as signed bytes; returns where the next one is.
template <typename F>
INFER_INLINE const uint8_t* unpack_groups(const uint8_t* p, int count, Group* w) {
  const U8x64 zero = set1_u8(F::kZero);
  for (int i = 0; i < count; i += F::kGroups) {
    const typename F::Header header = F::header(p);
    p += F::kHeader;
    for (int j = i; j < i + F::kGroups; ++j) {
      F::group(header, p, w[j]);
      p += F::kGroupBytes;
      for (int v = 0; v < 8 && F::kZero; ++v) w[j].codes[v] = sub(w[j].codes[v], zero);
    }
  }
  return p;
}

using Sums = int32_t[kTileRows * kPanel];

template <int sums, int x, int w>
INFER_INLINE void multiply(const int8_t* q, const U8x64* codes, Sums& to) {
  tiles::load<x>(q, kGroup);
  tiles::load<w>(codes, sizeof *codes);
  tiles::zero<sums>();
  tiles::dot<sums, x, w>();
  tiles::store<sums>(to, kPanel * sizeof(int32_t));
}

// The sums over one group, or over its halves, of 16 rows; `slot` is 0 or 1.
template <typename F, int slot>
INFER_INLINE void multiply_group(const Group& w, const int8_t* q, Sums* to) {
  if constexpr (F::kHalves) {
    multiply<kSums + 2 * slot, kHalfX, kHalfW>(q, w.codes, to[0]);
    multiply<kSums + 2 * slot + 1, kHalfX, kHalfW>(q + kGroup / 2, w.codes + 4, to[1]);
  } else {
    multiply<kSums + slot, kX, kW>(q, w.codes, to[0]);
  }
}

template <typename F>
INFER_INLINE void add_group(const Group& w, const Sums* sums, const float* d, const float* d_sum,
                            F32* acc) {
  for (int m = 0; m < kTileRows; ++m) {
    const I32 first = load_i32(sums[0] + kPanel * m);
    F32 s;
    if constexpr (F::kHalves) {
      s = add_halves(first, load_i32(sums[1] + kPanel * m), w);
    } else {
      s = to_f32(first);
    }
    acc[m] = add_scaled<F>(acc[m], s, w, d + m, d_sum + m);
  }
}

// Adds `count` unpacked groups from the k-th on of 16 rows to y [16, 16].  Two groups are multiplied
// before the first is added, so that neither waits for the other.
template <typename F>
INFER_INLINE void add_groups(const Group* w, int count, const Rows& x, int row, int k, float* y) {
  alignas(64) Sums sums[2][2];
  F32 acc[kTileRows];
  for (int m = 0; m < kTileRows; ++m) acc[m] = k == 0 ? zero_f32() : load(y + kPanel * m);
  for (int i = 0; i < count; i += 2) {
    const int64_t at = x.at(row, k + i), next = x.at(row, k + i + 1);
    multiply_group<F, 0>(w[i], x.q + kGroup * at, sums[0]);
    if (i + 1 < count) multiply_group<F, 1>(w[i + 1], x.q + kGroup * next, sums[1]);
    add_group<F>(w[i], sums[0], x.d + at, x.d_sum + at, acc);
    if (i + 1 < count) add_group<F>(w[i + 1], sums[1], x.d + next, x.d_sum + next, acc);
  }
  for (int m = 0; m < kTileRows; ++m) store(y + kPanel * m, acc[m]);
}

// A panel times `count` rows, a multiple of 16.
template <typename F>
void tiles_panel(const uint8_t* p, const Rows& x, int row, int count, float* y) {
  Group w[kUnpacked];
  const int groups = x.in / kGroup;
  for (int k = 0; k < groups; k += kUnpacked) {
    const int n = groups - k < kUnpacked ? groups - k : kUnpacked;
    p = unpack_groups<F>(p, n, w);
    for (int m = 0; m < count; m += kTileRows) {
      add_groups<F>(w, n, x, row + m, k, y + kPanel * m);
    }
  }
}

// Rows that fill no tile go as with AVX512.
template <typename F>
void tiles_panels(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row, int count, float* ya,
                  float* yb) {
  const int full = count / kTileRows * kTileRows;
  if (full > 0) {
    tiles_panel<F>(a, x, row, full, ya);
    if (b != nullptr) tiles_panel<F>(b, x, row, full, yb);
  }
  if (count > full) {
    float* rest = b != nullptr ? yb + kPanel * full : nullptr;
    quant_panels<F>(w, a, b, x, row + full, count - full, ya + kPanel * full, rest);
  }
}

constexpr Panels kTilesPanels[] = {
    float_panels<Format::kF32>,
    float_panels<Format::kF16>,
    float_panels<Format::kBf16>,
    tiles_panels<Block32<4, false>>,
    tiles_panels<Block32<4, true>>,
    tiles_panels<Block32<5, false>>,
    tiles_panels<Block32<5, true>>,
    tiles_panels<Block32<8, false>>,
    tiles_panels<BlockK<4>>,
    tiles_panels<BlockK<5>>,
    tiles_panels<BlockQ6K>,
};

void panels_amx(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row,
                int count, float* ya, float* yb) {
  const auto number = static_cast<int>(w.format);
  const bool planar = is_planar(w.format);  // runs of groups of any length: as with AVX512
  (planar ? panels : kTilesPanels[number])(w, a, b, x, row, count, ya, yb);
}

inline constexpr Kernels kAmxKernels{prepare, prepare_group, panels_amx,     finish,
                                     gate,    configure_tiles, release_tiles};

}  // namespace infer::INFER_ISA
