// The kernels of sample.h, compiled once for each instruction set.
#pragma once

#include "sample.h"
#include "vec.h"

namespace infer::INFER_ISA {

// f(vector, index of its first lane, lanes in use) for all of x [n]; lanes past the end are -inf.
template <typename F>
INFER_INLINE void for_vectors(const float* x, int n, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) f(load(x + i), i, kLanes);
  if (i == n) return;
  float tail[kLanes];
  for (int j = 0; j < kLanes; ++j) tail[j] = i + j < n ? x[i + j] : -__builtin_inff();
  f(load(tail), i, n - i);
}

// Two chains, of even and odd vectors.
LogitSum sum(const float* x, int n) {
  const F32 least = set1(-__builtin_inff());
  F32 top[2] = {least, least};
  uint32_t numbers = 0xffff;
  for_vectors(x, n, [&](F32 v, int i, int) {
    top[i / kLanes % 2] = max(v, top[i / kLanes % 2]);
    numbers &= mask_ge(v, v);
  });
  const float most = reduce_max(max(top[0], top[1]));
  if (numbers != 0xffff) return {most, __builtin_nanf("")};
  if (most - most != 0) return {most, most > 0 ? 1.0f : 0.0f};  // infinite
  F32 total[2] = {zero_f32(), zero_f32()};
  const F32 shift = set1(most);
  for_vectors(x, n, [&](F32 v, int i, int) {
    total[i / kLanes % 2] = add(total[i / kLanes % 2], exp(sub(v, shift)));
  });
  return {most, reduce_add(add(total[0], total[1]))};
}

Best top(const float* x, int n) {
  Best best{-__builtin_inff(), -1};
  for_vectors(x, n, [&](F32 v, int i, int) {
    // Not "not more than", which is false for NaN.
    if (mask_ge(set1(best.score), v) == 0xffff) return;
    for (int j = 0; j < kLanes && i + j < n; ++j) {
      if (best.score == best.score && !(x[i + j] <= best.score)) best = {x[i + j], i + j};
    }
  });
  return best;
}

INFER_INLINE F32 scaled(F32 x, const Draw& draw) {
  return div(sub(x, set1(draw.top)), set1(draw.temperature));
}

// A function of s that never rises with it; NaN falls in the last bin.
INFER_INLINE int bin_of(float s) {
  if (!(s > -kScaledRange)) return kBins;
  const int bin = static_cast<int>(s * -(kBins / kScaledRange));
  return bin < 0 ? 0 : bin < kBins ? bin : kBins - 1;
}

void count(const float* x, int n, const Draw& draw, Bins& bins) {
  const F32 range = set1(-kScaledRange);
  F32 rest = zero_f32();
  double rest_mass = 0;
  int64_t near = 0;
  for_vectors(x, n, [&](F32 v, int i, int) {
    const F32 s = scaled(v, draw), e = exp(s);
    uint32_t mask = mask_gt(s, range);
    rest = add(rest, select_gt(s, range, zero_f32(), e));
    if (i / kLanes % 64 == 63) {  // few enough for float32
      rest_mass += reduce_add(rest);
      rest = zero_f32();
    }
    if (mask == 0) return;
    float ss[kLanes], es[kLanes];
    store(ss, s);
    store(es, e);
    for (; mask != 0; mask &= mask - 1) {
      const int j = __builtin_ctz(mask), bin = bin_of(ss[j]);
      ++bins.count[bin];
      bins.mass[bin] += es[j];
      ++near;
    }
  });
  bins.count[kBins] += n - near;
  bins.mass[kBins] += rest_mass + reduce_add(rest);
}

int gather(const float* x, int n, const Draw& draw, int bin, float* s, int32_t* index) {
  int found = 0;
  // One bin's width more than the bin, for rounding.
  const float width = kScaledRange / kBins;
  const F32 low = set1(bin == kBins ? -__builtin_inff() : -width * (bin + 2));
  for_vectors(x, n, [&](F32 v, int i, int used) {
    const F32 all = scaled(v, draw);
    if (bin != kBins && mask_gt(all, low) == 0) return;
    float ss[kLanes];
    store(ss, all);
    for (int j = 0; j < used; ++j) {
      if (bin_of(ss[j]) != bin) continue;
      s[found] = ss[j] == ss[j] ? ss[j] : -__builtin_inff();
      index[found++] = i + j;
    }
  });
  return found;
}

// What jax.random.gumbel(key, (V,)) has at these ids: threefry2x32 of the counter (0, id), its words
// xored, as a float in [0, 1).  Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1,
// 2, 3".
template <int r>
INFER_INLINE void mix(I32& a, I32& b) {
  a = add(a, b);
  b = bit_xor(rotate_left<r>(b), a);
}
INFER_INLINE F32 gumbel(const uint32_t* key, int first) {
  const uint32_t words[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  auto word = [&](int i, uint32_t more) { return set1_i32(static_cast<int32_t>(words[i] + more)); };
  I32 a = word(0, 0), b = add(lane_ids(first), word(1, 0));
  for (int i = 0; i < 5; ++i) {
    if (i % 2 == 0) {
      mix<13>(a, b), mix<15>(a, b), mix<26>(a, b), mix<6>(a, b);
    } else {
      mix<17>(a, b), mix<29>(a, b), mix<16>(a, b), mix<24>(a, b);
    }
    a = add(a, word((i + 1) % 3, 0));
    b = add(b, word((i + 2) % 3, i + 1));
  }
  const I32 mantissa = bit_or(shift_right<9>(bit_xor(a, b)), set1_i32(0x3F800000));
  const F32 u = max(sub(bits_to_f32(mantissa), set1(1.0f)), set1(1.17549435e-38f));
  return sub(zero_f32(), log(sub(zero_f32(), log(u))));
}

Best draw(const float* x, int n, int first, const Draw& draw) {
  Best best{-__builtin_inff(), -1};
  const float low = draw.edge > draw.floor ? draw.edge : draw.floor;
  for_vectors(x, n, [&](F32 v, int i, int used) {
    const F32 s = scaled(v, draw);
    if (mask_ge(s, set1(low)) == 0) return;
    const F32 score = add(s, gumbel(draw.key, first + i));
    if (mask_gt(score, set1(best.score)) == 0) return;
    float ss[kLanes], scores[kLanes];
    store(ss, s);
    store(scores, score);
    for (int j = 0; j < used; ++j) {
      const int32_t id = first + i + j;
      const bool kept = ss[j] >= low && (ss[j] != draw.edge || id <= draw.last);
      if (kept && scores[j] > best.score) best = {scores[j], id};
    }
  });
  return best;
}

inline constexpr SampleKernels kSampleKernels{sum, top, count, gather, draw};

}  // namespace infer::INFER_ISA
