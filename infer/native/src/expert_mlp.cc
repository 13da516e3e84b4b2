// infer_expert_mlp: y = sum over a token's experts e of weight_e * down_e(act(gate_e(x)) * up_e(x)).
//
// The pairs of token and expert are sorted by expert; the rows of one expert are cut into blocks,
// and each block passes that expert's weights once.  A row's products have the same bits in any
// block, and a token adds its experts in the order in which they came: its result depends neither
// on the other tokens nor on the threads.
#include <limits>

#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxExperts = 1 << 20;
constexpr int64_t kMaxUnits = int64_t{1} << 30;
// What unpacking a weight costs beside the rows that it meets.
constexpr int kUnpack = 4;

// Places of pairs that have no row: of the id E, which is no expert, and of a token that has an id
// that does not exist.
constexpr int32_t kNoExpert = -1, kBadToken = -2;

// Rows [first, first + count) of the sorted pairs, all of one expert.
struct Block {
  int expert, first, count;
  int64_t before;  // the cost of one column of all blocks before this one

  int cost() const { return count + kUnpack; }
};

int blocks_of(int rows) { return (rows + kRowBlock - 1) / kRowBlock; }

// Sort pairs by expert.  starts [experts + 1] is room, place [tokens, k] becomes each pair's row,
// token_of [tokens * k] each row's token; returns the number of rows.
int sort_pairs(const int32_t* ids, int tokens, int k, int experts, int32_t* starts, int32_t* place,
               int32_t* token_of) {
  std::fill_n(starts, experts + 1, 0);
  for (int t = 0; t < tokens; ++t) {
    const int32_t* of_token = ids + static_cast<int64_t>(t) * k;
    const bool bad = std::any_of(of_token, of_token + k,
                                 [&](int32_t id) { return id < 0 || id > experts; });
    for (int j = 0; j < k; ++j) {
      const bool counts = !bad && of_token[j] < experts;
      place[static_cast<int64_t>(t) * k + j] = counts ? 0 : bad ? kBadToken : kNoExpert;
      if (counts) ++starts[of_token[j] + 1];
    }
  }
  for (int e = 0; e < experts; ++e) starts[e + 1] += starts[e];
  const int rows = starts[experts];
  for (int t = 0; t < tokens; ++t) {
    for (int j = 0; j < k; ++j) {
      const int64_t pair = static_cast<int64_t>(t) * k + j;
      if (place[pair] < 0) continue;
      place[pair] = starts[ids[pair]]++;  // which leaves each start at the next expert's
      token_of[place[pair]] = t;
    }
  }
  return rows;
}

// Cut each expert's rows into blocks of about the same size; ends [experts] is each expert's last
// row and one.  Returns their number.
int cut(const int32_t* ends, int experts, Block* blocks) {
  int count = 0, row = 0;
  int64_t before = 0;
  for (int e = 0; e < experts; ++e) {
    const int rows = ends[e] - row, parts = blocks_of(rows);
    for (int i = 0; i < parts; ++i) {
      const int from = static_cast<int>(static_cast<int64_t>(rows) * i / parts);
      const int to = static_cast<int>(static_cast<int64_t>(rows) * (i + 1) / parts);
      blocks[count] = {e, row + from, to - from, before};
      before += blocks[count++].cost();
    }
    row = ends[e];
  }
  return count;
}

// Call f(block, column) for each column of each block, on all threads.  Blocks differ in size, so
// it is cost that is shared out: an item belongs to whom its first unit of cost belongs to.
template <typename F>
void for_columns(const Block* blocks, int count, int columns, int64_t macs_of_unit, F&& f) {
  const Block* const end_of_blocks = blocks + count;
  const Block& last = end_of_blocks[-1];
  int most = 0;
  for (const Block* b = blocks; b != end_of_blocks; ++b) most = std::max(most, b->count);
  parallel_for(
      static_cast<int>((last.before + last.cost()) * columns),
      [&](int begin, int end) {
        const TilesFor tiles(kernels(), most);
        const Block* b = std::upper_bound(blocks, end_of_blocks, begin,
                                          [&](int unit, const Block& block) {
                                            return unit < block.before * columns;
                                          }) - 1;
        int column = static_cast<int>((begin - b->before * columns + b->cost() - 1) / b->cost());
        for (; b != end_of_blocks; ++b, column = 0) {
          for (; column < columns; ++column) {
            if (b->before * columns + static_cast<int64_t>(column) * b->cost() >= end) return;
            f(*b, column);
          }
        }
      },
      min_piece(macs_of_unit));
}

// The experts of a token in order, then the residual.
void combine(const int32_t* place, const float* weights, int k, const float* rows, int width,
             const float* residual, float* y) {
  if (place[0] == kBadToken) {
    std::fill_n(y, width, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  std::fill_n(y, width, 0.0f);
  for (int j = 0; j < k; ++j) {
    if (place[j] < 0) continue;
    const float* row = rows + static_cast<int64_t>(place[j]) * width;
    const float weight = weights[j];
    for (int i = 0; i < width; ++i) y[i] += weight * row[i];
  }
  if (residual == nullptr) return;
  for (int i = 0; i < width; ++i) y[i] += residual[i];
}

struct Operands {
  const float* x = nullptr;  // [tokens, in]
  const int32_t* ids = nullptr;  // [tokens, k]
  const float* weights = nullptr;  // [tokens, k]
  const float* residual = nullptr;  // [tokens, in], or null
  float* y = nullptr;  // [tokens, in]
  Weight gate, up, down;  // of expert 0
  Activation act = Activation::kSilu;
  int tokens = 0, in = 0, k = 0, experts = 0, width = 0;

  Weight of(Weight first, int expert) const {
    first.data += static_cast<int64_t>(expert) * first.panels() * first.bytes;
    return first;
  }
};

ffi::Error run(const Operands& a) {
  Needs first, second;
  first.add(a.gate.format);
  first.add(a.up.format);
  second.add(a.down.format);
  const int pairs = a.tokens * a.k;
  const int most_blocks = std::min(pairs, pairs / kRowBlock + a.experts);
  Scratch scratch;
  if (!scratch.reserve(Scratch::bytes_of<int32_t>(a.experts + 1) +
                       2 * Scratch::bytes_of<int32_t>(pairs) +
                       Scratch::bytes_of<Block>(most_blocks) + rows_bytes(pairs, a.in, first) +
                       rows_bytes(pairs, a.width, second) +
                       Scratch::bytes_of<float>(static_cast<size_t>(pairs) * a.in))) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the activations");
  }
  int32_t* starts = scratch.take<int32_t>(a.experts + 1);
  int32_t* place = scratch.take<int32_t>(pairs);
  int32_t* token_of = scratch.take<int32_t>(pairs);
  Block* blocks = scratch.take<Block>(most_blocks);
  const Rows prepared = take_rows(scratch, pairs, a.in, first);
  const Rows hidden = take_rows(scratch, pairs, a.width, second);
  float* rows = scratch.take<float>(static_cast<size_t>(pairs) * a.in);

  const Kernels& k = kernels();
  const int pairs_of_experts =
      sort_pairs(a.ids, a.tokens, a.k, a.experts, starts, place, token_of);
  const int count = cut(starts, a.experts, blocks);
  if (count > 0) {
    parallel_for(
        pairs_of_experts,
        [&](int begin, int end) {
          const Block* b = std::upper_bound(blocks, blocks + count, begin,
                                            [](int row, const Block& block) {
                                              return row < block.first;
                                            }) - 1;
          for (int row = begin; row < end; ++row) {
            if (row == b->first + b->count) ++b;
            k.prepare(a.x + static_cast<int64_t>(token_of[row]) * a.in, nullptr, 0,
                      rows_of(prepared, b->first, b->count), row - b->first);
          }
        },
        min_piece(64 * a.in));  // as prepare_rows
    for_columns(blocks, count, a.width / kGroup, 2 * a.in * kGroup, [&](const Block& b, int group) {
      do_hidden(k, a.of(a.gate, b.expert), a.of(a.up, b.expert), a.act,
                rows_of(prepared, b.first, b.count), 0, b.count, group,
                rows_of(hidden, b.first, b.count));
    });
    for_columns(blocks, count, a.down.pairs(), a.width * 2 * kPanel, [&](const Block& b, int pair) {
      const Product product{a.of(a.down, b.expert), nullptr, nullptr,
                            rows + static_cast<int64_t>(b.first) * a.in};
      do_pair(k, product, rows_of(hidden, b.first, b.count), 0, b.count, pair);
    });
  }
  parallel_for(
      a.tokens,
      [&](int begin, int end) {
        for (int64_t t = begin; t < end; ++t) {
          combine(place + t * a.k, a.weights + t * a.k, a.k, rows, a.in,
                  a.residual != nullptr ? a.residual + t * a.in : nullptr, a.y + t * a.in);
        }
      },
      min_piece(static_cast<int64_t>(a.k) * a.in));
  return ffi::Error::Success();
}

ffi::Error expert_mlp(ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer weights,
                      ffi::AnyBuffer gate_data, ffi::AnyBuffer up_data, ffi::AnyBuffer down_data,
                      ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                      ffi::Span<const int64_t> formats, int64_t width, int64_t activation) {
  Operands a;
  INFER_CHECK(check_x(x, a.tokens, a.in));
  const auto id_dims = ids.dimensions(), gate_dims = gate_data.dimensions();
  const int64_t experts = gate_dims.size() == 3 ? gate_dims[0] : 0;
  if (formats.size() != 3 || width < kGroup || width % kGroup != 0 || width > 1 << 24 ||
      activation < 0 || activation > 1 || experts < 1 || experts > kMaxExperts) {
    return invalid("%d formats, hidden width %lld, activation %lld, gate %s; expert_mlp takes 3"
                   " formats, a width that is a multiple of 32, activation 0 or 1, and weights of"
                   " 1 to %d experts",
                   static_cast<int>(formats.size()), static_cast<long long>(width),
                   static_cast<long long>(activation), shape_text(gate_data).c_str(), kMaxExperts);
  }
  if (ids.element_type() != ffi::S32 || id_dims.size() != 2 || id_dims[0] != a.tokens ||
      id_dims[1] < 1) {
    return invalid("expert_ids is %s; with these operands it must be int32 [%d, k]",
                   shape_text(ids).c_str(), a.tokens);
  }
  const int64_t k = id_dims[1], columns = std::max<int64_t>(width, a.in) / kGroup;
  if (k > kMaxExperts || a.tokens * k * (1 + kUnpack) > kMaxUnits / columns) {
    return invalid("%d tokens with %lld experts each, of widths %d and %lld, are too many for one"
                   " call; pass fewer tokens at a time",
                   a.tokens, static_cast<long long>(k), a.in, static_cast<long long>(width));
  }
  INFER_CHECK(check_f32("expert_weights", weights, {a.tokens, k}));
  INFER_CHECK(check_f32("result", *result, {a.tokens, a.in}));
  INFER_CHECK(check_weight("gate", gate_data, formats[0], width, a.in, a.gate, experts));
  INFER_CHECK(check_weight("up", up_data, formats[1], width, a.in, a.up, experts));
  INFER_CHECK(check_weight("down", down_data, formats[2], a.in, width, a.down, experts));
  if (args.size() > 1) return invalid("%d arguments too many", static_cast<int>(args.size()) - 1);
  if (args.size() > 0) {
    const auto buffer = *args.get<ffi::AnyBuffer>(0);
    INFER_CHECK(check_f32("residual", buffer, {a.tokens, a.in}));
    a.residual = buffer.typed_data<float>();
  }
  if (a.tokens == 0) return ffi::Error::Success();
  a.x = x.typed_data<float>();
  a.ids = ids.typed_data<int32_t>();
  a.weights = weights.typed_data<float>();
  a.y = result->typed_data<float>();
  a.act = static_cast<Activation>(activation);
  a.k = static_cast<int>(k);
  a.experts = static_cast<int>(experts);
  a.width = static_cast<int>(width);
  return run(a);
}

}  // namespace
}  // namespace infer

INFER_HANDLER(infer_expert_mlp, infer::expert_mlp,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .RemainingArgs()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<xla::ffi::Span<const int64_t>>("formats")
                  .Attr<int64_t>("width")
                  .Attr<int64_t>("activation"));
