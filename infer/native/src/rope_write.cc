// Rotary embedding of a token's queries and keys, and its keys and values into their page.

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "threads.h"
#include "xla/ffi/api/ffi.h"

#include "handler.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// float32 to the pools' types, nearest even; without branches, so that loops become vectors.
struct Float32 {
  using Type = float;
  static Type from(float x) { return x; }
};
struct BFloat16 {
  using Type = uint16_t;
  static Type from(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t nan = bits | 0x400000, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<Type>((x != x ? nan : rounded) >> 16);
  }
};
struct Float16 {
  using Type = uint16_t;
  static Type from(float x) {
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
    const uint32_t normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    // Added to a half, a number below 2^-14 is rounded to steps of 2^-24, the least float16.
    const uint32_t small = bits_of(std::fabs(x) + 0.5f) - 0x3f000000;
    uint32_t y = pick(size - 0x38800000, small, normal);
    y = pick(0x477fefff - size, 0x7c00, y);  // from 65520 on
    y = pick(0x7f800000 - size, 0x7e00, y);  // NaN
    return static_cast<Type>(y | (bits >> 16 & 0x8000));
  }
  // yes where the difference is negative, else no
  static uint32_t pick(uint32_t difference, uint32_t yes, uint32_t no) {
    const uint32_t mask = static_cast<uint32_t>(static_cast<int32_t>(difference) >> 31);
    return (yes & mask) | (no & ~mask);
  }
};

// ---- Quantised pools: infer/quant/kv.py -------------------------------------------------------

// Nearest even, |x| below 2^22.
int32_t nearest(float x) {
  return static_cast<int32_t>(bits_of(x + 12582912.0f) - 0x4b400000);
}

// What a head's numbers are divided by their scale for: `put` writes y [width], |y| <= kLargest.
struct Int8 {
  using Type = int8_t;
  static constexpr float kLargest = 127;
  static int64_t elements(int64_t width) { return width; }
  static void put(const float* __restrict y, int64_t width, Type* __restrict to) {
    for (int64_t i = 0; i < width; ++i) to[i] = static_cast<Type>(nearest(y[i]));
  }
};
struct Int4 {  // the first half of a head in the low nibbles
  using Type = uint8_t;
  static constexpr float kLargest = 7;
  static int64_t elements(int64_t width) { return width / 2; }
  static void put(const float* __restrict y, int64_t width, Type* __restrict to) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
      to[i] = static_cast<Type>((nearest(y[i]) + 8) | (nearest(y[half + i]) + 8) << 4);
    }
  }
};
struct E4M3 {
  using Type = uint8_t;
  static constexpr float kLargest = 448;
  static int64_t elements(int64_t width) { return width; }
  static Type from(float x) {
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
    const uint32_t normal = (size + 0x7ffff + (size >> 20 & 1) - 0x3c000000) >> 20;
    // Added to 2^14, a number below 2^-6 is rounded to steps of 2^-9, the least E4M3.
    const uint32_t small = bits_of(std::fabs(x) + 16384.0f) - 0x46800000;
    return static_cast<Type>(Float16::pick(size - 0x3c800000, small, normal) | (bits >> 24 & 0x80));
  }
  static void put(const float* __restrict y, int64_t width, Type* __restrict to) {
    for (int64_t i = 0; i < width; ++i) to[i] = from(y[i]);
  }
};

// Writes one head's numbers, and returns their scale; y [width] is scratch, and may be x.
template <typename To>
float quantize(const float* x, int64_t width, float* y, typename To::Type* to) {
  uint32_t largest = 0;  // bits order as numbers do, infinity and NaN after them
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t size = bits_of(x[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  float scale;
  std::memcpy(&scale, &largest, sizeof scale);
  scale *= 1 / To::kLargest;
  constexpr float kTiny = 1.17549435e-38f;  // the smallest normal number; NaN stays
  if (scale < kTiny) scale = 0;
  if (scale == 0) {
    for (int64_t i = 0; i < width; ++i) y[i] = 0;
  } else {
    for (int64_t i = 0; i < width; ++i) {
      float z = x[i] / scale;
      z = z > To::kLargest ? To::kLargest : z;
      z = z < -To::kLargest ? -To::kLargest : z;
      y[i] = z != z ? 0 : z;
    }
  }
  To::put(y, width, to);
  return scale;
}

struct Operands {
  const float *q, *k, *v, *cos, *sin;
  const int32_t *pages, *positions;
  float* q_out;
  void *k_pages, *v_pages;
  float *k_scales, *v_scales;  // null but for quantised pools
  int64_t num_heads, num_kv, width, half, num_pages, page_size;

  // The row of token t and head 0 in the pools, or -1 where it has no page; heads are page_size
  // apart.
  int64_t row(int64_t t) const {
    if (pages[t] < 0 || pages[t] >= num_pages) return -1;
    const int64_t remainder = positions[t] % page_size;
    return pages[t] * num_kv * page_size + (remainder < 0 ? remainder + page_size : remainder);
  }
};

// y [width] := x with dimensions i and i + half turned by the angle of cos[i] and sin[i].
template <typename To>
void turn(const float* __restrict x, const float* cos, const float* sin, int64_t half,
          int64_t width, typename To::Type* __restrict y) {
  for (int64_t i = 0; i < half; ++i) y[i] = To::from(x[i] * cos[i] - x[half + i] * sin[i]);
  for (int64_t i = 0; i < half; ++i) {
    y[half + i] = To::from(x[half + i] * cos[i] + x[i] * sin[i]);
  }
  for (int64_t i = 2 * half; i < width; ++i) y[i] = To::from(x[i]);
}

void turn_queries(const Operands& o, int64_t t) {
  const float *cos = o.cos + t * o.half, *sin = o.sin + t * o.half;
  for (int64_t n = t * o.num_heads; n < (t + 1) * o.num_heads; ++n) {
    turn<Float32>(o.q + n * o.width, cos, sin, o.half, o.width, o.q_out + n * o.width);
  }
}

// Token t; `scratch` has o.width floats.
using Write = void(const Operands& o, int64_t t, float* scratch);

template <typename To>
void write_floats(const Operands& o, int64_t t, float*) {
  turn_queries(o, t);
  const int64_t row = o.row(t);
  if (row < 0) return;
  for (int64_t n = 0; n < o.num_kv; ++n) {
    const int64_t to = (row + n * o.page_size) * o.width;
    const int64_t from = (t * o.num_kv + n) * o.width;
    turn<To>(o.k + from, o.cos + t * o.half, o.sin + t * o.half, o.half, o.width,
             static_cast<typename To::Type*>(o.k_pages) + to);
    auto* const v = static_cast<typename To::Type*>(o.v_pages) + to;
    for (int64_t i = 0; i < o.width; ++i) v[i] = To::from(o.v[from + i]);
  }
}

template <typename To>
void write_quantized(const Operands& o, int64_t t, float* scratch) {
  turn_queries(o, t);
  const int64_t row = o.row(t);
  if (row < 0) return;
  for (int64_t n = 0; n < o.num_kv; ++n) {
    const int64_t at = row + n * o.page_size, to = at * To::elements(o.width);
    const int64_t from = (t * o.num_kv + n) * o.width;
    turn<Float32>(o.k + from, o.cos + t * o.half, o.sin + t * o.half, o.half, o.width, scratch);
    o.k_scales[at] = quantize<To>(scratch, o.width, scratch,
                                  static_cast<typename To::Type*>(o.k_pages) + to);
    o.v_scales[at] = quantize<To>(o.v + from, o.width, scratch,
                                  static_cast<typename To::Type*>(o.v_pages) + to);
  }
}

// What both operations check of all but the pools, and then set in `o`.
ffi::Error read_operands(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                         const ffi::AnyBuffer& cos, const ffi::AnyBuffer& sin,
                         const ffi::AnyBuffer& pages, const ffi::AnyBuffer& positions,
                         const ffi::AnyBuffer& q_out, Operands& o) {
  const auto q_dims = q.dimensions(), k_dims = k.dimensions();
  if (q_dims.size() != 3 || k_dims.size() != 3 || k_dims[0] != q_dims[0] ||
      k_dims[2] != q_dims[2] || !has_shape(v, {k_dims[0], k_dims[1], k_dims[2]}) ||
      !has_shape(q_out, {q_dims[0], q_dims[1], q_dims[2]})) {
    return invalid("q [T, N, H], k and v [T, K, H] and the result do not fit: %s, %s, %s, %s",
                   shape_text(q).c_str(), shape_text(k).c_str(), shape_text(v).c_str(),
                   shape_text(q_out).c_str());
  }
  const int64_t tokens = q_dims[0], width = q_dims[2];
  for (const ffi::AnyBuffer* x : {&q, &k, &v, &cos, &sin, &q_out}) {
    if (x->element_type() != ffi::DataType::F32) {
      return invalid("q, k, v, cos, sin and the turned q must be float32");
    }
  }
  const auto turns = cos.dimensions();
  if (turns.size() != 2 || turns[0] != tokens || 2 * turns[1] > width ||
      !has_shape(sin, {turns[0], turns[1]})) {
    return invalid("cos and sin must be [T, R] with 2R at most H, for q %s; they are %s and %s",
                   shape_text(q).c_str(), shape_text(cos).c_str(), shape_text(sin).c_str());
  }
  for (const ffi::AnyBuffer* x : {&pages, &positions}) {
    if (x->element_type() != ffi::DataType::S32 || !has_shape(*x, {tokens})) {
      return invalid("pages and positions must be int32 [%lld]; one is %s",
                     static_cast<long long>(tokens), shape_text(*x).c_str());
    }
  }
  o.q = q.reinterpret_data<float>();
  o.k = k.reinterpret_data<float>();
  o.v = v.reinterpret_data<float>();
  o.cos = cos.reinterpret_data<float>();
  o.sin = sin.reinterpret_data<float>();
  o.pages = pages.reinterpret_data<int32_t>();
  o.positions = positions.reinterpret_data<int32_t>();
  o.q_out = const_cast<float*>(q_out.reinterpret_data<float>());
  o.num_heads = q_dims[1];
  o.num_kv = k_dims[1];
  o.width = width;
  o.half = turns[1];
  return ffi::Error::Success();
}

// Checks the pools of keys and values, `elements` wide, and sets in `o` where they are written.
ffi::Error read_pools(const ffi::AnyBuffer& k, const ffi::AnyBuffer& k_pages,
                      const ffi::AnyBuffer& v_pages, ffi::AnyBuffer& k_out, ffi::AnyBuffer& v_out,
                      int64_t elements, Operands& o) {
  const auto pool = k_pages.dimensions();
  if (pool.size() != 4 || pool[1] != o.num_kv || pool[2] < 1 || pool[3] != elements) {
    return invalid("the pool of keys must be [P, K, U, H] as k %s; it is %s",
                   shape_text(k).c_str(), shape_text(k_pages).c_str());
  }
  for (const ffi::AnyBuffer* x : {&v_pages, &std::as_const(k_out), &std::as_const(v_out)}) {
    if (x->element_type() != k_pages.element_type() ||
        !has_shape(*x, {pool[0], pool[1], pool[2], pool[3]})) {
      return invalid("the pools differ in shape or dtype: %s and %s", shape_text(k_pages).c_str(),
                     shape_text(*x).c_str());
    }
  }
  o.k_pages = k_out.untyped_data();
  o.v_pages = v_out.untyped_data();
  o.num_pages = pool[0];
  o.page_size = pool[2];
  return ffi::Error::Success();
}

// Pools are written in place, unless XLA had to keep the old ones.
void keep_others(const ffi::AnyBuffer& pool, ffi::AnyBuffer& out) {
  if (out.untyped_data() != pool.untyped_data()) {
    std::memcpy(out.untyped_data(), pool.untyped_data(), pool.size_bytes());
  }
}

void write_all(const Operands& o, int64_t tokens, Write* write) {
  constexpr int kTokensWorthAThread = 16;
  parallel_for(
      static_cast<int>(tokens),
      [&](int begin, int end) {
        std::vector<float> scratch(o.k_scales == nullptr ? 0 : o.width);
        for (int t = begin; t < end; ++t) write(o, t, scratch.data());
      },
      kTokensWorthAThread);
}

ffi::Error rope_write(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer cos,
                      ffi::AnyBuffer sin, ffi::AnyBuffer pages, ffi::AnyBuffer positions,
                      ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                      ffi::Result<ffi::AnyBuffer> q_out, ffi::Result<ffi::AnyBuffer> k_out,
                      ffi::Result<ffi::AnyBuffer> v_out) {
  Operands o = {};
  ffi::Error error = read_operands(q, k, v, cos, sin, pages, positions, *q_out, o);
  if (error.failure()) return error;
  error = read_pools(k, k_pages, v_pages, *k_out, *v_out, o.width, o);
  if (error.failure()) return error;
  Write* write = nullptr;
  switch (k_pages.element_type()) {
    case ffi::DataType::F32: write = write_floats<Float32>; break;
    case ffi::DataType::BF16: write = write_floats<BFloat16>; break;
    case ffi::DataType::F16: write = write_floats<Float16>; break;
    default: return invalid("the pools must be float32, bfloat16 or float16");
  }
  keep_others(k_pages, *k_out);
  keep_others(v_pages, *v_out);
  write_all(o, q.dimensions()[0], write);
  return ffi::Error::Success();
}

ffi::Error rope_write_quantized(
    ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
    ffi::AnyBuffer pages, ffi::AnyBuffer positions, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
    ffi::AnyBuffer k_scales, ffi::AnyBuffer v_scales, ffi::Result<ffi::AnyBuffer> q_out,
    ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out,
    ffi::Result<ffi::AnyBuffer> k_scales_out, ffi::Result<ffi::AnyBuffer> v_scales_out) {
  Operands o = {};
  ffi::Error error = read_operands(q, k, v, cos, sin, pages, positions, *q_out, o);
  if (error.failure()) return error;
  Write* write = nullptr;
  int64_t elements = o.width;
  switch (k_pages.element_type()) {
    case ffi::DataType::S8: write = write_quantized<Int8>; break;
    case ffi::DataType::F8E4M3FN: write = write_quantized<E4M3>; break;
    case ffi::DataType::U8:
      if (o.width % 2 != 0) return invalid("int4 pools need heads of an even width");
      write = write_quantized<Int4>;
      elements = o.width / 2;
      break;
    default: return invalid("quantised pools must be int8, float8_e4m3fn, or uint8 for int4");
  }
  error = read_pools(k, k_pages, v_pages, *k_out, *v_out, elements, o);
  if (error.failure()) return error;
  for (const ffi::AnyBuffer* x : {&std::as_const(k_scales), &std::as_const(v_scales),
                                  &std::as_const(*k_scales_out), &std::as_const(*v_scales_out)}) {
    if (x->element_type() != ffi::DataType::F32 ||
        !has_shape(*x, {o.num_pages, o.num_kv, o.page_size})) {
      return invalid("the scales must be float32 [P, K, U] as the pools %s; they are %s",
                     shape_text(k_pages).c_str(), shape_text(*x).c_str());
    }
  }
  o.k_scales = k_scales_out->reinterpret_data<float>();
  o.v_scales = v_scales_out->reinterpret_data<float>();
  keep_others(k_pages, *k_out);
  keep_others(v_pages, *v_out);
  keep_others(k_scales, *k_scales_out);
  keep_others(v_scales, *v_scales_out);
  write_all(o, q.dimensions()[0], write);
  return ffi::Error::Success();
}

}  // namespace

INFER_HANDLER(infer_rope_write, rope_write,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()   // q
                  .Arg<xla::ffi::AnyBuffer>()   // k
                  .Arg<xla::ffi::AnyBuffer>()   // v
                  .Arg<xla::ffi::AnyBuffer>()   // cos
                  .Arg<xla::ffi::AnyBuffer>()   // sin
                  .Arg<xla::ffi::AnyBuffer>()   // pages
                  .Arg<xla::ffi::AnyBuffer>()   // positions
                  .Arg<xla::ffi::AnyBuffer>()   // key pool
                  .Arg<xla::ffi::AnyBuffer>()   // value pool
                  .Ret<xla::ffi::AnyBuffer>()   // q, turned
                  .Ret<xla::ffi::AnyBuffer>()   // key pool, written
                  .Ret<xla::ffi::AnyBuffer>());  // value pool, written

INFER_HANDLER(infer_rope_write_quantized, rope_write_quantized,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()   // q
                  .Arg<xla::ffi::AnyBuffer>()   // k
                  .Arg<xla::ffi::AnyBuffer>()   // v
                  .Arg<xla::ffi::AnyBuffer>()   // cos
                  .Arg<xla::ffi::AnyBuffer>()   // sin
                  .Arg<xla::ffi::AnyBuffer>()   // pages
                  .Arg<xla::ffi::AnyBuffer>()   // positions
                  .Arg<xla::ffi::AnyBuffer>()   // data of keys
                  .Arg<xla::ffi::AnyBuffer>()   // data of values
                  .Arg<xla::ffi::AnyBuffer>()   // scales of keys
                  .Arg<xla::ffi::AnyBuffer>()   // scales of values
                  .Ret<xla::ffi::AnyBuffer>()   // q, turned
                  .Ret<xla::ffi::AnyBuffer>()   // data of keys, written
                  .Ret<xla::ffi::AnyBuffer>()   // data of values, written
                  .Ret<xla::ffi::AnyBuffer>()   // scales of keys, written
                  .Ret<xla::ffi::AnyBuffer>());  // scales of values, written

}  // namespace infer
