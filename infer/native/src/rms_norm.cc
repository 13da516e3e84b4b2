// infer_rms_norm: x / sqrt(mean(x^2) + eps) * gain of each row, in an order that is the same for
// every row, alone or in any batch.

#include <cmath>

#include "xla/ffi/api/ffi.h"

#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

// Partial sums, which compilers keep in vectors without adding in another order.
constexpr int kLanes = 16;

float sum_of_squares(const float* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * x[i + j];
  }
  for (int j = 0; i + j < n; ++j) lanes[j] += x[i + j] * x[i + j];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

void norm_row(const float* __restrict x, const float* __restrict gain, float eps, int64_t n,
              float* __restrict y) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const float inverse = 1.0f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * inverse * gain[i];
}

ffi::Error rms_norm(ffi::AnyBuffer x, ffi::AnyBuffer gain, ffi::Result<ffi::AnyBuffer> y,
                    float eps) {
  const auto dims = x.dimensions();
  if (x.element_type() != ffi::F32 || dims.size() != 2 || dims[1] < 1 || dims[0] > 1 << 30) {
    return invalid("x is %s; it must be float32 [rows, width], with a width of at least 1",
                   shape_text(x).c_str());
  }
  const int64_t rows = dims[0], width = dims[1];
  INFER_CHECK(check_f32("gain", gain, {width}));
  INFER_CHECK(check_f32("the result", *y, {rows, width}));
  const float* from = x.typed_data<float>();
  const float* factor = gain.typed_data<float>();
  float* to = y->typed_data<float>();
  parallel_for(
      static_cast<int>(rows),
      [&](int begin, int end) {
        const IeeeMode mode;
        for (int64_t row = begin; row < end; ++row) {
          norm_row(from + row * width, factor, eps, width, to + row * width);
        }
      },
      min_piece(4 * width));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace infer

INFER_HANDLER(infer_rms_norm, infer::rms_norm,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<float>("eps"));
