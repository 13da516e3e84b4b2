// Rotary embedding of a token's queries and keys, and its keys and values into their page.

#include <cmath>
#include <cstring>

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

struct Operands {
  const float *q, *k, *v, *cos, *sin;
  const int32_t *pages, *positions;
  float* q_out;
  void *k_pages, *v_pages;
  int64_t num_heads, num_kv, width, half, num_pages, page_size;
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

template <typename To>
void turn_and_write(const Operands& o, int64_t t) {
  const float *cos = o.cos + t * o.half, *sin = o.sin + t * o.half;
  for (int64_t n = t * o.num_heads; n < (t + 1) * o.num_heads; ++n) {
    turn<Float32>(o.q + n * o.width, cos, sin, o.half, o.width, o.q_out + n * o.width);
  }
  if (o.pages[t] < 0 || o.pages[t] >= o.num_pages) return;
  const int64_t remainder = o.positions[t] % o.page_size;
  const int64_t slot = remainder < 0 ? remainder + o.page_size : remainder;
  for (int64_t n = 0; n < o.num_kv; ++n) {
    const int64_t to = ((o.pages[t] * o.num_kv + n) * o.page_size + slot) * o.width;
    const int64_t from = (t * o.num_kv + n) * o.width;
    turn<To>(o.k + from, cos, sin, o.half, o.width,
             static_cast<typename To::Type*>(o.k_pages) + to);
    auto* const v = static_cast<typename To::Type*>(o.v_pages) + to;
    for (int64_t i = 0; i < o.width; ++i) v[i] = To::from(o.v[from + i]);
  }
}

ffi::Error rope_write(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer cos,
                      ffi::AnyBuffer sin, ffi::AnyBuffer pages, ffi::AnyBuffer positions,
                      ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                      ffi::Result<ffi::AnyBuffer> q_out, ffi::Result<ffi::AnyBuffer> k_out,
                      ffi::Result<ffi::AnyBuffer> v_out) {
  const auto q_dims = q.dimensions(), k_dims = k.dimensions(), pool = k_pages.dimensions();
  const auto type = k_pages.element_type();
  if (q_dims.size() != 3 || k_dims.size() != 3 || k_dims[0] != q_dims[0] ||
      k_dims[2] != q_dims[2] || !has_shape(v, {k_dims[0], k_dims[1], k_dims[2]}) ||
      !has_shape(*q_out, {q_dims[0], q_dims[1], q_dims[2]})) {
    return invalid("q [T, N, H], k and v [T, K, H] and the result do not fit: %s, %s, %s, %s",
                   shape_text(q).c_str(), shape_text(k).c_str(), shape_text(v).c_str(),
                   shape_text(*q_out).c_str());
  }
  const int64_t tokens = q_dims[0], width = q_dims[2];
  for (const ffi::AnyBuffer* x : {&q, &k, &v, &cos, &sin, &*q_out}) {
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
  if (pool.size() != 4 || pool[1] != k_dims[1] || pool[2] < 1 || pool[3] != width) {
    return invalid("the pool of keys must be [P, K, U, H] as k %s; it is %s",
                   shape_text(k).c_str(), shape_text(k_pages).c_str());
  }
  for (const ffi::AnyBuffer* x : {&v_pages, &*k_out, &*v_out}) {
    if (x->element_type() != type || !has_shape(*x, {pool[0], pool[1], pool[2], pool[3]})) {
      return invalid("the pools differ in shape or dtype: %s and %s", shape_text(k_pages).c_str(),
                     shape_text(*x).c_str());
    }
  }
  void (*write)(const Operands&, int64_t) = nullptr;
  if (type == ffi::DataType::F32) write = turn_and_write<Float32>;
  if (type == ffi::DataType::BF16) write = turn_and_write<BFloat16>;
  if (type == ffi::DataType::F16) write = turn_and_write<Float16>;
  if (write == nullptr) return invalid("the pools must be float32, bfloat16 or float16");

  // The pools are written in place, unless XLA had to keep the old ones.
  if (k_out->untyped_data() != k_pages.untyped_data()) {
    std::memcpy(k_out->untyped_data(), k_pages.untyped_data(), k_pages.size_bytes());
  }
  if (v_out->untyped_data() != v_pages.untyped_data()) {
    std::memcpy(v_out->untyped_data(), v_pages.untyped_data(), v_pages.size_bytes());
  }
  const Operands operands = {
      q.reinterpret_data<float>(),        k.reinterpret_data<float>(),
      v.reinterpret_data<float>(),        cos.reinterpret_data<float>(),
      sin.reinterpret_data<float>(),      pages.reinterpret_data<int32_t>(),
      positions.reinterpret_data<int32_t>(), q_out->reinterpret_data<float>(),
      k_out->untyped_data(),              v_out->untyped_data(),
      q_dims[1],                          k_dims[1],
      width,                              turns[1],
      pool[0],                            pool[2]};
  constexpr int kTokensWorthAThread = 16;
  parallel_for(
      static_cast<int>(tokens),
      [&](int begin, int end) {
        for (int t = begin; t < end; ++t) write(operands, t);
      },
      kTokensWorthAThread);
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

}  // namespace infer
