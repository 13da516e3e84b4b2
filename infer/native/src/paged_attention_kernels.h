// The kernels of paged_attention.h, compiled once for each instruction set.
#pragma once

#include "paged_attention.h"
#include "transpose.h"
#include "vec.h"

namespace infer::INFER_ISA {

// Finite, so that a row without visible keys gives 0 rather than NaN; exp(kUnseen - m) is 0.
constexpr float kUnseen = -1e30f;

// Rows of a block, and how many 16-key panels or 16-dimension columns of so many rows, whose sums
// are held in registers: 32 of 16 lanes, or 16 of 8.  Fewer rows take more, so that enough chains
// of multiply-adds are under way.
constexpr int kScoreRows = INFER_AVX512 ? 8 : 6;
constexpr int kValueRows = INFER_AVX512 ? 4 : 6;
constexpr int panels_of(int rows) {
  const int sums = INFER_AVX512 ? 16 : 6;
  return rows * 4 <= sums ? 4 : rows * 2 <= sums ? 2 : 1;
}
constexpr int columns_of(int rows) { return INFER_AVX512 ? 4 : rows <= 1 ? 4 : rows <= 2 ? 2 : 1; }

constexpr int kPackedPanels = 4;
// Values converted at a time, to stay in the first cache.
constexpr int kPackedValues = 32;

// ---- Elements of the pools --------------------------------------------------------------------
//
// kPerLane: elements in the 4 bytes of a lane.  Where there are several, keys are transposed by
// lanes, and `part<k>` is then element k of each lane as floats.
// kScaled: numbers are to be multiplied by a scale and kUnit, after their products are summed.

struct ElementF32 {
  using Type = float;
  static constexpr int kPerLane = 1;
  static constexpr bool kScaled = false, kHalves = false;
  static INFER_INLINE F32 load(const Type* p) { return INFER_ISA::load(p); }
};
struct ElementBf16 {
  using Type = uint16_t;
  static constexpr int kPerLane = 2;
  static constexpr bool kScaled = false, kHalves = false;
  static INFER_INLINE F32 load(const Type* p) { return load_bf16(p); }
  template <int k>
  static INFER_INLINE F32 part(I32 x) {
    return bits_to_f32(k == 0 ? shift_left<16>(x)
                              : bit_and(x, set1_i32(static_cast<int32_t>(0xffff0000))));
  }
};
struct ElementF16 {
  using Type = uint16_t;
  static constexpr int kPerLane = 1;
  static constexpr bool kScaled = false, kHalves = false;
  static INFER_INLINE F32 load(const Type* p) { return load_f16(p); }
};
struct ElementI8 {
  using Type = int8_t;
  static constexpr int kPerLane = 4;
  static constexpr bool kScaled = true, kHalves = false;
  static constexpr float kUnit = 1;
  static INFER_INLINE F32 load(const Type* p) { return to_f32(load_i8(p)); }
  template <int k>
  static INFER_INLINE F32 part(I32 x) {
    return to_f32(shift_right_signed<24>(shift_left<24 - 8 * k>(x)));
  }
};
struct ElementE4M3 {
  using Type = uint8_t;
  static constexpr int kPerLane = 1;
  static constexpr bool kScaled = true, kHalves = false;
  static constexpr float kUnit = 256;
  static INFER_INLINE F32 load(const Type* p) { return load_e4m3_over_256(p); }
};
// A row of two halves: low nibbles, high nibbles.
struct ElementI4 {
  using Type = uint8_t;
  static constexpr int kPerLane = 8;
  static constexpr bool kScaled = true, kHalves = true;
  static constexpr float kUnit = 1;
  // The nibble in the low bits of each lane, less 8.
  static INFER_INLINE F32 number(I32 x) {
    alignas(64) static const float kNumbers[kLanes] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                       0,  1,  2,  3,  4,  5,  6,  7};
    return lookup(INFER_ISA::load(kNumbers), x);
  }
  template <int k>
  static INFER_INLINE F32 part(I32 x) {
    return number(shift_right<4 * k>(x));
  }
};

// Elements of type E::Type in a row of `width` numbers.
template <typename E>
INFER_INLINE int64_t row_elements(int width) {
  return E::kHalves ? width / 2 : width;
}

// Numbers h to h + 15 of a row of `width`, 0 past its end; reads no further.
template <typename E>
INFER_INLINE F32 load_some(const typename E::Type* row, int h, int width) {
  if constexpr (E::kHalves) {
    const int half = width / 2;
    if (h + kLanes <= half) return E::number(load_u8(row + h));
    if (h >= half && h + kLanes <= width) return E::number(shift_right<4>(load_u8(row + h - half)));
    float numbers[kLanes] = {};
    for (int i = h; i < h + kLanes && i < width; ++i) {
      const int nibble = i < half ? row[i] & 15 : row[i - half] >> 4;
      numbers[i - h] = static_cast<float>(nibble - 8);
    }
    return load(numbers);
  } else {
    if (h + kLanes <= width) return E::load(row + h);
    typename E::Type padded[kLanes] = {};
    for (int i = h; i < width; ++i) padded[i - h] = row[i];
    return E::load(padded);
  }
}

// tanh x; relative error below 2e-7.  The polynomial near 0 is from Cephes, single/tanhf.c.
INFER_INLINE F32 tanh(F32 x) {
  const F32 size = abs(x), one = set1(1.0f), z = mul(x, x);
  F32 p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const F32 near = fma(mul(p, z), x, x);
  const F32 far = sub(one, div(set1(2.0f), add(exp(add(size, size)), one)));
  return select_gt(size, set1(0.625f), select_gt(zero_f32(), x, sub(zero_f32(), far), far), near);
}

// ---- Products ---------------------------------------------------------------------------------

// s [R, C * 16], rows kSplit apart, := q [R, width] times C panels [width, 16].
template <int R, int C>
INFER_INLINE void score_block(const float* q, int width, const float* panels, int64_t panel_stride,
                              float* s) {
  F32 sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = zero_f32();
  }
  for (int h = 0; h < width; ++h) {
    F32 k[C];
    for (int c = 0; c < C; ++c) k[c] = load(panels + c * panel_stride + h * kLanes);
    for (int r = 0; r < R; ++r) {
      const F32 qv = set1(q[r * width + h]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(qv, k[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(s + r * kSplit + c * kLanes, sum[r][c]);
  }
}

template <int R>
void score_rows(const float* q, int width, const float* panels, int64_t panel_stride,
                int num_panels, float* s) {
  constexpr int C = panels_of(R);
  int c = 0;
  for (; c + C <= num_panels; c += C) {
    score_block<R, C>(q, width, panels + c * panel_stride, panel_stride, s + c * kLanes);
  }
  for (; c < num_panels; ++c) {
    score_block<R, 1>(q, width, panels + c * panel_stride, panel_stride, s + c * kLanes);
  }
}

// acc [R, C * 16] += p [R, n] times the rows v [n] from element `column` on, keys in order.  Of a
// row of two halves, half of the C columns are in each.
template <typename E, int R, int C>
INFER_INLINE void value_block(const float* p, const typename E::Type* const* v, int n, int column,
                              float* acc, int64_t acc_stride) {
  constexpr int kLoads = E::kHalves ? C / 2 : C;
  auto at = [&](int r, int c) {
    return acc + r * acc_stride + column + c % kLoads * kLanes + c / kLoads * (acc_stride / 2);
  };
  F32 sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = load(at(r, c));
  }
  for (int j = 0; j < n; ++j) {
    const typename E::Type* from = v[j] + column;
    F32 x[C];
    for (int c = 0; c < kLoads; ++c) {
      if constexpr (E::kHalves) {
        const I32 both = load_u8(from + c * kLanes);
        x[c] = E::number(both);
        x[c + kLoads] = E::number(shift_right<4>(both));
      } else {
        x[c] = E::load(from + c * kLanes);
      }
    }
    for (int r = 0; r < R; ++r) {
      const F32 weight = set1(p[r * kSplit + j]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, x[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(at(r, c), sum[r][c]);
  }
}

template <typename E, int R>
void value_rows(const float* p, const typename E::Type* const* v, int n, int width, float* acc) {
  if constexpr (E::kHalves) {
    constexpr int C = columns_of(R) < 2 ? 2 : columns_of(R);
    int column = 0;
    for (; column + C / 2 * kLanes <= width / 2; column += C / 2 * kLanes) {
      value_block<E, R, C>(p, v, n, column, acc, width);
    }
    for (; column < width / 2; column += kLanes) {
      value_block<E, R, 2>(p, v, n, column, acc, width);
    }
    return;
  }
  constexpr int C = columns_of(R);
  int column = 0;
  for (; column + C * kLanes <= width; column += C * kLanes) {
    value_block<E, R, C>(p, v, n, column, acc, width);
  }
  for (; column < width; column += kLanes) value_block<E, R, 1>(p, v, n, column, acc, width);
}

template <int R, typename F>
INFER_INLINE void last_block(int r, int left, F f) {
  if constexpr (R > 0) {
    if (left == R) return f.template operator()<R>(r);
    last_block<R - 1>(r, left, f);
  }
}

// Call f<R>(first row) on blocks of `most` rows and one of what is left.
template <int most, typename F>
INFER_INLINE void for_row_blocks(int rows, F f) {
  int r = 0;
  for (; r + most <= rows; r += most) f.template operator()<most>(r);
  last_block<most - 1>(r, rows - r, f);
}

struct ScoreCall {
  const float* q;
  int width;
  const float* panels;
  int64_t panel_stride;
  int num_panels;
  float* s;
  template <int R>
  void operator()(int r) const {
    score_rows<R>(q + int64_t{r} * width, width, panels, panel_stride, num_panels, s + r * kSplit);
  }
};

template <typename E>
struct ValueCall {
  const float* p;
  const typename E::Type* const* v;
  int n, width;
  float* acc;
  template <int R>
  void operator()(int r) const {
    value_rows<E, R>(p + r * kSplit, v, n, width, acc + int64_t{r} * width);
  }
};

// ---- One split --------------------------------------------------------------------------------

// The token and the query head of row r.
INFER_INLINE int token_of(const Attention& a, const Tile& tile, int r) {
  return tile.t0 + r % tile.rows_of_head(a) / a.group();
}
INFER_INLINE int head_of(const Attention& a, const Tile& tile, int r) {
  return (tile.head + r / tile.rows_of_head(a)) * a.group() + r % a.group();
}

struct Keys {
  int64_t low, high;  // visible: low <= position <= high
};
INFER_INLINE Keys keys_of(const Attention& a, const Tile& tile, int t) {
  const int64_t i = a.positions[int64_t{tile.row} * a.num_queries + t];
  const int64_t first = i - a.window + 1;
  return {first > 0 ? first : 0, i};
}

// Rows 0, 1, ... of a panel [width, 16] := the elements of a lane of 16 keys; where rows have two
// halves, every other one goes to the second.
template <typename E, int k = 0>
INFER_INLINE void unpack_lane(I32 x, int width, float* to) {
  if constexpr (k < E::kPerLane) {
    const int row = E::kHalves ? k / 2 + k % 2 * (width / 2) : k;
    store(to + int64_t{row} * kLanes, E::template part<k>(x));
    unpack_lane<E, k + 1>(x, width, to);
  }
}

// panels [c][width, 16] := 16 keys each, transposed.
template <typename E>
INFER_INLINE void pack_keys(const typename E::Type* const* keys, int num_panels, int width,
                            int64_t panel_stride, float* panels) {
  for (int c = 0; c < num_panels; ++c) {
    const typename E::Type* const* const from = keys + c * kLanes;
    float* const to = panels + c * panel_stride;
    int h = 0;
    if constexpr (E::kPerLane > 1) {
      // Elements change places as lanes of several; of a row of two halves, all or none.
      constexpr int kElements = 4 / static_cast<int>(sizeof(typename E::Type));  // of a lane
      const int elements = static_cast<int>(row_elements<E>(width));
      const bool by_lanes = !E::kHalves || elements % (kLanes / 2 * kElements) == 0;
      while (by_lanes && h + kLanes / 2 * kElements <= elements) {
        const bool whole = h + kLanes * kElements <= elements;
        F32 x[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          const auto* const p = reinterpret_cast<const float*>(from[j] + h);
          x[j] = whole ? load(p) : load_half(p);
        }
        transpose16(x);
        const int lanes = whole ? kLanes : kLanes / 2;
        for (int j = 0; j < lanes; ++j) {
          unpack_lane<E>(to_bits(x[j]), width, to + int64_t{h} * kLanes);
          h += kElements;
        }
      }
      if (h == elements) continue;
    }
    for (; h < width; h += kLanes) {
      F32 x[kLanes];
      for (int j = 0; j < kLanes; ++j) x[j] = load_some<E>(from[j], h, width);
      transpose16(x);
      for (int j = 0; j < kLanes; ++j) store(to + int64_t{h + j} * kLanes, x[j]);
    }
  }
}

// s [rows, n], rows kSplit apart, times factors [n]; n is whole panels.
INFER_INLINE void scale_columns(float* s, int rows, const float* factors, int n) {
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < n; j += kLanes) {
      store(s + r * kSplit + j, mul(load(s + r * kSplit + j), load(factors + j)));
    }
  }
}

// s [n] := exp(s - m) of the keys from low to high of the split, 0 of the others; n is whole
// panels.
INFER_INLINE void soften(float* s, int begin, int end, int low, int high, const float* bias,
                         float softcap, float* m_out, float* total_out) {
  alignas(64) static const float kIota[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                  8, 9, 10, 11, 12, 13, 14, 15};
  const F32 unseen = set1(-__builtin_inff());
  const F32 lows = set1(static_cast<float>(low)), highs = set1(static_cast<float>(high));
  F32 most = set1(kUnseen);
  for (int j = begin; j < end; j += kLanes) {
    F32 x = load(s + j);
    if (softcap != 0) x = mul(tanh(div(x, set1(softcap))), set1(softcap));
    if (bias != nullptr) x = add(x, load(bias + j));
    if (j < low || j + kLanes - 1 > high) {
      const F32 index = add(load(kIota), set1(static_cast<float>(j)));
      x = select_gt(index, highs, unseen, select_gt(lows, index, unseen, x));
    }
    store(s + j, x);
    most = max(most, x);
  }
  const float m = reduce_max(most);
  const F32 ms = set1(m);
  F32 total = zero_f32();
  for (int j = begin; j < end; j += kLanes) {
    const F32 p = exp(sub(load(s + j), ms));
    store(s + j, p);
    total = add(total, p);
  }
  *m_out = m;
  *total_out = reduce_add(total);
}

// Walks the slots of a tile's keys in ascending order of position.
class Slots {
 public:
  INFER_INLINE Slots(const Attention& a, const Tile& tile, int64_t position)
      : pools_(a.pools),
        table_(a.table + int64_t{tile.row} * a.pages_per_row),
        pages_(a.pages_per_row),
        column_(position / a.pools.page_size),
        slot_(static_cast<int>(position % a.pools.page_size)) {}

  // The row of the next key and head 0 in the pools, or -1 where there is no page.
  INFER_INLINE int64_t next() {
    const int64_t page = column_ < pages_ ? table_[column_] : -1;
    const int64_t at = page >= 0 && page < pools_.num_pages
                           ? page * pools_.page_stride + slot_ * pools_.token_stride
                           : -1;
    if (++slot_ == pools_.page_size) {
      slot_ = 0;
      ++column_;
    }
    return at;
  }

 private:
  const Pools& pools_;
  const int32_t* table_;
  int64_t pages_, column_;
  int slot_;
};

// The keys and values of a split in memory.
template <typename E>
struct Split {
  using Type = typename E::Type;
  const Attention& a;
  const Type* nothing;  // a row of zeros, for a key nobody sees: its memory may be stale
  // The row of each key and head 0, or -1; of this split, and of the start of the next.
  int64_t at[kSplit + kLanes];

  INFER_INLINE int64_t row(int head, int j) const {
    return at[j] < 0 ? -1 : at[j] + head * a.pools.head_stride;
  }
  INFER_INLINE void rows(const void* pool, int head, int j, int n, const Type** to) const {
    for (int i = 0; i < n; ++i) {
      const int64_t r = row(head, j + i);
      to[i] = r < 0 ? nothing : static_cast<const Type*>(pool) + r * row_elements<E>(a.width);
    }
  }
  INFER_INLINE void scales(const float* all, int head, int j, int n, float* to) const {
    for (int i = 0; i < n; ++i) {
      const int64_t r = row(head, j + i);
      to[i] = r < 0 ? 0 : all[r] * E::kUnit;
    }
  }

  // Pages are small and scattered, which the hardware does not foresee.  Asked for little by little
  // between other work, rows arrive while it is done.
  INFER_INLINE void prefetch(const void* pool, int head, int j, int n) const {
    const int64_t bytes = row_elements<E>(a.width) * static_cast<int64_t>(sizeof(Type));
    for (int i = 0; i < n; ++i) {
      const int64_t r = row(head, j + i);
      if (r < 0) continue;
      const char* const from = static_cast<const char*>(pool) + r * bytes;
      for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch(from + b, _MM_HINT_T0);
    }
  }
};

template <typename E>
void attend_in(const Attention& a, const Tile& tile, int split, float* scratch, const Part& part) {
  using Type = typename E::Type;
  const int rows = tile.rows(a), rows_of_head = tile.rows_of_head(a), group = a.group();
  const int width = a.width, padded = a.padded_width();
  float* const q = scratch;
  float* const s = q + int64_t{rows} * padded;
  float* const panels = s + int64_t{rows} * kSplit;
  float* const packed = panels + int64_t{padded} * kLanes * kPackedPanels;
  float* const zeros = packed + int64_t{padded} * kPackedValues;
  for (int h = 0; h < padded; ++h) zeros[h] = 0;

  // The keys of the split that any row of the tile sees, from its start on.
  const int64_t origin = int64_t{split} * kSplit;
  int64_t low = kSplit, high = -1;
  for (int t = tile.t0; t < tile.t1; ++t) {
    const Keys keys = keys_of(a, tile, t);
    if (keys.low > keys.high) continue;
    low = keys.low - origin < low ? keys.low - origin : low;
    high = keys.high - origin > high ? keys.high - origin : high;
  }
  low = low < 0 ? 0 : low;
  const int ahead = high >= kSplit ? kLanes : 0;  // keys of the next split to prefetch
  high = high < kSplit ? high : kSplit - 1;
  for (int64_t i = 0; i < int64_t{rows} * padded; ++i) part.acc[i] = 0;
  if (low > high) {
    for (int r = 0; r < rows; ++r) {
      part.m[r] = kUnseen;
      part.total[r] = 0;
    }
    return;
  }
  const int begin = static_cast<int>(low) / kLanes * kLanes;
  const int end = (static_cast<int>(high) / kLanes + 1) * kLanes;

  Split<E> in = {a, reinterpret_cast<const Type*>(zeros), {}};
  alignas(64) float bias[kSplit];
  bool missing = false;
  {
    Slots slots(a, tile, origin + begin);
    for (int j = begin; j < end + ahead; ++j) {
      const bool seen = j >= low && (j <= high || j >= kSplit);
      in.at[j] = slots.next();
      if (j >= kSplit) continue;
      bias[j] = seen && in.at[j] < 0 ? -__builtin_inff() : 0;
      missing |= seen && in.at[j] < 0;
      if (!seen) in.at[j] = -1;
    }
  }

  const F32 scale = set1(a.scale);
  for (int head = 0; head < tile.num_heads; ++head) {
    for (int t = tile.t0; t < tile.t1; ++t) {
      // The heads of a group are neighbours.
      const float* from = a.q + ((int64_t{tile.row} * a.num_queries + t) * a.num_heads +
                                 int64_t{tile.head + head} * group) * width;
      float* to = q + (int64_t{head} * rows_of_head + (t - tile.t0) * group) * width;
      const int n = group * width;
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(from + i), scale));
      for (; i < n; ++i) to[i] = from[i] * a.scale;
    }
  }

  // Few rows: keys pass in the order in which they lie in memory, heads innermost.
  const bool few = rows_of_head <= kFewRows;
  const int panels_at_once = few ? 1 : kPackedPanels;
  const int64_t panel_stride = int64_t{padded} * kLanes;
  const int step = panels_at_once * kLanes;
  for (int j = begin; j < end; j += step) {
    const int left = (end - j) / kLanes;
    const int num_panels = left < panels_at_once ? left : panels_at_once;
    for (int head = 0; head < tile.num_heads; ++head) {
      const Type* keys[kPackedPanels * kLanes];
      in.rows(a.pools.k, tile.head + head, j, num_panels * kLanes, keys);
      // What is needed next: this head's next keys, or at the end its first values.
      const bool last = j + kLanes >= end;
      const void* const next_pool = last ? a.pools.v : a.pools.k;
      const int next = last ? begin : j + kLanes;
      if (few) in.prefetch(next_pool, tile.head + head, next, kLanes / 2);
      pack_keys<E>(keys, num_panels, width, panel_stride, panels);
      if (few) in.prefetch(next_pool, tile.head + head, next + kLanes / 2, kLanes / 2);
      const int64_t first = int64_t{head} * rows_of_head;
      for_row_blocks<kScoreRows>(rows_of_head,
                                 ScoreCall{q + first * width, width, panels, panel_stride,
                                           num_panels, s + first * kSplit + j});
      if constexpr (E::kScaled) {
        float scales[kPackedPanels * kLanes];
        in.scales(a.pools.k_scales, tile.head + head, j, num_panels * kLanes, scales);
        scale_columns(s + first * kSplit + j, rows_of_head, scales, num_panels * kLanes);
      }
    }
  }

  for (int r = 0; r < rows; ++r) {
    const Keys seen = keys_of(a, tile, token_of(a, tile, r));
    const int64_t first = seen.low - origin, last = seen.high - origin;
    soften(s + int64_t{r} * kSplit, begin, end,
           static_cast<int>(first < 0 ? 0 : first > kSplit ? kSplit : first),
           static_cast<int>(last < -1 ? -1 : last > kSplit ? kSplit : last),
           missing ? bias : nullptr, a.softcap, part.m + r, part.total + r);
  }

  // Values are read as they lie where that is possible and not done over and over.
  const bool direct = width == padded && (!E::kHalves || width % (2 * kLanes) == 0) &&
                      (sizeof(Type) == sizeof(float) || rows_of_head <= 2 * kValueRows);
  const int values_at_once = few ? kLanes : kPackedValues;
  for (int j = begin; j < end; j += values_at_once) {
    const int left = end - j;
    const int n = left < values_at_once ? left : values_at_once;
    for (int head = 0; head < tile.num_heads; ++head) {
      const Type* values[kPackedValues];
      in.rows(a.pools.v, tile.head + head, j, n, values);
      if (few && j + n < end) in.prefetch(a.pools.v, tile.head + head, j + n, kLanes);
      if (few && j + n >= end && ahead > 0) {
        in.prefetch(a.pools.k, tile.head + head, kSplit, kLanes);
      }
      const int64_t first = int64_t{head} * rows_of_head;
      float* const p = s + first * kSplit + j;
      if constexpr (E::kScaled) {
        float scales[kPackedValues];
        in.scales(a.pools.v_scales, tile.head + head, j, n, scales);
        scale_columns(p, rows_of_head, scales, n);
      }
      float* const acc = part.acc + first * padded;
      if (direct) {
        for_row_blocks<kValueRows>(rows_of_head, ValueCall<E>{p, values, n, padded, acc});
        continue;
      }
      const float* rows_of[kPackedValues];
      for (int i = 0; i < n; ++i) {
        float* const to = packed + int64_t{i} * padded;
        for (int h = 0; h < width; h += kLanes) {
          store(to + h, load_some<E>(values[i], h, width));
        }
        rows_of[i] = to;
      }
      for_row_blocks<kValueRows>(rows_of_head, ValueCall<ElementF32>{p, rows_of, n, padded, acc});
    }
  }
}

inline void attend(const Attention& a, const Tile& tile, int split, float* scratch,
                   const Part& part) {
  switch (a.pools.type) {
    case PoolType::kF32: return attend_in<ElementF32>(a, tile, split, scratch, part);
    case PoolType::kBf16: return attend_in<ElementBf16>(a, tile, split, scratch, part);
    case PoolType::kF16: return attend_in<ElementF16>(a, tile, split, scratch, part);
    case PoolType::kI8: return attend_in<ElementI8>(a, tile, split, scratch, part);
    case PoolType::kI4: return attend_in<ElementI4>(a, tile, split, scratch, part);
    case PoolType::kE4M3: return attend_in<ElementE4M3>(a, tile, split, scratch, part);
  }
}

// ---- Splits together --------------------------------------------------------------------------

inline void begin(const Attention& a, const Tile& tile, const Part& part) {
  const int rows = tile.rows(a);
  for (int r = 0; r < rows; ++r) {
    // A sink is a key with exp(sink - m) = 1 and no value.
    part.m[r] = a.sinks == nullptr ? kUnseen : a.sinks[head_of(a, tile, r)];
    part.total[r] = a.sinks == nullptr ? 0.0f : 1.0f;
  }
  for (int64_t i = 0; i < int64_t{rows} * a.padded_width(); ++i) part.acc[i] = 0;
}

inline void merge(const Attention& a, const Tile& tile, const Part& next, const Part& into) {
  const int rows = tile.rows(a), width = a.padded_width();
  for (int r = 0; r < rows; ++r) {
    const float m = next.m[r] > into.m[r] ? next.m[r] : into.m[r];
    const F32 before = exp(set1(into.m[r] - m)), after = exp(set1(next.m[r] - m));
    const F32 total = fma(set1(into.total[r]), before, mul(set1(next.total[r]), after));
    into.m[r] = m;
    alignas(64) float totals[kLanes];
    store(totals, total);
    into.total[r] = totals[0];
    float* const x = into.acc + int64_t{r} * width;
    const float* const y = next.acc + int64_t{r} * width;
    for (int h = 0; h < width; h += kLanes) {
      store(x + h, fma(load(x + h), before, mul(load(y + h), after)));
    }
  }
}

inline void finish(const Attention& a, const Tile& tile, const Part& part) {
  const int rows = tile.rows(a), width = a.padded_width();
  constexpr float kTiny = 1.17549435e-38f;  // where nothing was seen, 0 / kTiny
  for (int r = 0; r < rows; ++r) {
    const int64_t t = int64_t{tile.row} * a.num_queries + token_of(a, tile, r);
    float* const to = a.out + (t * a.num_heads + head_of(a, tile, r)) * a.width;
    const float total = part.total[r] < kTiny ? kTiny : part.total[r];  // NaN stays
    const float* const acc = part.acc + int64_t{r} * width;
    int h = 0;
    for (; h + kLanes <= a.width; h += kLanes) store(to + h, div(load(acc + h), set1(total)));
    for (; h < a.width; ++h) to[h] = acc[h] / total;
  }
}

constexpr AttentionKernels kAttentionKernels = {attend, begin, merge, finish};

}  // namespace infer::INFER_ISA
