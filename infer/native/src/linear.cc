// infer_linear: RMS norm, one to three weights, bias, residual; activations rounded by groups, or by
// rows, or under a given scale.
#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxWeights = 3;

// Arguments: x, gain if has_gain, the scale [] of rounding 2 (Rounding), the weights, the biases of has_bias, residual if has_residual.
ffi::Error linear(ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Span<const int64_t> formats, ffi::Span<const int64_t> has_bias,
                  bool has_gain, bool has_residual, float eps, int64_t rounding) {
  int rows = 0, in = 0;
  INFER_CHECK(check_x(x, rows, in));
  const int count = static_cast<int>(formats.size());
  size_t biases = 0;
  for (int64_t b : has_bias) biases += b != 0;
  if (count < 1 || count > kMaxWeights || has_bias.size() != formats.size() ||
      rets.size() != formats.size() || (has_residual && count != 1) ||
      rounding < 0 || rounding > 2 ||
      args.size() != has_gain + (rounding == 2) + count + biases + has_residual) {
    return invalid("%d weights, %d results, %d arguments, rounding %d; linear takes 1 to %d weights and a result"
                   " for each, a residual with one weight only, and rounding 0 to 2",
                   count, static_cast<int>(rets.size()), static_cast<int>(args.size()),
                   static_cast<int>(rounding), kMaxWeights);
  }
  size_t next = 0;
  auto argument = [&] { return *args.get<ffi::AnyBuffer>(next++); };
  const float* gain = nullptr;
  if (has_gain) {
    const ffi::AnyBuffer buffer = argument();
    INFER_CHECK(check_f32("norm_gain", buffer, {in}));
    gain = buffer.typed_data<float>();
  }
  float given = 1.0f;
  if (rounding == 2) {
    const ffi::AnyBuffer buffer = argument();
    INFER_CHECK(check_f32("act_scale", buffer, {}));
    given = *buffer.typed_data<float>();
  }
  Product products[kMaxWeights];
  Needs needs;
  for (int i = 0; i < count; ++i) {
    auto y = *rets.get<ffi::AnyBuffer>(i);
    const auto dims = y->dimensions();
    const int64_t out = dims.size() == 2 ? dims[1] : 0;
    INFER_CHECK(check_f32("result", *y, {rows, out}));
    INFER_CHECK(check_weight("weight", argument(), formats[i], out, in, products[i].weight));
    products[i].y = y->typed_data<float>();
    needs.add(products[i].weight.format);
  }
  if (rounding != 0 && needs.floats) {
    return invalid("rounding %d goes with weights of integers", static_cast<int>(rounding));
  }
  for (int i = 0; i < count; ++i) {
    if (!has_bias[i]) continue;
    const ffi::AnyBuffer buffer = argument();
    INFER_CHECK(check_f32("bias", buffer, {products[i].weight.out}));
    products[i].bias = buffer.typed_data<float>();
  }
  if (has_residual) {
    const ffi::AnyBuffer buffer = argument();
    INFER_CHECK(check_f32("residual", buffer, {rows, products[0].weight.out}));
    products[0].residual = buffer.typed_data<float>();
  }
  if (rows == 0) return ffi::Error::Success();
  Scratch scratch;
  if (!scratch.reserve(rows_bytes(rows, in, needs))) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the activations");
  }
  Rows prepared = take_rows(scratch, rows, in, needs);
  prepared.rounding = static_cast<Rounding>(rounding);
  prepared.given = given;
  prepare_rows(x.typed_data<float>(), rows, gain, eps, prepared);
  do_products(products, count, prepared, rows);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace infer

INFER_HANDLER(infer_linear, infer::linear,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<xla::ffi::Span<const int64_t>>("formats")
                  .Attr<xla::ffi::Span<const int64_t>>("has_bias")
                  .Attr<bool>("has_gain")
                  .Attr<bool>("has_residual")
                  .Attr<float>("eps")
                  .Attr<int64_t>("rounding"));
