// infer_logsumexp: of each row of logits.  infer_sample: one token a row.
#include <algorithm>
#include <cmath>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "activations.h"
#include "sample.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

constexpr int kMostSegments = 1 << 15;

const SampleKernels& sampling() {
  return best_isa() >= Isa::kAvx512Vnni ? sample_kernels_avx512() : sample_kernels_avx2();
}

// Logits [rows, vocab], cut into segments.
struct Logits {
  const float* data;
  int rows, vocab;

  int segments() const { return (vocab + kLogitSegment - 1) / kLogitSegment; }
  const float* row(int r) const { return data + static_cast<int64_t>(r) * vocab; }
  int size(int segment) const { return std::min(kLogitSegment, vocab - segment * kLogitSegment); }
};

ffi::Error check_logits(const ffi::AnyBuffer& x, Logits& logits) {
  if (best_isa() == Isa::kNone) return ffi::Error(ffi::ErrorCode::kUnimplemented, isa_error());
  const auto dims = x.dimensions();
  if (x.element_type() != ffi::F32 || dims.size() != 2 || dims[1] < 1 || dims[0] > 1 << 20 ||
      dims[1] > static_cast<int64_t>(kMostSegments) * kLogitSegment) {
    return invalid("logits is %s; it must be float32 [rows, ids], with at least one id",
                   shape_text(x).c_str());
  }
  logits = {x.typed_data<float>(), static_cast<int>(dims[0]), static_cast<int>(dims[1])};
  return ffi::Error::Success();
}

// f(row, segment) for all segments of all rows, on all threads.
template <typename F>
void for_segments(const Logits& logits, F f) {
  const int segments = logits.segments();
  parallel_for(
      logits.rows * segments,
      [&](int begin, int end) {
        for (int item = begin; item < end; ++item) f(item / segments, item % segments);
      },
      min_piece(16 * kLogitSegment));
}

ffi::Error logsumexp(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  Logits logits;
  INFER_CHECK(check_logits(x, logits));
  INFER_CHECK(check_f32("the result", *y, {logits.rows}));
  const int segments = logits.segments();
  std::vector<LogitSum> sums(static_cast<size_t>(logits.rows) * segments);
  for_segments(logits, [&](int row, int segment) {
    sums[static_cast<size_t>(row) * segments + segment] =
        sampling().sum(logits.row(row) + segment * kLogitSegment, logits.size(segment));
  });
  const IeeeMode mode;
  for (int row = 0; row < logits.rows; ++row) {
    const LogitSum* s = &sums[static_cast<size_t>(row) * segments];
    float most = s[0].max;
    for (int i = 1; i < segments; ++i) most = std::max(most, s[i].max);
    double sum = 0;
    for (int i = 0; i < segments; ++i) {
      // Where all is -inf, or one is inf, the difference of the maxima is no number.
      const double share = s[i].max == most ? 1.0 : std::exp(static_cast<double>(s[i].max) - most);
      sum += s[i].sum == 0 ? 0.0 : s[i].sum * share;
    }
    y->typed_data<float>()[row] = static_cast<float>(most + std::log(sum));
  }
  return ffi::Error::Success();
}

// One row's s on the edge, best first, the lowest id first among equals.
struct Edge {
  std::vector<float> s;
  std::vector<int32_t> id;
  std::vector<int32_t> order;

  void fill(const Logits& logits, int row, const Draw& draw, int bin, int64_t count) {
    s.resize(count);
    id.resize(count);
    int64_t found = 0;
    for (int segment = 0; segment < logits.segments(); ++segment) {
      const int first = segment * kLogitSegment;
      const int more = sampling().gather(logits.row(row) + first, logits.size(segment), draw, bin,
                                         s.data() + found, id.data() + found);
      for (int i = 0; i < more; ++i) id[found + i] += first;
      found += more;
    }
    order.resize(count);
    for (int64_t i = 0; i < count; ++i) order[i] = static_cast<int32_t>(i);
    std::sort(order.begin(), order.end(), [this](int32_t a, int32_t b) {
      return s[a] > s[b] || (s[a] == s[b] && id[a] < id[b]);
    });
  }
  float at(int64_t i) const { return s[order[i]]; }
  void put(int64_t i, Draw& draw) const {
    draw.edge = at(i);
    draw.last = id[order[i]];
  }
};

// Fill draw.edge and draw.last: the k largest s (k < 1 or k >= vocab keeps all), of those the
// likeliest until their share reaches p (1 keeps all).
void find_edge(const Logits& logits, int row, int64_t k, float p, Draw& draw) {
  draw.edge = -INFINITY;
  draw.last = INT32_MAX;
  const bool uses_k = k >= 1 && k < logits.vocab, uses_p = p < 1.0f;
  if (!uses_k && !uses_p) return;
  thread_local Bins bins;
  thread_local Edge edge;
  std::fill(std::begin(bins.count), std::end(bins.count), 0);
  std::fill(std::begin(bins.mass), std::end(bins.mass), 0.0);
  for (int segment = 0; segment < logits.segments(); ++segment) {
    sampling().count(logits.row(row) + segment * kLogitSegment, logits.size(segment), draw, bins);
  }

  int last_bin = kBins;
  int64_t in_last = bins.count[kBins];  // how many of the last bin are kept
  if (uses_k) {
    int64_t left = k;
    for (last_bin = 0; left > bins.count[last_bin]; ++last_bin) left -= bins.count[last_bin];
    in_last = left;
    edge.fill(logits, row, draw, last_bin, bins.count[last_bin]);
    edge.put(in_last - 1, draw);
  }
  if (!uses_p) return;

  double total = 0;
  for (int bin = 0; bin < last_bin; ++bin) total += bins.mass[bin];
  if (uses_k) {
    for (int64_t i = 0; i < in_last; ++i) total += std::exp(static_cast<double>(edge.at(i)));
  } else {
    total += bins.mass[kBins];
  }
  const double want = std::max(static_cast<double>(p), 1.17549435e-38) * total;
  double mass = 0;
  int bin = 0;
  for (; bin < last_bin && mass + bins.mass[bin] < want; ++bin) mass += bins.mass[bin];
  if (bin < last_bin || !uses_k) {
    edge.fill(logits, row, draw, bin, bins.count[bin]);
    if (bin < last_bin) in_last = bins.count[bin];
  }
  // An entry is kept while what is before it falls short.
  for (int64_t i = 0; i < in_last && mass < want; ++i) {
    edge.put(i, draw);
    mass += std::exp(static_cast<double>(edge.at(i)));
  }
}

// Arguments after the logits: temperature, top_p, log(min_p) [rows]; top_k [rows]; the words of each
// row's key [rows, 2].
ffi::Error sample(ffi::AnyBuffer x, ffi::AnyBuffer temperature, ffi::AnyBuffer top_p,
                  ffi::AnyBuffer floor, ffi::AnyBuffer top_k, ffi::AnyBuffer key,
                  ffi::Result<ffi::AnyBuffer> token, float greedy_below) {
  Logits logits;
  INFER_CHECK(check_logits(x, logits));
  const int rows = logits.rows, segments = logits.segments();
  INFER_CHECK(check_f32("temperature", temperature, {rows}));
  INFER_CHECK(check_f32("top_p", top_p, {rows}));
  INFER_CHECK(check_f32("log min_p", floor, {rows}));
  if (top_k.element_type() != ffi::S32 || !has_shape(top_k, {rows}) ||
      token->element_type() != ffi::S32 || !has_shape(*token, {rows})) {
    return invalid("top_k is %s and the result %s; both must be int32 [%d]",
                   shape_text(top_k).c_str(), shape_text(*token).c_str(), rows);
  }
  if (key.element_type() != ffi::U32 || !has_shape(key, {rows, 2})) {
    return invalid("the keys are %s; they must be uint32 [%d, 2]", shape_text(key).c_str(), rows);
  }
  const float* const temperatures = temperature.typed_data<float>();
  std::vector<Draw> draws(rows);
  auto random = [&](int row) { return temperatures[row] >= greedy_below; };
  auto draws_one = [&](int row) { return random(row) && std::isfinite(draws[row].top); };
  // The best of each segment: of its logits, then of its scores.
  std::vector<Best> parts(static_cast<size_t>(rows) * segments);
  auto best_of = [&](int row) {
    const Best* part = &parts[static_cast<size_t>(row) * segments];
    Best best = part[0];
    for (int i = 1; i < segments; ++i) {
      // The first NaN is the best.
      if (!std::isnan(best.score) && !(part[i].score <= best.score)) best = part[i];
    }
    return best;
  };
  for_segments(logits, [&](int row, int segment) {
    const int first = segment * kLogitSegment;
    Best best = sampling().top(logits.row(row) + first, logits.size(segment));
    if (best.id >= 0) best.id += first;
    parts[static_cast<size_t>(row) * segments + segment] = best;
  });
  int32_t* const tokens = token->typed_data<int32_t>();
  bool any = false;
  for (int row = 0; row < rows; ++row) {
    const Best best = best_of(row);
    const uint32_t* words = key.typed_data<uint32_t>() + 2 * row;
    tokens[row] = random(row) && !std::isfinite(best.score) ? 0 : std::max(best.id, 0);
    draws[row] = {best.score, temperatures[row], floor.typed_data<float>()[row], 0, 0,
                  {words[0], words[1]}};
    any = any || draws_one(row);
  }
  if (!any) return ffi::Error::Success();

  parallel_for(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      if (!draws_one(row)) continue;
      find_edge(logits, row, top_k.typed_data<int32_t>()[row], top_p.typed_data<float>()[row],
                draws[row]);
    }
  });
  for_segments(logits, [&](int row, int segment) {
    if (!draws_one(row)) return;
    const int first = segment * kLogitSegment;
    parts[static_cast<size_t>(row) * segments + segment] =
        sampling().draw(logits.row(row) + first, logits.size(segment), first, draws[row]);
  });
  for (int row = 0; row < rows; ++row) {
    if (!draws_one(row)) continue;
    const Best best = best_of(row);
    if (best.id >= 0) tokens[row] = best.id;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace infer

INFER_HANDLER(infer_logsumexp, infer::logsumexp,
              xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>());

INFER_HANDLER(infer_sample, infer::sample,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<float>("greedy_below"));
