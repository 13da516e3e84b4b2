// Sixteen vectors of sixteen lanes, rows and columns exchanged.  For the files *_avx2.cc and
// *_avx512.cc only, like vec.h.
#pragma once

#include "vec.h"

namespace infer::INFER_ISA {

#if INFER_AVX512

INFER_INLINE void transpose16(F32* x) {
  __m512 t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  // Of four rows, columns c, 4 + c, 8 + c and 12 + c in the four quarters of u[4 * row / 4 + c].
  __m512 u[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 16
    for (int c = 0; c < 2; ++c) {
      const __m512d low = _mm512_castps_pd(t[i + c]), high = _mm512_castps_pd(t[i + c + 2]);
      u[i + 2 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      u[i + 2 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);       // rows 0-7, columns c, 8 + c
    const __m512 b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);       // 4 + c, 12 + c
    const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);  // rows 8-15
    const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    x[c].v = _mm512_shuffle_f32x4(a, d, 0x88);
    x[8 + c].v = _mm512_shuffle_f32x4(a, d, 0xdd);
    x[4 + c].v = _mm512_shuffle_f32x4(b, e, 0x88);
    x[12 + c].v = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}

#else

INFER_INLINE void transpose8(__m256* x) {
  __m256 t[8], u[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 8
    for (int c = 0; c < 2; ++c) {
      const __m256d low = _mm256_castps_pd(t[i + c]), high = _mm256_castps_pd(t[i + c + 2]);
      u[i + 2 * c] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
      u[i + 2 * c + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < 4; ++c) {
    x[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    x[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}

INFER_INLINE void transpose16(F32* x) {
  __m256 quarter[8];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {  // of the columns, that is of the rows of the result
    __m256 top[8];
    for (int i = 0; i < 8; ++i) top[i] = half == 0 ? x[i].a : x[i].b;
    for (int i = 0; i < 8; ++i) quarter[i] = half == 0 ? x[8 + i].a : x[8 + i].b;
    transpose8(top);
    transpose8(quarter);
    if (half == 0) {
      // The other halves still wait in .b: park this result where they have been read.
      for (int i = 0; i < 8; ++i) {
        x[i].a = top[i];
        x[8 + i].a = quarter[i];
      }
    } else {
      for (int i = 0; i < 8; ++i) {
        const __m256 a = x[i].a, b = x[8 + i].a;
        x[i] = {a, b};
        x[8 + i] = {top[i], quarter[i]};
      }
    }
  }
}

#endif

}  // namespace infer::INFER_ISA
