// infer_gated_mlp: y = down(act(gate(n)) * up(n)) (+ x), n = the RMS norm of x or x itself.
#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

ffi::Error gated_mlp(ffi::AnyBuffer x, ffi::AnyBuffer gate_data, ffi::AnyBuffer up_data,
                     ffi::AnyBuffer down_data, ffi::RemainingArgs args,
                     ffi::Result<ffi::AnyBuffer> result, ffi::Span<const int64_t> formats,
                     int64_t width, int64_t activation, bool residual, float eps) {
  int rows = 0, in = 0;
  INFER_CHECK(check_x(x, rows, in));
  if (formats.size() != 3 || width < kGroup || width % kGroup != 0 || activation < 0 ||
      activation > 1) {
    return invalid("%d formats, hidden width %lld, activation %lld; gated_mlp takes 3 formats, a"
                   " width that is a multiple of 32, and activation 0 or 1",
                   static_cast<int>(formats.size()), static_cast<long long>(width),
                   static_cast<long long>(activation));
  }
  Weight gate, up, down;
  const auto dims = result->dimensions();
  const int64_t out = dims.size() == 2 ? dims[1] : 0;
  INFER_CHECK(check_f32("result", *result, {rows, residual ? in : out}));
  INFER_CHECK(check_weight("gate", gate_data, formats[0], width, in, gate));
  INFER_CHECK(check_weight("up", up_data, formats[1], width, in, up));
  INFER_CHECK(check_weight("down", down_data, formats[2], out, width, down));
  const float* gain = nullptr;
  if (args.size() > 1) return invalid("%d arguments too many", static_cast<int>(args.size()) - 1);
  if (args.size() > 0) {
    const auto buffer = *args.get<ffi::AnyBuffer>(0);
    INFER_CHECK(check_f32("norm_gain", buffer, {in}));
    gain = buffer.typed_data<float>();
  }
  if (rows == 0) return ffi::Error::Success();

  Needs first, second;
  first.add(gate.format);
  first.add(up.format);
  second.add(down.format);
  Scratch scratch;
  if (!scratch.reserve(rows_bytes(rows, in, first) + rows_bytes(rows, width, second))) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the activations");
  }
  const Rows prepared = take_rows(scratch, rows, in, first);
  const Rows hidden = take_rows(scratch, rows, width, second);
  const float* xs = x.typed_data<float>();
  const Activation act = static_cast<Activation>(activation);
  prepare_rows(xs, rows, gain, eps, prepared);

  const Kernels& k = kernels();
  const int blocks = (rows + kRowBlock - 1) / kRowBlock, groups = static_cast<int>(width) / kGroup;
  const int64_t block_rows = std::min(rows, kRowBlock);
  parallel_for(
      blocks * groups,
      [&](int begin, int end) {
        const TilesFor tiles(k, rows);
        for (int item = begin; item < end; ++item) {
          const int row = item / groups * kRowBlock;
          do_hidden(k, gate, up, act, prepared, row, std::min(kRowBlock, rows - row),
                    item % groups, hidden);
        }
      },
      min_piece(2 * block_rows * in * kGroup));

  const Product product{down, nullptr, residual ? xs : nullptr, result->typed_data<float>()};
  do_products(&product, 1, hidden, rows);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace infer

INFER_HANDLER(infer_gated_mlp, infer::gated_mlp,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .RemainingArgs()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<xla::ffi::Span<const int64_t>>("formats")
                  .Attr<int64_t>("width")
                  .Attr<int64_t>("activation")
                  .Attr<bool>("residual")
                  .Attr<float>("eps"));
