// What the operations on weights share: their checked arguments, and room for their activations.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "xla/ffi/api/ffi.h"

#include "gemm.h"
#include "handler.h"
#include "isa.h"
#include "threads.h"

namespace infer {

// Memory of the calling thread that grows and is kept: XLA calls from few threads, and fresh memory
// would be faulted in at each call.  What is above kKeep goes back after the call.
class Scratch {
 public:
  Scratch() : used_(0) {}
  ~Scratch();
  // 64-byte aligned room; nullptr if there is no memory.  All of one call's room is reserved first.
  bool reserve(size_t bytes);
  template <typename T>
  T* take(size_t count) {
    T* p = reinterpret_cast<T*>(base() + used_);
    used_ += bytes_of<T>(count);
    return p;
  }
  template <typename T>
  static size_t bytes_of(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* base();
  size_t used_;
};

// Which forms of the activations some weights read.
struct Needs {
  bool floats = false, quants = false;
  void add(Format f) { (is_float(f) ? floats : quants) = true; }
};

size_t rows_bytes(int64_t rows, int64_t in, Needs needs);
Rows take_rows(Scratch& scratch, int64_t rows, int64_t in, Needs needs);

// The room of rows [first, first + count) as a block of its own, count <= kRowBlock.
Rows rows_of(const Rows& all, int first, int count);

// Prepare all rows of x [rows, in] (Kernels::prepare) on all threads.
void prepare_rows(const float* x, int rows, const float* gain, float eps, const Rows& to);

// Items that make a piece worth a thread, where one item is `macs` products.
inline int min_piece(int64_t macs) {
  constexpr int64_t kWorth = 1 << 17;  // about 2 microseconds
  return static_cast<int>(std::max<int64_t>(1, kWorth / std::max<int64_t>(1, macs)));
}

// y = x w^T (+ bias) (+ residual).
struct Product {
  Weight weight;
  const float* bias = nullptr;
  const float* residual = nullptr;
  float* y = nullptr;
};

// Rows [row, row + count) of two panels of outputs, or of the last one.  `row` begins a block.
void do_pair(const Kernels& k, const Product& p, const Rows& x, int row, int count, int pair);

// 32 hidden activations of a block of rows: gate, up, act, and their rounding for `down`.
void do_hidden(const Kernels& k, const Weight& gate, const Weight& up, Activation act,
               const Rows& x, int row, int count, int group, const Rows& hidden);

// All of some products of the same rows, on all threads.
void do_products(const Product* products, int count, const Rows& x, int rows);

// Check x: f32 [rows, in], in a multiple of 32; fills rows and in.
xla::ffi::Error check_x(const xla::ffi::AnyBuffer& x, int& rows, int& in);

// Check a packed weight of `out` rows and width `in`: u8 [panels, panel_bytes], or as many as
// `experts` one after the other, u8 [experts, panels, panel_bytes]; fills in the first.
xla::ffi::Error check_weight(const char* name, const xla::ffi::AnyBuffer& data, int64_t format,
                             int64_t out, int64_t in, Weight& weight, int64_t experts = 0);

// Check an f32 buffer of this shape.
xla::ffi::Error check_f32(const char* name, const xla::ffi::AnyBuffer& buffer,
                          std::initializer_list<int64_t> shape);

}  // namespace infer

// Return the error of a check from the surrounding handler.
#define INFER_CHECK(check)                               \
  do {                                                   \
    if (xla::ffi::Error e = (check); e.failure()) return e; \
  } while (false)
