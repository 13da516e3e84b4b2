// The kernels of gemm.h, compiled once for each instruction set (gemm_avx2.cc, gemm_avx512.cc).
#pragma once

#include "gemm.h"
#include "vec.h"

namespace infer::INFER_ISA {

// ---- Packed formats ---------------------------------------------------------------------------
//
// A format says how one group of 32 weights of 16 rows is unpacked: `codes` [8], where vector v
// holds weights 4v to 4v + 3 of each row, beside their scales and minima.  All 16 rows of one field
// lie together; repack.cc writes what these read.

INFER_INLINE void unpack_nibbles(const uint8_t* p, U8x64* codes) {
  const U8x64 low = set1_u8(15);
  for (int v = 0; v < 4; ++v) {
    const U8x64 both = load_u8x64(p + 64 * v);
    codes[v] = bit_and(both, low);
    codes[v + 4] = bit_and(shift_right16<4>(both), low);
  }
}

// Bit v of each byte is bit 4 of vector v's.
template <int v>
INFER_INLINE void add_fifth_bit(U8x64 high, U8x64* codes) {
  const U8x64 bit = set1_u8(16);
  if constexpr (v < 4) {
    codes[v] = bit_or(codes[v], bit_and(shift_left16<4 - v>(high), bit));
  } else {
    codes[v] = bit_or(codes[v], bit_and(shift_right16<v - 4>(high), bit));
  }
}
INFER_INLINE void unpack_five_bits(const uint8_t* p, U8x64* codes) {
  unpack_nibbles(p, codes);
  const U8x64 high = load_u8x64(p + 256);
  add_fifth_bit<0>(high, codes);
  add_fifth_bit<1>(high, codes);
  add_fifth_bit<2>(high, codes);
  add_fifth_bit<3>(high, codes);
  add_fifth_bit<4>(high, codes);
  add_fifth_bit<5>(high, codes);
  add_fifth_bit<6>(high, codes);
  add_fifth_bit<7>(high, codes);
}

// Bits 2v and 2v + 1 of the first 64 bytes are bits 4 and 5 of vector v, of the second of v + 4.
INFER_INLINE void unpack_six_bits(const uint8_t* p, U8x64* codes) {
  unpack_nibbles(p, codes);
  const U8x64 two = set1_u8(48);
  for (int half = 0; half < 2; ++half) {
    const U8x64 high = load_u8x64(p + 256 + 64 * half);
    U8x64* c = codes + 4 * half;
    c[0] = bit_or(c[0], bit_and(shift_left16<4>(high), two));
    c[1] = bit_or(c[1], bit_and(shift_left16<2>(high), two));
    c[2] = bit_or(c[2], bit_and(high, two));
    c[3] = bit_or(c[3], bit_and(shift_right16<2>(high), two));
  }
}

INFER_INLINE void unpack_bytes(const uint8_t* p, U8x64* codes) {
  for (int v = 0; v < 8; ++v) codes[v] = load_u8x64(p + 64 * v);
}

struct Group {
  U8x64 codes[8];
  F32 scale;
  F32 min;     // only where the format has minima
  I32 c0, c1;  // only Q6_K: scales of the two halves
};

// Blocks of 32: codes, then d, then maybe m, as float16 [16].
template <int bits_, bool has_min_>
struct Block32 {
  static constexpr int kBits = bits_, kZero = has_min_ ? 0 : 1 << (bits_ - 1);
  static constexpr bool kHasMin = has_min_, kHalves = false;
  static constexpr int kGroups = 1, kHeader = 0;
  static constexpr int kCodeBytes = 64 * bits_;
  static constexpr int kGroupBytes = kCodeBytes + (has_min_ ? 64 : 32);
  struct Header {};
  static INFER_INLINE Header header(const uint8_t*) { return {}; }
  static INFER_INLINE void group(const Header&, const uint8_t* p, Group& g) {
    if constexpr (bits_ == 4) unpack_nibbles(p, g.codes);
    if constexpr (bits_ == 5) unpack_five_bits(p, g.codes);
    if constexpr (bits_ == 8) unpack_bytes(p, g.codes);
    g.scale = load_f16(p + kCodeBytes);
    if constexpr (has_min_) g.min = load_f16(p + kCodeBytes + 32);
  }
};

// Q4_K and Q5_K: d and dmin as float16 [16]; then eight times codes, and scales and minima as
// bytes [16].
template <int bits_>
struct BlockK {
  static constexpr int kBits = bits_, kZero = 0;
  static constexpr bool kHasMin = true, kHalves = false;
  static constexpr int kGroups = 8, kHeader = 64;
  static constexpr int kCodeBytes = 64 * bits_;
  static constexpr int kGroupBytes = kCodeBytes + 32;
  struct Header {
    F32 d, minus_dmin;
  };
  static INFER_INLINE Header header(const uint8_t* p) {
    return {load_f16(p), sub(zero_f32(), load_f16(p + 32))};
  }
  static INFER_INLINE void group(const Header& h, const uint8_t* p, Group& g) {
    if constexpr (bits_ == 4) unpack_nibbles(p, g.codes);
    if constexpr (bits_ == 5) unpack_five_bits(p, g.codes);
    g.scale = mul(h.d, to_f32(load_u8(p + kCodeBytes)));
    g.min = mul(h.minus_dmin, to_f32(load_u8(p + kCodeBytes + 16)));
  }
};

// Q6_K: d as float16 [16]; then eight times codes and the signed scales of both halves.
struct BlockQ6K {
  static constexpr int kBits = 6, kZero = 32;
  static constexpr bool kHasMin = false, kHalves = true;
  static constexpr int kGroups = 8, kHeader = 32;
  static constexpr int kGroupBytes = 384 + 32;
  struct Header {
    F32 d;
  };
  static INFER_INLINE Header header(const uint8_t* p) { return {load_f16(p)}; }
  static INFER_INLINE void group(const Header& h, const uint8_t* p, Group& g) {
    unpack_six_bits(p, g.codes);
    g.scale = h.d;
    g.c0 = load_i8(p + 384);
    g.c1 = load_i8(p + 400);
  }
};

// ---- Products ---------------------------------------------------------------------------------

// y [M, 16] := M rows of activations times one panel.  The weights are unpacked once for all M.
template <typename F, int M>
void tile(const uint8_t* p, const Rows& x, int row, float* y) {
  const int in = x.in, groups = in / kGroup;
  const int8_t* q = x.q + static_cast<int64_t>(row) * in;
  const float* d = x.d + static_cast<int64_t>(row) * groups;
  const float* d_sum = x.d_sum + static_cast<int64_t>(row) * groups;
  const int32_t* minus_sum = x.minus_sum + static_cast<int64_t>(row) * 2 * groups;
  F32 acc[M];
  for (int m = 0; m < M; ++m) acc[m] = zero_f32();
  for (int k = 0; k < groups; k += F::kGroups) {
    const typename F::Header header = F::header(p);
    p += F::kHeader;
    for (int i = 0; i < F::kGroups; ++i, p += F::kGroupBytes) {
      Group w;
      F::group(header, p, w);
      for (int m = 0; m < M; ++m) {
        const int g = m * groups + k + i;
        const int8_t* qg = q + static_cast<int64_t>(m) * in + kGroup * (k + i);
        I32 s;
        if constexpr (F::kHalves) {  // at most 2^24: exact as float32
          const int32_t* minus = minus_sum + 2 * g;
          s = add(mul(w.c0, dot<F::kBits, F::kZero, 4>(w.codes, qg, minus[0])),
                  mul(w.c1, dot<F::kBits, F::kZero, 4>(w.codes + 4, qg + 16, minus[1])));
        } else {
          const int32_t minus = F::kZero ? minus_sum[2 * g] + minus_sum[2 * g + 1] : 0;
          s = dot<F::kBits, F::kZero, 8>(w.codes, qg, minus);
        }
        acc[m] = fma(mul(to_f32(s), w.scale), set1(d[g]), acc[m]);
        if constexpr (F::kHasMin) acc[m] = fma(w.min, set1(d_sum[g]), acc[m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) store(y + kPanel * m, acc[m]);
}

template <Format format>
INFER_INLINE F32 load_weights(const uint8_t* p) {
  if constexpr (format == Format::kF32) return load(reinterpret_cast<const float*>(p));
  if constexpr (format == Format::kF16) return load_f16(p);
  if constexpr (format == Format::kBf16) return load_bf16(p);
}

// The same for weights that are floats, of unquantised activations: two chains, of even and of odd
// inputs, because one would wait for itself.
template <Format format, int M>
void tile_float(const uint8_t* p, const Rows& x, int row, float* y) {
  constexpr int kBytes = format == Format::kF32 ? 64 : 32;
  const float* xs = x.x + static_cast<int64_t>(row) * x.in;
  F32 even[M], odd[M];
  for (int m = 0; m < M; ++m) even[m] = odd[m] = zero_f32();
  for (int k = 0; k < x.in; k += 2, p += 2 * kBytes) {
    const F32 w0 = load_weights<format>(p), w1 = load_weights<format>(p + kBytes);
    for (int m = 0; m < M; ++m) {
      const float* xm = xs + static_cast<int64_t>(m) * x.in + k;
      even[m] = fma(w0, set1(xm[0]), even[m]);
      odd[m] = fma(w1, set1(xm[1]), odd[m]);
    }
  }
  for (int m = 0; m < M; ++m) store(y + kPanel * m, add(even[m], odd[m]));
}

using Tile = void (*)(const uint8_t* p, const Rows& x, int row, float* y);
struct Tiles {
  Tile by_rows[4];  // of 1, 2, 4 and 8 rows
};

template <typename F>
constexpr Tiles tiles() {
  return {{tile<F, 1>, tile<F, 2>, tile<F, 4>, tile<F, 8>}};
}
template <Format f>
constexpr Tiles float_tiles() {
  return {{tile_float<f, 1>, tile_float<f, 2>, tile_float<f, 4>, tile_float<f, 8>}};
}

constexpr Tiles kTiles[kFormats] = {
    float_tiles<Format::kF32>(),
    float_tiles<Format::kF16>(),
    float_tiles<Format::kBf16>(),
    tiles<Block32<4, false>>(),
    tiles<Block32<4, true>>(),
    tiles<Block32<5, false>>(),
    tiles<Block32<5, true>>(),
    tiles<Block32<8, false>>(),
    tiles<BlockK<4>>(),
    tiles<BlockK<5>>(),
    tiles<BlockQ6K>(),
};

void panel(const Weight& w, const Rows& x, int row, int count, int p, float* y) {
  const Tiles& t = kTiles[static_cast<int>(w.format)];
  const uint8_t* data = w.panel(p);
  for (int log = 3; log >= 0; --log) {
    for (; count >= 1 << log; count -= 1 << log, row += 1 << log, y += kPanel << log) {
      t.by_rows[log](data, x, row, y);
    }
  }
}

// ---- Around the products ------------------------------------------------------------------------

float inverse_rms(const float* x, int n, float eps) {
  F32 a = zero_f32(), b = zero_f32();
  for (int i = 0; i < n; i += 2 * kLanes) {
    const F32 u = load(x + i), v = load(x + i + kLanes);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  return 1.0f / __builtin_sqrtf(reduce_add(add(a, b)) / static_cast<float>(n) + eps);
}

INFER_INLINE void quantize_group(F32 a, F32 b, const Rows& to, int64_t group) {
  // As integers the magnitudes sort likewise, with NaN above all: it ends in d, and in the result.
  const I32 magnitude = set1_i32(0x7fffffff);
  const int32_t bits =
      reduce_max(max(bit_and(to_bits(a), magnitude), bit_and(to_bits(b), magnitude)));
  float most;
  __builtin_memcpy(&most, &bits, sizeof most);
  const float d = most / 127.0f;
  const F32 inverse = set1(most > 1e-30f ? 127.0f / most : 0.0f);  // no overflow to infinity
  // The maximum of NaN and a number is the number: as a code NaN would be -2^31, and sums overflow.
  const F32 least = set1(-127.0f);
  const I32 qa = round_i32(max(mul(a, inverse), least));
  const I32 qb = round_i32(max(mul(b, inverse), least));
  store_i8(to.q + kGroup * group, qa);
  store_i8(to.q + kGroup * group + kLanes, qb);
  const int32_t sa = reduce_add(qa), sb = reduce_add(qb);
  to.d[group] = d;
  to.d_sum[group] = d * static_cast<float>(sa + sb);
  to.minus_sum[2 * group] = -sa;
  to.minus_sum[2 * group + 1] = -sb;
}

INFER_INLINE void put_group(F32 a, F32 b, const Rows& to, int row, int group) {
  if (to.x != nullptr) {
    float* copy = to.x + static_cast<int64_t>(row) * to.in + kGroup * group;
    store(copy, a);
    store(copy + kLanes, b);
  }
  if (to.q != nullptr) {
    quantize_group(a, b, to, static_cast<int64_t>(row) * (to.in / kGroup) + group);
  }
}

void prepare(const float* x, const float* gain, float eps, const Rows& to, int row) {
  const F32 inverse = set1(gain != nullptr ? inverse_rms(x, to.in, eps) : 1.0f);
  for (int g = 0; g < to.in / kGroup; ++g, x += kGroup) {
    F32 a = load(x), b = load(x + kLanes);
    if (gain != nullptr) {
      a = mul(mul(a, inverse), load(gain + kGroup * g));
      b = mul(mul(b, inverse), load(gain + kGroup * g + kLanes));
    }
    put_group(a, b, to, row, g);
  }
}

void prepare_group(const float* x, const Rows& to, int row, int group) {
  put_group(load(x), load(x + kLanes), to, row, group);
}

void finish(const float* tile, const float* bias, const float* residual, int n, float* y) {
  if (n == kPanel) {
    F32 v = load(tile);
    if (bias != nullptr) v = add(v, load(bias));
    if (residual != nullptr) v = add(v, load(residual));
    store(y, v);
    return;
  }
  for (int i = 0; i < n; ++i) {
    float v = tile[i];
    if (bias != nullptr) v += bias[i];
    if (residual != nullptr) v += residual[i];
    y[i] = v;
  }
}

void gate(float* gates, const float* up, Activation act, int n) {
  const F32 one = set1(1.0f);
  for (int i = 0; i < n; i += kLanes) {
    const F32 g = load(gates + i);
    // gelu_tanh(g) = g/2 (1 + tanh u) = g sigmoid(2u), u = sqrt(2 / pi) (g + 0.044715 g^3).
    const F32 s = act == Activation::kSilu
                      ? g
                      : mul(mul(set1(1.5957691216f), g), fma(mul(set1(0.044715f), g), g, one));
    const F32 sigmoid = div(one, add(one, exp(sub(zero_f32(), s))));
    store(gates + i, mul(mul(g, sigmoid), load(up + i)));
  }
}

inline constexpr Kernels kKernels{prepare, prepare_group, panel, finish, gate};

}  // namespace infer::INFER_ISA
