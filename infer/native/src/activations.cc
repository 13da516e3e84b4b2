#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kKeep = size_t{64} << 20;

struct Memory {
  char* data = nullptr;
  size_t size = 0;
  ~Memory() { std::free(data); }
};

Memory& memory() {
  static thread_local Memory of_thread;
  return of_thread;
}

}  // namespace

bool Scratch::reserve(size_t bytes) {
  Memory& m = memory();
  if (bytes <= m.size) return true;
  std::free(m.data);
  bytes = (bytes + 4095) / 4096 * 4096;
  m.data = static_cast<char*>(std::aligned_alloc(64, bytes));
  m.size = m.data == nullptr ? 0 : bytes;
  return m.data != nullptr;
}

char* Scratch::base() { return memory().data; }

Scratch::~Scratch() {
  Memory& m = memory();
  if (m.size <= kKeep) return;
  std::free(m.data);
  m = Memory();
}

namespace {
int64_t stride_of(int64_t rows) { return std::min<int64_t>(rows, kRowBlock); }
int64_t padded(int64_t rows) {
  const int64_t stride = std::max<int64_t>(1, stride_of(rows));
  return (rows + stride - 1) / stride * stride;
}
}  // namespace

size_t rows_bytes(int64_t rows, int64_t in, Needs needs) {
  size_t bytes = 0;
  if (needs.floats) bytes += Scratch::bytes_of<float>(rows * in);
  if (needs.quants) {
    const int64_t groups = padded(rows) * in / kGroup;
    bytes += Scratch::bytes_of<int8_t>(groups * kGroup) + 3 * Scratch::bytes_of<float>(groups) +
             Scratch::bytes_of<int32_t>(2 * groups);
  }
  return bytes;
}

Rows take_rows(Scratch& scratch, int64_t rows, int64_t in, Needs needs) {
  Rows to{};
  to.in = static_cast<int>(in);
  to.stride = static_cast<int>(stride_of(rows));
  if (needs.floats) to.x = scratch.take<float>(rows * in);
  if (needs.quants) {
    const int64_t groups = padded(rows) * in / kGroup;
    to.q = scratch.take<int8_t>(groups * kGroup);
    to.d = scratch.take<float>(groups);
    to.d_sum = scratch.take<float>(groups);
    to.minus_sum = scratch.take<int32_t>(groups);
    to.minus_half = scratch.take<int32_t>(2 * groups);
  }
  return to;
}

Rows rows_of(const Rows& all, int first, int count) {
  const int64_t groups = static_cast<int64_t>(first) * (all.in / kGroup);
  Rows to = all;
  to.stride = count;
  if (all.x != nullptr) to.x += groups * kGroup;
  if (all.q != nullptr) {
    to.q += groups * kGroup;
    to.d += groups;
    to.d_sum += groups;
    to.minus_sum += groups;
    to.minus_half += 2 * groups;
  }
  return to;
}

void prepare_rows(const float* x, int rows, const float* gain, float eps, const Rows& to) {
  const Kernels& k = kernels();
  // A norm and a rounding cost about as much as 64 products.
  parallel_for(
      rows,
      [&](int begin, int end) {
        for (int row = begin; row < end; ++row) {
          k.prepare(x + static_cast<int64_t>(row) * to.in, gain, eps, to, row);
        }
      },
      min_piece(64 * to.in));
}

void do_hidden(const Kernels& k, const Weight& gate, const Weight& up, Activation act,
               const Rows& x, int row, int count, int group, const Rows& hidden) {
  static_assert(kGroup == 2 * kPanel);
  alignas(64) float tiles[2][kRowBlock * kPanel], gates[kRowBlock * kGroup],
      ups[kRowBlock * kGroup];
  for (bool is_gate : {true, false}) {
    const Weight& w = is_gate ? gate : up;
    k.panels(w, w.panel(2 * group), w.panel(2 * group + 1), x, row, count, tiles[0],
             tiles[1]);
    for (int i = 0; i < 2 * count; ++i) {
      std::copy_n(tiles[i % 2] + kPanel * (i / 2), kPanel, (is_gate ? gates : ups) + kPanel * i);
    }
  }
  k.gate(gates, ups, act, kGroup * count);
  for (int i = 0; i < count; ++i) k.prepare_group(gates + kGroup * i, hidden, row + i, group);
}

void do_pair(const Kernels& k, const Product& p, const Rows& x, int row, int count, int pair) {
  alignas(64) float tiles[2][kRowBlock * kPanel];
  const Weight& w = p.weight;
  const bool two = 2 * pair + 1 < w.panels();
  k.panels(w, w.panel(2 * pair), two ? w.panel(2 * pair + 1) : nullptr, x, row, count,
           tiles[0], tiles[1]);
  for (int j = 0; j < (two ? 2 : 1); ++j) {
    const int column = (2 * pair + j) * kPanel, n = std::min(kPanel, w.out - column);
    for (int i = 0; i < count; ++i) {
      const int64_t at = static_cast<int64_t>(row + i) * w.out + column;
      k.finish(tiles[j] + kPanel * i, p.bias ? p.bias + column : nullptr,
               p.residual ? p.residual + at : nullptr, n, p.y + at);
    }
  }
}

// All panels of all products for a block of rows, then for the next: the weights stay in the second
// cache while the rows pass, or, with few rows, stream through once.
void do_products(const Product* products, int count, const Rows& x, int rows) {
  const Kernels& k = kernels();
  int pairs = 0;
  for (int i = 0; i < count; ++i) pairs += products[i].weight.pairs();
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  parallel_for(
      blocks * pairs,
      [&](int begin, int end) {
        const TilesFor tiles(k, rows);
        for (int item = begin; item < end; ++item) {
          const int row = item / pairs * kRowBlock;
          const Product* p = products;
          int pair = item % pairs;
          while (pair >= p->weight.pairs()) pair -= p++->weight.pairs();
          do_pair(k, *p, x, row, std::min(kRowBlock, rows - row), pair);
        }
      },
      min_piece(static_cast<int64_t>(x.in) * 2 * kPanel * std::min(rows, kRowBlock)));
}

ffi::Error check_x(const ffi::AnyBuffer& x, int& rows, int& in) {
  if (best_isa() == Isa::kNone) return ffi::Error(ffi::ErrorCode::kUnimplemented, isa_error());
  const auto dims = x.dimensions();
  if (x.element_type() != ffi::F32 || dims.size() != 2 || dims[1] < kGroup ||
      dims[1] % kGroup != 0 || dims[0] > 1 << 24 || dims[1] > 1 << 24) {
    return invalid("x is %s; it must be float32 [rows, in] with in a multiple of 32",
                   shape_text(x).c_str());
  }
  rows = static_cast<int>(dims[0]);
  in = static_cast<int>(dims[1]);
  return ffi::Error::Success();
}

ffi::Error check_weight(const char* name, const ffi::AnyBuffer& data, int64_t format, int64_t out,
                        int64_t in, Weight& weight, int64_t experts) {
  const Spec spec(format);
  const Format f = spec.format;
  if (format < 0 || (format & 255) >= kFormats || (!is_planar(f) && format >= kFormats)) {
    return invalid("%s has the format %lld; formats are 0 to %d", name,
                   static_cast<long long>(format), kFormats - 1);
  }
  if (is_planar(f) && (spec.span > in || !span_fits(f, spec.span))) {
    return invalid("%s has a scale for each %lld inputs of %lld; it must be %s", name,
                   static_cast<long long>(spec.span), static_cast<long long>(in),
                   is_float(f) ? "a multiple of 2" : "16, or a multiple of 32");
  }
  if (in % block_width(f) != 0 || out < 1 || out > 1 << 28) {
    return invalid("%s is [%lld, %lld], and its format has blocks of %d along the input", name,
                   static_cast<long long>(out), static_cast<long long>(in), block_width(f));
  }
  const int64_t panels = (out + kPanel - 1) / kPanel;
  const int64_t bytes = panel_bytes(spec, in);
  const bool fits = experts > 0 ? has_shape(data, {experts, panels, bytes})
                                : has_shape(data, {panels, bytes});
  if (data.element_type() != ffi::U8 || !fits) {
    const std::string lead = experts > 0 ? std::to_string(experts) + ", " : "";
    return invalid("%s has packed data %s; its weight [%s%lld, %lld] takes uint8 [%s%lld, %lld]",
                   name, shape_text(data).c_str(), lead.c_str(), static_cast<long long>(out),
                   static_cast<long long>(in), lead.c_str(), static_cast<long long>(panels),
                   static_cast<long long>(bytes));
  }
  weight = {f,
            static_cast<const uint8_t*>(data.untyped_data()),
            static_cast<int>(out),
            static_cast<int>(in),
            bytes,
            static_cast<int>(spec.span),
            spec.half};
  return ffi::Error::Success();
}

ffi::Error check_f32(const char* name, const ffi::AnyBuffer& buffer,
                     std::initializer_list<int64_t> shape) {
  if (buffer.element_type() == ffi::F32 && has_shape(buffer, shape)) return ffi::Error::Success();
  std::string wanted;
  for (int64_t d : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(d);
  return invalid("%s is %s; it must be float32 [%s]", name, shape_text(buffer).c_str(),
                 wanted.c_str());
}

const Kernels& kernels() {
  if (best_isa() == Isa::kAmx) return kernels_amx();
  return best_isa() == Isa::kAvx512Vnni ? kernels_avx512() : kernels_avx2();
}

}  // namespace infer
