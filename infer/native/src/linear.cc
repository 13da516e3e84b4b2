// infer_linear: RMS norm, one to three weights, bias, residual.  infer_head: the same with one
// weight, and what sampling needs of the logits.
#include <cmath>

#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxWeights = 3;

// Arguments: x, gain if has_gain, the weights, the biases of has_bias, residual if has_residual.
ffi::Error linear(ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Span<const int64_t> formats, ffi::Span<const int64_t> has_bias,
                  bool has_gain, bool has_residual, float eps) {
  int rows = 0, in = 0;
  INFER_CHECK(check_x(x, rows, in));
  const int count = static_cast<int>(formats.size());
  size_t biases = 0;
  for (int64_t b : has_bias) biases += b != 0;
  if (count < 1 || count > kMaxWeights || has_bias.size() != formats.size() ||
      rets.size() != formats.size() || (has_residual && count != 1) ||
      args.size() != has_gain + count + biases + has_residual) {
    return invalid("%d weights, %d results, %d arguments; linear takes 1 to %d weights and a result"
                   " for each, and a residual with one weight only",
                   count, static_cast<int>(rets.size()), static_cast<int>(args.size()),
                   kMaxWeights);
  }
  size_t next = 0;
  auto argument = [&] { return *args.get<ffi::AnyBuffer>(next++); };
  const float* gain = nullptr;
  if (has_gain) {
    const ffi::AnyBuffer buffer = argument();
    INFER_CHECK(check_f32("norm_gain", buffer, {in}));
    gain = buffer.typed_data<float>();
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
  const Rows prepared = take_rows(scratch, rows, in, needs);
  prepare_rows(x.typed_data<float>(), rows, gain, eps, prepared);
  do_products(products, count, prepared, rows);
  return ffi::Error::Success();
}

// Panels whose logits are summed up together: fixed, so that the sum's order is.
constexpr int kSegment = 32;

// Logits of one segment for a block of rows, and their statistics.  They are gathered first and
// written row by row: a vocabulary of 2^18 puts the same column of all rows in one set of a cache.
void do_segment(const Kernels& k, const Product& product, const Rows& x, int row, int count,
                int segment, int segments, LogitStats* stats) {
  constexpr int kWide = kSegment * kPanel;
  alignas(64) float tile[kRowBlock * kPanel], wide[kRowBlock * kWide];
  const int first = segment * kSegment, column = first * kPanel, out = product.weight.out;
  for (int p = first; p < std::min(product.weight.panels(), first + kSegment); ++p) {
    k.panel(product.weight, x, row, count, p, tile);
    for (int i = 0; i < count; ++i) {
      std::copy_n(tile + kPanel * i, kPanel, wide + kWide * i + kPanel * (p - first));
    }
  }
  const int n = std::min(kWide, out - column);
  for (int i = 0; i < count; ++i) {
    const int64_t at = row + i;
    std::copy_n(wide + kWide * i, n, product.y + at * out + column);
    stats[at * segments + segment] = k.stats(wide + kWide * i, n);
    stats[at * segments + segment].argmax += column;
  }
}

ffi::Error head(ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::RemainingArgs args,
                ffi::Result<ffi::AnyBuffer> logits, ffi::Result<ffi::AnyBuffer> argmax,
                ffi::Result<ffi::AnyBuffer> lse, int64_t format, float eps) {
  int rows = 0, in = 0;
  INFER_CHECK(check_x(x, rows, in));
  const auto dims = logits->dimensions();
  const int64_t out = dims.size() == 2 ? dims[1] : 0;
  Product product;
  INFER_CHECK(check_f32("logits", *logits, {rows, out}));
  INFER_CHECK(check_weight("weight", data, format, out, in, product.weight));
  INFER_CHECK(check_f32("lse", *lse, {rows}));
  if (argmax->element_type() != ffi::S32 || !has_shape(*argmax, {rows})) {
    return invalid("argmax is %s; it must be int32 [%d]", shape_text(*argmax).c_str(), rows);
  }
  const float* gain = nullptr;
  if (args.size() > 1) return invalid("%d arguments too many", static_cast<int>(args.size()) - 1);
  if (args.size() > 0) {
    const auto buffer = *args.get<ffi::AnyBuffer>(0);
    INFER_CHECK(check_f32("norm_gain", buffer, {in}));
    gain = buffer.typed_data<float>();
  }
  if (rows == 0) return ffi::Error::Success();
  product.y = logits->typed_data<float>();
  Needs needs;
  needs.add(product.weight.format);
  const int panels = product.weight.panels(), segments = (panels + kSegment - 1) / kSegment;
  const int64_t parts = static_cast<int64_t>(rows) * segments;
  Scratch scratch;
  if (!scratch.reserve(rows_bytes(rows, in, needs) + Scratch::bytes_of<LogitStats>(parts))) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the activations");
  }
  const Rows prepared = take_rows(scratch, rows, in, needs);
  LogitStats* stats = scratch.take<LogitStats>(parts);  // [rows, segments]
  prepare_rows(x.typed_data<float>(), rows, gain, eps, prepared);

  const Kernels& k = kernels();
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  parallel_for(blocks * segments, [&](int begin, int end) {
    for (int item = begin; item < end; ++item) {
      const int row = item / segments * kRowBlock;
      do_segment(k, product, prepared, row, std::min(kRowBlock, rows - row), item % segments,
                 segments, stats);
    }
  });

  IeeeMode mode;
  for (int i = 0; i < rows; ++i) {
    const LogitStats* row = stats + static_cast<int64_t>(i) * segments;
    LogitStats best = row[0];
    for (int s = 1; s < segments; ++s) {
      if (row[s].max > best.max) best = row[s];
    }
    double sum = 0;
    for (int s = 0; s < segments; ++s) {
      sum += row[s].sum * std::exp(static_cast<double>(row[s].max) - best.max);
    }
    argmax->typed_data<int32_t>()[i] = best.argmax;
    lse->typed_data<float>()[i] = static_cast<float>(best.max + std::log(sum));
  }
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
                  .Attr<float>("eps"));

INFER_HANDLER(infer_head, infer::head,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .RemainingArgs()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<int64_t>("format")
                  .Attr<float>("eps"));
