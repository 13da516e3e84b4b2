// Sixteen lanes, on every instruction set: one register of AVX512, two of AVX2.  Lane i of a result
// has the same bits on both; reductions have one fixed order.
//
// For the files *_avx2.cc and *_avx512.cc only.  All of it lives in a namespace of the instruction
// set, so that the linker can never take one file's inline function for another's; for the same
// reason these files use no templates of the standard library.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define INFER_AVX512 1
#define INFER_ISA avx512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define INFER_AVX512 0
#define INFER_ISA avx2
#else
#error "compile with the flags of infer/native/build.py"
#endif

#define INFER_INLINE inline __attribute__((always_inline))

namespace infer::INFER_ISA {

constexpr int kLanes = 16;

#if INFER_AVX512

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};
struct U8x64 {  // 64 bytes: four for each lane
  __m512i v;
};

INFER_INLINE F32 zero_f32() { return {_mm512_setzero_ps()}; }
INFER_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
INFER_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
// Lanes 0 to 7; the others are 0.
INFER_INLINE F32 load_half(const float* p) {
  return {_mm512_zextps256_ps512(_mm256_loadu_ps(p))};
}
INFER_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
INFER_INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
INFER_INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INFER_INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INFER_INLINE F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
INFER_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
INFER_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
// a * b + c, rounded once.
INFER_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INFER_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
INFER_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
INFER_INLINE F32 bits_to_f32(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
INFER_INLINE I32 to_bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
// Nearest even; INT_MIN for NaN and what does not fit.
INFER_INLINE I32 round_i32(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
INFER_INLINE F32 load_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
// 8-bit floats by way of float16, which holds all of them (E4M3 over 256) and is never flushed.
INFER_INLINE F32 load_e4m3_over_256(const void* p) {
  // The sign stands twice, in bits 8 and 7; float16's lower one is part of the exponent.
  const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m256i h = _mm256_and_si256(_mm256_slli_epi16(w, 7),
                                     _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {_mm512_cvtph_ps(h)};
}
INFER_INLINE F32 load_e5m2(const void* p) {
  const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return {_mm512_cvtph_ps(_mm256_slli_epi16(w, 8))};
}
// table[i], i from 0 to 15.
INFER_INLINE F32 lookup(F32 table, I32 i) { return {_mm512_permutexvar_ps(i.v, table.v)}; }
INFER_INLINE I32 load_u16(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
INFER_INLINE I32 load_u8(const void* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
INFER_INLINE I32 load_i8(const void* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
// The low byte of each lane.
INFER_INLINE void store_i8(int8_t* p, I32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

INFER_INLINE I32 zero_i32() { return {_mm512_setzero_si512()}; }
INFER_INLINE I32 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
INFER_INLINE I32 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INFER_INLINE I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
INFER_INLINE I32 sub(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INFER_INLINE I32 mul(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
INFER_INLINE I32 max(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
INFER_INLINE I32 bit_and(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
INFER_INLINE I32 bit_or(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
INFER_INLINE I32 bit_xor(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n>
INFER_INLINE I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
INFER_INLINE I32 shift_right(I32 a) {  // zeros come in
  return {_mm512_srli_epi32(a.v, n)};
}
template <int n>
INFER_INLINE I32 shift_right_signed(I32 a) {
  return {_mm512_srai_epi32(a.v, n)};
}
template <int n>
INFER_INLINE I32 rotate_left(I32 a) {
  return {_mm512_rol_epi32(a.v, n)};
}
// Bit i is lane i's; false for NaN.
INFER_INLINE uint32_t mask_gt(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
INFER_INLINE uint32_t mask_ge(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// yes where a > b, else no
INFER_INLINE F32 select_gt(F32 a, F32 b, F32 yes, F32 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), no.v, yes.v)};
}

INFER_INLINE U8x64 load_u8x64(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INFER_INLINE U8x64 bit_and(U8x64 a, U8x64 b) { return {_mm512_and_si512(a.v, b.v)}; }
INFER_INLINE U8x64 bit_or(U8x64 a, U8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
INFER_INLINE U8x64 sub(U8x64 a, U8x64 b) { return {_mm512_sub_epi8(a.v, b.v)}; }
INFER_INLINE U8x64 set1_u8(uint8_t x) {
  return {_mm512_set1_epi8(static_cast<char>(x))};
}
// Shifts of 16-bit fields: mask the result.
template <int n>
INFER_INLINE U8x64 shift_right16(U8x64 a) {
  return {_mm512_srli_epi16(a.v, n)};
}
template <int n>
INFER_INLINE U8x64 shift_left16(U8x64 a) {
  return {_mm512_slli_epi16(a.v, n)};
}

// For each lane the sum over its 4n bytes of (w - zero) * x, exact.  The codes w are below 2^bits,
// zero is 0 or 2^(bits - 1); x [4n], at least -127, is the same for all lanes and has the sum
// -minus_sum.
template <int bits, int zero, int n>
INFER_INLINE I32 dot(const U8x64* w, const int8_t* x, int32_t minus_sum) {
  const int32_t* fours = reinterpret_cast<const int32_t*>(x);
  I32 s = zero == 0 ? zero_i32() : shift_left<bits - 1>(set1_i32(minus_sum));
  for (int i = 0; i < n; ++i) s.v = _mm512_dpbusd_epi32(s.v, w[i].v, _mm512_set1_epi32(fours[i]));
  return s;
}

INFER_INLINE F32 fold8(F32 a) {  // lane i + lane i + 8, in the lower half
  return {_mm512_castps256_ps512(
      _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)))};
}
INFER_INLINE float reduce_add(F32 a) {
  const __m256 h = _mm512_castps512_ps256(fold8(a).v);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
INFER_INLINE float reduce_max(F32 a) { return _mm512_reduce_max_ps(a.v); }
INFER_INLINE int32_t reduce_add(I32 a) { return _mm512_reduce_add_epi32(a.v); }
INFER_INLINE int32_t reduce_max(I32 a) { return _mm512_reduce_max_epi32(a.v); }

#else  // AVX2

struct F32 {
  __m256 a, b;
};
struct I32 {
  __m256i a, b;
};
struct U8x64 {
  __m256i a, b;
};

INFER_INLINE F32 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INFER_INLINE F32 set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
INFER_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INFER_INLINE F32 load_half(const float* p) { return {_mm256_loadu_ps(p), _mm256_setzero_ps()}; }
INFER_INLINE void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INFER_INLINE F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INFER_INLINE F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INFER_INLINE F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INFER_INLINE F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INFER_INLINE F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INFER_INLINE F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INFER_INLINE F32 fma(F32 x, F32 y, F32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INFER_INLINE F32 abs(F32 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INFER_INLINE F32 to_f32(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INFER_INLINE F32 bits_to_f32(I32 x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
INFER_INLINE I32 to_bits(F32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INFER_INLINE I32 round_i32(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INFER_INLINE F32 load_f16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
INFER_INLINE F32 halves_to_f32(__m256i h) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
INFER_INLINE F32 load_e4m3_over_256(const void* p) {
  const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return halves_to_f32(_mm256_and_si256(_mm256_slli_epi16(w, 7),
                                        _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
INFER_INLINE F32 load_e5m2(const void* p) {
  const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return halves_to_f32(_mm256_slli_epi16(w, 8));
}
INFER_INLINE __m256 lookup8(F32 table, __m256i i) {
  const __m256 low = _mm256_permutevar8x32_ps(table.a, i);
  const __m256 high = _mm256_permutevar8x32_ps(table.b, i);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}
INFER_INLINE F32 lookup(F32 table, I32 i) { return {lookup8(table, i.a), lookup8(table, i.b)}; }
INFER_INLINE I32 load_u16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
INFER_INLINE I32 load_u8(const void* p) {
  const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
INFER_INLINE I32 load_i8(const void* p) {
  const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
INFER_INLINE void store_i8(int8_t* p, I32 x) {
  const __m256i low = _mm256_set1_epi32(255);
  // The packs saturate, which changes no byte, and interleave the 128-bit halves.
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

INFER_INLINE I32 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INFER_INLINE I32 set1_i32(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
INFER_INLINE I32 load_i32(const int32_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INFER_INLINE I32 add(I32 x, I32 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
INFER_INLINE I32 sub(I32 x, I32 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
INFER_INLINE I32 mul(I32 x, I32 y) {
  return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
INFER_INLINE I32 max(I32 x, I32 y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
INFER_INLINE I32 bit_and(I32 x, I32 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
INFER_INLINE I32 bit_or(I32 x, I32 y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
INFER_INLINE I32 bit_xor(I32 x, I32 y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
template <int n>
INFER_INLINE I32 shift_left(I32 x) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
template <int n>
INFER_INLINE I32 shift_right(I32 x) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
template <int n>
INFER_INLINE I32 shift_right_signed(I32 x) {
  return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
template <int n>
INFER_INLINE I32 rotate_left(I32 x) {
  return bit_or(shift_left<n>(x), shift_right<32 - n>(x));
}
INFER_INLINE uint32_t mask_of(__m256 a, __m256 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a)) |
         static_cast<uint32_t>(_mm256_movemask_ps(b)) << 8;
}
INFER_INLINE uint32_t mask_gt(F32 x, F32 y) {
  return mask_of(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
INFER_INLINE uint32_t mask_ge(F32 x, F32 y) {
  return mask_of(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
INFER_INLINE F32 select_gt(F32 x, F32 y, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}

INFER_INLINE U8x64 load_u8x64(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INFER_INLINE U8x64 bit_and(U8x64 x, U8x64 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
INFER_INLINE U8x64 bit_or(U8x64 x, U8x64 y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
INFER_INLINE U8x64 set1_u8(uint8_t x) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(x));
  return {v, v};
}
template <int n>
INFER_INLINE U8x64 shift_right16(U8x64 x) {
  return {_mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n)};
}
template <int n>
INFER_INLINE U8x64 shift_left16(U8x64 x) {
  return {_mm256_slli_epi16(x.a, n), _mm256_slli_epi16(x.b, n)};
}

// VPMADDUBSW adds pairs in saturating 16 bits; as many of its results as cannot overflow are added
// before they are widened.  Bytes up to 255 overflow in a pair, so those are taken as signed
// (w - 128, at most 128 in size), and their sign is moved to x.
template <int bits, int zero, int n>
INFER_INLINE I32 dot(const U8x64* w, const int8_t* x, int32_t minus_sum) {
  static_assert(bits < 8 || zero == 128);
  constexpr int kFit = bits == 8 ? 1 : 32767 / (2 * 127 * ((1 << bits) - 1));
  const int32_t* fours = reinterpret_cast<const int32_t*>(x);
  const __m256i ones = _mm256_set1_epi16(1), half = _mm256_set1_epi8(-128);
  I32 s = zero == 0 || bits == 8 ? zero_i32() : shift_left<bits - 1>(set1_i32(minus_sum));
  for (int i = 0; i < n; i += kFit) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int j = i; j < n && j < i + kFit; ++j) {
      const __m256i v = _mm256_set1_epi32(fours[j]);
      if constexpr (bits == 8) {
        const __m256i sa = _mm256_xor_si256(w[j].a, half), sb = _mm256_xor_si256(w[j].b, half);
        a = _mm256_maddubs_epi16(_mm256_abs_epi8(sa), _mm256_sign_epi8(v, sa));
        b = _mm256_maddubs_epi16(_mm256_abs_epi8(sb), _mm256_sign_epi8(v, sb));
      } else {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w[j].a, v));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w[j].b, v));
      }
    }
    s.a = _mm256_add_epi32(s.a, _mm256_madd_epi16(a, ones));
    s.b = _mm256_add_epi32(s.b, _mm256_madd_epi16(b, ones));
  }
  return s;
}

INFER_INLINE float reduce_add(F32 x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
INFER_INLINE float reduce_max(F32 x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
INFER_INLINE int32_t reduce_add(I32 x) {
  const __m256i h = _mm256_add_epi32(x.a, x.b);
  const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  const __m128i d = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 0xb1)));
}
INFER_INLINE int32_t reduce_max(I32 x) {
  const __m256i h = _mm256_max_epi32(x.a, x.b);
  const __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  const __m128i d = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(d, _mm_shuffle_epi32(d, 0xb1)));
}

#endif

INFER_INLINE F32 load_e4m3(const void* p) { return mul(load_e4m3_over_256(p), set1(256.0f)); }

// bfloat16 [16] as float32.
INFER_INLINE F32 load_bf16(const void* p) { return bits_to_f32(shift_left<16>(load_u16(p))); }

// e^x, within 2 units in the last place; 0 below -86.9, infinity above 88.7, NaN for NaN.
// Cephes' reduction x = n ln 2 + r, |r| <= ln 2 / 2, and its polynomial of degree 5 of e^r.
// Source: Moshier, Cephes, single/expf.c.
INFER_INLINE F32 exp(F32 x) {
  const F32 low = set1(-86.9f), high = set1(88.72f);
  const F32 c = min(high, max(low, x));  // in this order NaN stays NaN
  const I32 n = round_i32(mul(c, set1(1.44269504f)));
  const F32 nf = to_f32(n);
  F32 r = fma(nf, set1(-0.693359375f), c);
  r = fma(nf, set1(2.12194440e-4f), r);
  F32 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  // 2^n in two factors: n reaches 128, which one exponent cannot hold.
  const F32 first = bits_to_f32(shift_left<23>(add(n, set1_i32(126))));
  F32 y = mul(mul(p, first), set1(2.0f));
  y = select_gt(low, x, zero_f32(), y);
  y = select_gt(x, high, set1(__builtin_inff()), y);
  return y;
}

// Natural logarithm of positive normal numbers, within 1 unit in the last place.  Cephes' reduction
// x = 2^n m, m in [sqrt(1/2), sqrt(2)), and its polynomial of degree 8 of m - 1.
// Source: Moshier, Cephes, single/logf.c.
INFER_INLINE F32 log(F32 x) {
  const I32 bits = to_bits(x);
  F32 m = bits_to_f32(bit_or(bit_and(bits, set1_i32(0x007fffff)), set1_i32(0x3f000000)));
  F32 n = to_f32(sub(shift_right<23>(bits), set1_i32(126)));
  const F32 half = set1(0.707106781f);
  n = sub(n, select_gt(half, m, set1(1.0f), zero_f32()));
  m = sub(add(m, select_gt(half, m, m, zero_f32())), set1(1.0f));
  F32 p = set1(7.0376836292e-2f);
  p = fma(p, m, set1(-1.1514610310e-1f));
  p = fma(p, m, set1(1.1676998740e-1f));
  p = fma(p, m, set1(-1.2420140846e-1f));
  p = fma(p, m, set1(1.4249322787e-1f));
  p = fma(p, m, set1(-1.6668057665e-1f));
  p = fma(p, m, set1(2.0000714765e-1f));
  p = fma(p, m, set1(-2.4999993993e-1f));
  p = fma(p, m, set1(3.3333331174e-1f));
  const F32 square = mul(m, m);
  F32 y = mul(mul(p, m), square);
  y = fma(n, set1(-2.12194440e-4f), y);
  y = fma(square, set1(-0.5f), y);
  return fma(n, set1(0.693359375f), add(m, y));
}

// first, first + 1, ...
INFER_INLINE I32 lane_ids(int32_t first) {
  const int32_t ids[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return add(load_i32(ids), set1_i32(first));
}

}  // namespace infer::INFER_ISA
