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
  F32 c0, c1;  // only where halves have scales of their own: those
  F32 m0, m1;  // and only of integers with zero points: their minima
};

// What a weight's blocks are like: the same for every weight of GGUF's formats.
#define INFER_BLOCKS(Name)                                  \
  static constexpr int kPanelHeader = 0;                    \
  explicit Name(const Weight&) {}                           \
  static constexpr int groups() { return kGroups; }         \
  static constexpr int header_bytes() { return kHeader; }

// Blocks of 32: codes, then d, then maybe m, as float16 [16].
template <int bits_, bool has_min_>
struct Block32 {
  static constexpr int kBits = bits_, kZero = has_min_ ? 0 : 1 << (bits_ - 1);
  static constexpr bool kHasMin = has_min_, kHalves = false;
  static constexpr int kGroups = 1, kHeader = 0;
  static constexpr int kCodeBytes = 64 * bits_;
  static constexpr int kGroupBytes = kCodeBytes + (has_min_ ? 64 : 32);
  INFER_BLOCKS(Block32)
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
  INFER_BLOCKS(BlockK)
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
  INFER_BLOCKS(BlockQ6K)
  struct Header {
    F32 d;
  };
  static INFER_INLINE Header header(const uint8_t* p) { return {load_f16(p)}; }
  static INFER_INLINE void group(const Header& h, const uint8_t* p, Group& g) {
    unpack_six_bits(p, g.codes);
    g.scale = h.d;
    g.c0 = to_f32(load_i8(p + 384));
    g.c1 = to_f32(load_i8(p + 400));
  }
};

// Codes of 2 bits: bits 2v and 2v + 1 of the first 64 bytes are vector v, of the second v + 4.
INFER_INLINE void unpack_pairs(const uint8_t* p, U8x64* codes) {
  const U8x64 low = set1_u8(3);
  for (int half = 0; half < 2; ++half) {
    const U8x64 four = load_u8x64(p + 64 * half);
    U8x64* c = codes + 4 * half;
    c[0] = bit_and(four, low);
    c[1] = bit_and(shift_right16<2>(four), low);
    c[2] = bit_and(shift_right16<4>(four), low);
    c[3] = bit_and(shift_right16<6>(four), low);
  }
}

// And 64 bytes more, of which bit v is bit 2 of vector v's.
INFER_INLINE void unpack_three_bits(const uint8_t* p, U8x64* codes) {
  unpack_pairs(p, codes);
  const U8x64 high = load_u8x64(p + 128), bit = set1_u8(4);
  codes[0] = bit_or(codes[0], bit_and(shift_left16<2>(high), bit));
  codes[1] = bit_or(codes[1], bit_and(shift_left16<1>(high), bit));
  codes[2] = bit_or(codes[2], bit_and(high, bit));
  codes[3] = bit_or(codes[3], bit_and(shift_right16<1>(high), bit));
  codes[4] = bit_or(codes[4], bit_and(shift_right16<2>(high), bit));
  codes[5] = bit_or(codes[5], bit_and(shift_right16<3>(high), bit));
  codes[6] = bit_or(codes[6], bit_and(shift_right16<4>(high), bit));
  codes[7] = bit_or(codes[7], bit_and(shift_right16<5>(high), bit));
}

// Planar integers: scales [16], zero points [16] and a gap if there are any, then the codes of a
// span.  A weight is scale * (code - zero); the middle code counts as 0 in the integer sums, and
// what the zero point is beside it is a minimum.
template <int bits_, bool has_zero_>
struct Planar {
  static constexpr int kBits = bits_, kZero = 1 << (bits_ - 1);
  static constexpr bool kHasMin = has_zero_, kHalves = false;
  static constexpr int kPanelHeader = sizeof(PlanarHeader);
  static constexpr int kGroupBytes = 64 * bits_;
  int span, bytes;
  bool half;
  explicit Planar(const Weight& w)
      : span(w.span / kGroup),
        bytes(static_cast<int>(scale_bytes(w.format, w.half))),
        half(w.half) {}
  int groups() const { return span; }
  int header_bytes() const { return bytes; }
  struct Header {
    F32 scale, min;
  };
  INFER_INLINE Header header(const uint8_t* p) const {
    Header h;
    h.scale = half ? load_f16(p) : load(reinterpret_cast<const float*>(p));
    if constexpr (has_zero_) {
      const F32 zero = to_f32(load_u8(p + (half ? 32 : 64)));
      h.min = mul(h.scale, sub(set1(static_cast<float>(kZero)), zero));
    }
    return h;
  }
  static INFER_INLINE void group(const Header& h, const uint8_t* p, Group& g) {
    if constexpr (bits_ == 2) unpack_pairs(p, g.codes);
    if constexpr (bits_ == 3) unpack_three_bits(p, g.codes);
    if constexpr (bits_ == 4) unpack_nibbles(p, g.codes);
    if constexpr (bits_ == 5) unpack_five_bits(p, g.codes);
    if constexpr (bits_ == 6) unpack_six_bits(p, g.codes);
    if constexpr (bits_ == 8) unpack_bytes(p, g.codes);
    g.scale = h.scale;
    if constexpr (has_zero_) g.min = h.min;
  }
};

// The same with a scale for each 16: scales and zero points of both halves, then 32 codes.
template <int bits_, bool has_zero_>
struct PlanarHalves {
  using Whole = Planar<bits_, has_zero_>;
  static constexpr int kBits = bits_, kZero = 1 << (bits_ - 1);
  static constexpr bool kHasMin = false, kHalves = true;
  static constexpr int kPanelHeader = sizeof(PlanarHeader);
  static constexpr int kGroupBytes = 64 * bits_;
  Whole whole;
  explicit PlanarHalves(const Weight& w) : whole(w) {}
  static constexpr int groups() { return 1; }
  int header_bytes() const { return 2 * whole.bytes; }
  struct Header {
    typename Whole::Header low, high;
  };
  INFER_INLINE Header header(const uint8_t* p) const {
    return {whole.header(p), whole.header(p + whole.bytes)};
  }
  static INFER_INLINE void group(const Header& h, const uint8_t* p, Group& g) {
    Whole::group(h.low, p, g);
    g.scale = set1(1.0f);
    g.c0 = h.low.scale;
    g.c1 = h.high.scale;
    if constexpr (has_zero_) {
      g.m0 = h.low.min;
      g.m1 = h.high.min;
    }
  }
};

template <typename F>
inline constexpr bool kHalfMins = false;
template <int bits>
inline constexpr bool kHalfMins<PlanarHalves<bits, true>> = true;

// ---- Products ---------------------------------------------------------------------------------

INFER_INLINE F32 add_halves(I32 low, I32 high, const Group& w) {
  return fma(to_f32(high), w.c1, mul(to_f32(low), w.c0));
}

// The sum over one group of one row, as a float: an integer of at most 2^24, so exact, unless its
// halves have scales of their own.
template <typename F>
INFER_INLINE F32 group_sum(const Group& w, const int8_t* q, const int32_t* minus_sum,
                           const int32_t* minus_half) {
  if constexpr (F::kHalves) {
    const I32 low = dot<F::kBits, F::kZero, 4>(w.codes, q, minus_half[0]);
    const I32 high = dot<F::kBits, F::kZero, 4>(w.codes + 4, q + 16, minus_half[1]);
    F32 s = add_halves(low, high, w);
    if constexpr (kHalfMins<F>) {
      s = fma(w.m0, set1(-static_cast<float>(minus_half[0])), s);
      s = fma(w.m1, set1(-static_cast<float>(minus_half[1])), s);
    }
    return s;
  } else {
    return to_f32(dot<F::kBits, F::kZero, 8>(w.codes, q, F::kZero ? *minus_sum : 0));
  }
}

// One group more of one row, of the sum s.
template <typename F>
INFER_INLINE F32 add_scaled(F32 acc, F32 s, const Group& w, const float* d, const float* d_sum) {
  acc = fma(mul(s, w.scale), set1(*d), acc);
  if constexpr (F::kHasMin) acc = fma(w.min, set1(*d_sum), acc);
  return acc;
}

// P panels times `count` rows.  A group of weights is unpacked once and meets all rows; two panels
// share what is read of a row.  Sums are kept in y, but for a single row.
template <typename F, int P, bool kOneRow>
void tile(const Weight& weight, const uint8_t* const* panels, const Rows& x, int row, int count,
          float* const* y) {
  const F format(weight);
  const uint8_t* p[P];
  F32 one[P];
  for (int j = 0; j < P; ++j) {
    p[j] = panels[j] + F::kPanelHeader;
    one[j] = zero_f32();
    for (int m = 0; m < count; ++m) store(y[j] + kPanel * m, zero_f32());
  }
  const int groups = x.in / kGroup;
  for (int k = 0; k < groups; k += format.groups()) {
    typename F::Header header[P];
    for (int j = 0; j < P; ++j) {
      header[j] = format.header(p[j]);
      p[j] += format.header_bytes();
    }
    const int n = format.groups() < groups - k ? format.groups() : groups - k;
    for (int i = 0; i < n; ++i) {
      Group w[P];
      for (int j = 0; j < P; ++j) {
        F::group(header[j], p[j], w[j]);
        p[j] += F::kGroupBytes;
      }
      const int64_t at = x.at(row, k + i);
      const int8_t* q = x.q + kGroup * at;
      const float *d = x.d + at, *d_sum = x.d_sum + at;
      const int32_t *sum = x.minus_sum + at, *half = x.minus_half + 2 * at;
      for (int m = 0; m < (kOneRow ? 1 : count); ++m) {
        F32 s[P];
        for (int j = 0; j < P; ++j) {
          s[j] = group_sum<F>(w[j], q + kGroup * m, sum + m, half + 2 * m);
        }
        for (int j = 0; j < P; ++j) {
          F32 acc = kOneRow ? one[j] : load(y[j] + kPanel * m);
          acc = add_scaled<F>(acc, s[j], w[j], d + m, d_sum + m);
          kOneRow ? void(one[j] = acc) : store(y[j] + kPanel * m, acc);
        }
      }
      // Two groups at once, as a compiler would have it, are more codes than registers.
      if (!kOneRow) asm volatile("" ::: "memory");
    }
  }
  for (int j = 0; j < P && kOneRow; ++j) store(y[j], one[j]);
}

template <Format format>
INFER_INLINE F32 load_weights(const uint8_t* p) {
  if constexpr (format == Format::kF32) return load(reinterpret_cast<const float*>(p));
  if constexpr (format == Format::kF16) return load_f16(p);
  if constexpr (format == Format::kBf16) return load_bf16(p);
}

// M rows times a panel of floats, of unquantised activations: two chains, of even and of odd inputs,
// because one would wait for itself.
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

// Two columns of codes [16] each as numbers, and how far the next two are.
template <Format format>
struct Columns {
  static constexpr int kBytes = format == Format::kLevels ? 16 : 32;
  F32 levels;
  explicit Columns(const PlanarHeader& header) : levels(load(header.levels)) {}
  INFER_INLINE void load_two(const uint8_t* p, F32 scale, F32& a, F32& b) const {
    if constexpr (format == Format::kLevels) {
      const I32 both = load_u8(p);
      a = lookup(levels, bit_and(both, set1_i32(15)));
      b = lookup(levels, shift_right<4>(both));
    } else if constexpr (format == Format::kE4M3) {
      a = load_e4m3(p);
      b = load_e4m3(p + 16);
    } else {
      a = load_e5m2(p);
      b = load_e5m2(p + 16);
    }
    a = mul(a, scale);
    b = mul(b, scale);
  }
};

// M rows times a planar panel of numbers, as tile_float.
template <Format format, int M>
void tile_planar(const Weight& w, const uint8_t* p, const Rows& x, int row, float* y) {
  const auto& header = *reinterpret_cast<const PlanarHeader*>(p);
  const Columns<format> columns(header);
  const F32 global = set1(header.global);
  p += sizeof header;
  const float* xs = x.x + static_cast<int64_t>(row) * x.in;
  F32 even[M], odd[M];
  for (int m = 0; m < M; ++m) even[m] = odd[m] = zero_f32();
  for (int start = 0; start < x.in; start += w.span) {
    const F32 scale =
        mul(w.half ? load_f16(p) : load(reinterpret_cast<const float*>(p)), global);
    p += w.half ? 32 : 64;
    const int end = start + w.span < x.in ? start + w.span : x.in;
    for (int k = start; k < end; k += 2, p += Columns<format>::kBytes) {
      F32 w0, w1;
      columns.load_two(p, scale, w0, w1);
      for (int m = 0; m < M; ++m) {
        const float* xm = xs + static_cast<int64_t>(m) * x.in + k;
        even[m] = fma(w0, set1(xm[0]), even[m]);
        odd[m] = fma(w1, set1(xm[1]), odd[m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) store(y + kPanel * m, add(even[m], odd[m]));
}

template <Format format, int M>
INFER_INLINE void tile_of(const Weight& w, const uint8_t* p, const Rows& x, int row, float* y) {
  if constexpr (format >= Format::kLevels) {
    tile_planar<format, M>(w, p, x, row, y);
  } else {
    tile_float<format, M>(p, x, row, y);
  }
}

template <Format format>
void float_rows(const Weight& w, const uint8_t* p, const Rows& x, int row, int count, float* y) {
  for (; count >= 8; count -= 8, row += 8, y += 8 * kPanel) tile_of<format, 8>(w, p, x, row, y);
  for (; count >= 2; count -= 2, row += 2, y += 2 * kPanel) tile_of<format, 2>(w, p, x, row, y);
  if (count > 0) tile_of<format, 1>(w, p, x, row, y);
}

template <Format format>
void float_panels(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row,
                  int count, float* ya, float* yb) {
  float_rows<format>(w, a, x, row, count, ya);
  if (b != nullptr) float_rows<format>(w, b, x, row, count, yb);
}

template <typename F>
void quant_panels(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row,
                  int count, float* ya, float* yb) {
  const uint8_t* panels[2] = {a, b};
  float* y[2] = {ya, yb};
  if (count == 1) {  // one after the other: memory is read faster in one stream than in two
    tile<F, 1, true>(w, panels, x, row, 1, y);
    if (b != nullptr) tile<F, 1, true>(w, panels + 1, x, row, 1, y + 1);
  } else if (b == nullptr) {
    tile<F, 1, false>(w, panels, x, row, count, y);
  } else {
    tile<F, 2, false>(w, panels, x, row, count, y);
  }
}

using Panels = void (*)(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row,
                        int count, float* ya, float* yb);
constexpr Panels kPanels[kFormats] = {
    float_panels<Format::kF32>,
    float_panels<Format::kF16>,
    float_panels<Format::kBf16>,
    quant_panels<Block32<4, false>>,
    quant_panels<Block32<4, true>>,
    quant_panels<Block32<5, false>>,
    quant_panels<Block32<5, true>>,
    quant_panels<Block32<8, false>>,
    quant_panels<BlockK<4>>,
    quant_panels<BlockK<5>>,
    quant_panels<BlockQ6K>,
    quant_panels<Planar<2, false>>,
    quant_panels<Planar<3, false>>,
    quant_panels<Planar<4, false>>,
    quant_panels<Planar<5, false>>,
    quant_panels<Planar<6, false>>,
    quant_panels<Planar<8, false>>,
    quant_panels<Planar<2, true>>,
    quant_panels<Planar<3, true>>,
    quant_panels<Planar<4, true>>,
    quant_panels<Planar<5, true>>,
    quant_panels<Planar<6, true>>,
    quant_panels<Planar<8, true>>,
    float_panels<Format::kLevels>,
    float_panels<Format::kE4M3>,
    float_panels<Format::kE5M2>,
};

constexpr Panels kHalfPanels[] = {
    quant_panels<PlanarHalves<2, false>>, quant_panels<PlanarHalves<3, false>>,
    quant_panels<PlanarHalves<4, false>>, quant_panels<PlanarHalves<5, false>>,
    quant_panels<PlanarHalves<6, false>>, quant_panels<PlanarHalves<8, false>>,
    quant_panels<PlanarHalves<2, true>>,  quant_panels<PlanarHalves<3, true>>,
    quant_panels<PlanarHalves<4, true>>,  quant_panels<PlanarHalves<5, true>>,
    quant_panels<PlanarHalves<6, true>>,  quant_panels<PlanarHalves<8, true>>,
};

void panels(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row, int count,
            float* ya, float* yb) {
  const int number = static_cast<int>(w.format);
  const Panels of = is_halved(w.format, w.span)
                        ? kHalfPanels[number - static_cast<int>(Format::kInt2)]
                        : kPanels[number];
  of(w, a, b, x, row, count, ya, yb);
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

// As integers magnitudes sort likewise, with NaN above all: it ends in d, and in the result.
INFER_INLINE I32 magnitude_bits(F32 a, F32 b) {
  const I32 magnitude = set1_i32(0x7fffffff);
  return max(bit_and(to_bits(a), magnitude), bit_and(to_bits(b), magnitude));
}
INFER_INLINE float largest(I32 magnitudes) {
  const int32_t bits = reduce_max(magnitudes);
  float most;
  __builtin_memcpy(&most, &bits, sizeof most);
  return most;
}

// `group` is Rows::at.
INFER_INLINE void put_codes(I32 qa, I32 qb, float d, const Rows& to, int64_t group) {
  store_i8(to.q + kGroup * group, qa);
  store_i8(to.q + kGroup * group + kLanes, qb);
  const int32_t sa = reduce_add(qa), sb = reduce_add(qb);
  to.d[group] = d;
  to.d_sum[group] = d * static_cast<float>(sa + sb);
  to.minus_sum[group] = -(sa + sb);
  to.minus_half[2 * group] = -sa;
  to.minus_half[2 * group + 1] = -sb;
}

INFER_INLINE void quantize_group(F32 a, F32 b, const Rows& to, int64_t group) {
  const float most = largest(magnitude_bits(a, b));
  const F32 inverse = set1(most > 1e-30f ? 127.0f / most : 0.0f);  // no overflow to infinity
  // The maximum of NaN and a number is the number: as a code NaN would be -2^31, and sums overflow.
  const F32 least = set1(-127.0f);
  const I32 qa = round_i32(max(mul(a, inverse), least));
  const I32 qb = round_i32(max(mul(b, inverse), least));
  put_codes(qa, qb, most / 127.0f, to, group);
}

// The codes of infer/ops/quantized.py: quotients, not products with an inverse.
INFER_INLINE I32 codes_under(F32 x, F32 d) {
  return round_i32(max(min(div(x, d), set1(127.0f)), set1(-127.0f)));
}

INFER_INLINE void put_group(F32 a, F32 b, const Rows& to, int row, int group) {
  if (to.x != nullptr) {
    float* copy = to.x + static_cast<int64_t>(row) * to.in + kGroup * group;
    store(copy, a);
    store(copy + kLanes, b);
  }
  if (to.q != nullptr) {
    quantize_group(a, b, to, to.at(row, group));
  }
}

// Lanes [at, at + 16) of the norm of x, or of x.
INFER_INLINE F32 normed(const float* x, const float* gain, F32 inverse, int at) {
  const F32 a = load(x + at);
  return gain != nullptr ? mul(mul(a, inverse), load(gain + at)) : a;
}

// A row under one d, which is 1 where all of it is 0.
void prepare_whole(const float* x, const float* gain, F32 inverse, const Rows& to, int row) {
  float d = to.given;
  if (to.rounding == Rounding::kRow) {
    I32 most = zero_i32();
    for (int i = 0; i < to.in; i += kGroup) {
      most = max(most, magnitude_bits(normed(x, gain, inverse, i),
                                      normed(x, gain, inverse, i + kLanes)));
    }
    d = largest(most) / 127.0f;
    d = d == 0.0f ? 1.0f : d;
  }
  for (int g = 0; g < to.in / kGroup; ++g) {
    const F32 a = normed(x, gain, inverse, kGroup * g);
    const F32 b = normed(x, gain, inverse, kGroup * g + kLanes);
    put_codes(codes_under(a, set1(d)), codes_under(b, set1(d)), d, to, to.at(row, g));
  }
}

void prepare(const float* x, const float* gain, float eps, const Rows& to, int row) {
  const F32 inverse = set1(gain != nullptr ? inverse_rms(x, to.in, eps) : 1.0f);
  if (to.rounding != Rounding::kGroup) return prepare_whole(x, gain, inverse, to, row);
  for (int g = 0; g < to.in / kGroup; ++g) {
    const F32 a = normed(x, gain, inverse, kGroup * g);
    put_group(a, normed(x, gain, inverse, kGroup * g + kLanes), to, row, g);
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

inline constexpr Kernels kKernels{prepare, prepare_group, panels, finish, gate, nullptr, nullptr};

}  // namespace infer::INFER_ISA
