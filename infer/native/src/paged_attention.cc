#include "paged_attention.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

#include "handler.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

// Fewer multiply-adds than this are done sooner than another thread wakes.
constexpr int64_t kWorthAThread = 100'000;
// The most memory that parts of splits computed side by side may take.
constexpr int64_t kMostPartFloats = 8 << 20;

const AttentionKernels& kernels() {
  static const AttentionKernels& chosen =
      best_isa() >= Isa::kAvx512Vnni ? attention_kernels_avx512() : attention_kernels_avx2();
  return chosen;
}

// At least `floats` floats of this thread's, aligned to 64 bytes.
float* thread_scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) {
    memory = {};
    memory.resize(floats + 16);
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

struct Work {
  Tile tile;
  int first_split, end_split;
  int64_t part;  // where its parts begin, in floats; one a split
  int splits() const { return end_split - first_split; }
};

// Key heads in a tile.  Where there are few rows, one reads all heads, which lie side by side in
// memory, unless threads would go idle.
int heads_at_once(const Attention& a, int rows, int64_t splits) {
  int heads = rows > kFewRows ? 1 : a.num_kv;
  while (heads > 1 && splits * ((a.num_kv + heads - 1) / heads) < 2 * num_threads()) --heads;
  return heads;
}

std::vector<Work> plan(const Attention& a, int batch) {
  const int tokens = std::min(a.num_queries, std::max(1, kTileRows / a.group()));
  const int tiles = (a.num_queries + tokens - 1) / tokens;
  std::vector<Work> works;
  works.reserve(int64_t{batch} * tiles * a.num_kv);
  int64_t part = 0;
  // The last tiles see most keys: first, so that the threads end together.
  for (int i = tiles - 1; i >= 0; --i) {
    for (int row = 0; row < batch; ++row) {
      Work work = {{row, 0, 1, i * tokens, std::min(a.num_queries, (i + 1) * tokens)}, 0, 0, 0};
      int64_t low = INT64_MAX, high = -1;
      for (int t = work.tile.t0; t < work.tile.t1; ++t) {
        const int64_t position = a.positions[int64_t{row} * a.num_queries + t];
        if (position < 0) continue;
        low = std::min(low, std::max<int64_t>(0, position - a.window + 1));
        high = std::max(high, position);
      }
      // Nothing lies past the table, whatever the positions say.
      high = std::min(high, int64_t{a.pages_per_row} * a.pools.page_size - 1);
      if (low <= high) {
        work.first_split = static_cast<int>(low / kSplit);
        work.end_split = static_cast<int>(high / kSplit) + 1;
      }
      const int heads = heads_at_once(a, tokens * a.group(), int64_t{batch} * work.splits());
      for (int head = 0; head < a.num_kv; head += heads) {
        work.tile.head = head;
        work.tile.num_heads = std::min(heads, a.num_kv - head);
        work.part = part;
        part += work.splits() * part_floats(a, work.tile.rows(a));
        works.push_back(work);
      }
    }
  }
  return works;
}

void run_tiles(const Attention& a, const std::vector<Work>& works, int min_piece) {
  parallel_for(
      static_cast<int>(works.size()),
      [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          const Work& work = works[i];
          const int rows = work.tile.rows(a);
          const int64_t size = part_floats(a, rows);
          float* const memory = thread_scratch(2 * size + scratch_floats(a, rows));
          const Part sum = part_at(memory, rows), next = part_at(memory + size, rows);
          kernels().begin(a, work.tile, sum);
          for (int split = work.first_split; split < work.end_split; ++split) {
            kernels().attend(a, work.tile, split, memory + 2 * size, next);
            kernels().merge(a, work.tile, next, sum);
          }
          kernels().finish(a, work.tile, sum);
        }
      },
      min_piece);
}

// The same sums with the splits of a tile on several threads.
void run_splits(const Attention& a, const std::vector<Work>& works, float* parts) {
  struct Item {
    int work, split;
  };
  std::vector<Item> items;
  for (size_t i = 0; i < works.size(); ++i) {
    for (int s = 0; s < works[i].splits(); ++s) items.push_back({static_cast<int>(i), s});
  }
  auto part = [&](const Work& work, int split) {
    const int rows = work.tile.rows(a);
    return part_at(parts + work.part + split * part_floats(a, rows), rows);
  };
  parallel_for(static_cast<int>(items.size()), [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const Work& work = works[items[i].work];
      float* const scratch = thread_scratch(scratch_floats(a, work.tile.rows(a)));
      const int split = work.first_split + items[i].split;
      kernels().attend(a, work.tile, split, scratch, part(work, items[i].split));
    }
  });
  const IeeeMode mode;
  for (const Work& work : works) {
    const int rows = work.tile.rows(a);
    const Part sum = part_at(thread_scratch(part_floats(a, rows)), rows);
    kernels().begin(a, work.tile, sum);
    for (int s = 0; s < work.splits(); ++s) kernels().merge(a, work.tile, part(work, s), sum);
    kernels().finish(a, work.tile, sum);
  }
}

void attention(const Attention& a, int batch) {
  const std::vector<Work> works = plan(a, batch);
  int64_t splits = 0, row_splits = 0;
  for (const Work& work : works) {
    splits += work.splits();
    row_splits += int64_t{work.splits()} * work.tile.rows(a);
  }
  const int num_works = static_cast<int>(works.size());
  const int64_t products = row_splits * kSplit * a.width * 2;
  if (products < 2 * kWorthAThread) return run_tiles(a, works, num_works);
  const Work& last = works.back();
  const int64_t part_end = last.part + last.splits() * part_floats(a, last.tile.rows(a));
  if (num_works < 4 * num_threads() && splits > num_works && part_end <= kMostPartFloats) {
    thread_local std::vector<float> parts;
    if (static_cast<int64_t>(parts.size()) < part_end) parts.resize(part_end);
    return run_splits(a, works, parts.data());
  }
  run_tiles(a, works, static_cast<int>(std::min<int64_t>(
                          num_works, kWorthAThread * num_works / products + 1)));
}

bool pool_type(ffi::DataType type, PoolType* to) {
  switch (type) {
    case ffi::DataType::F32: *to = PoolType::kF32; return true;
    case ffi::DataType::BF16: *to = PoolType::kBf16; return true;
    case ffi::DataType::F16: *to = PoolType::kF16; return true;
    case ffi::DataType::S8: *to = PoolType::kI8; return true;
    case ffi::DataType::U8: *to = PoolType::kI4; return true;
    case ffi::DataType::F8E4M3FN: *to = PoolType::kE4M3; return true;
    default: return false;
  }
}

// What both operations check of queries, keys, values and sinks, and then set in `a`.
ffi::Error read_operands(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                         const ffi::AnyBuffer& sinks, const ffi::AnyBuffer& out, int64_t num_kv,
                         int64_t window, Attention& a) {
  const auto dims = q.dimensions();
  if (window < 0) {
    return invalid("the window is %lld keys; it must be 0 or more", static_cast<long long>(window));
  }
  if (q.element_type() != ffi::DataType::F32 || out.element_type() != ffi::DataType::F32) {
    return invalid("q and the result must be float32");
  }
  if (!has_shape(out, {dims[0], dims[1], dims[2], dims[3]})) {
    return invalid("the result %s is not as q %s", shape_text(out).c_str(), shape_text(q).c_str());
  }
  if (k.element_type() != v.element_type() || !pool_type(k.element_type(), &a.pools.type)) {
    return invalid(
        "k and v must both be float32, bfloat16, float16, int8, float8_e4m3fn, or uint8 for int4");
  }
  if (num_kv < 1 || dims[2] % num_kv != 0) {
    return invalid("q has %lld heads, not a multiple of k's %lld", static_cast<long long>(dims[2]),
                   static_cast<long long>(num_kv));
  }
  if (dims[3] < 1) return invalid("the heads of q %s have no width", shape_text(q).c_str());
  for (const ffi::AnyBuffer* x : {&q, &k, &v}) {
    for (int64_t d : x->dimensions()) {
      if (d > INT32_MAX) return invalid("a dimension of %s is too large", shape_text(*x).c_str());
    }
  }
  const bool no_sinks = has_shape(sinks, {0});
  if (sinks.element_type() != ffi::DataType::F32 || !(no_sinks || has_shape(sinks, {dims[2]}))) {
    return invalid("sinks must be float32, one for each head of q %s, or none; they are %s",
                   shape_text(q).c_str(), shape_text(sinks).c_str());
  }
  a.q = q.reinterpret_data<float>();
  a.out = const_cast<float*>(out.reinterpret_data<float>());
  a.sinks = no_sinks ? nullptr : sinks.reinterpret_data<float>();
  a.pools.k = k.untyped_data();
  a.pools.v = v.untyped_data();
  a.num_queries = static_cast<int>(dims[1]);
  a.num_heads = static_cast<int>(dims[2]);
  a.num_kv = static_cast<int>(num_kv);
  a.width = static_cast<int>(dims[3]);
  a.window = std::min(window, int64_t{1} << 40);  // more than any position, and nothing overflows
  return ffi::Error::Success();
}

ffi::Error paged_attention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer k_scales, ffi::AnyBuffer v_scales, ffi::AnyBuffer table,
                           ffi::AnyBuffer positions, ffi::AnyBuffer sinks,
                           ffi::Result<ffi::AnyBuffer> out, float scale, float softcap,
                           int64_t window) {
  const auto q_dims = q.dimensions(), k_dims = k.dimensions(), table_dims = table.dimensions();
  if (q_dims.size() != 4 || k_dims.size() != 4 ||
      !has_shape(v, {k_dims[0], k_dims[1], k_dims[2], k_dims[3]}) ||
      (k.element_type() == ffi::DataType::U8 ? 2 * k_dims[3] : k_dims[3]) != q_dims[3]) {
    return invalid(
        "q [B, T, N, H] and the pools of keys and values [P, K, U, H] do not fit: %s, %s, %s",
        shape_text(q).c_str(), shape_text(k).c_str(), shape_text(v).c_str());
  }
  if (table.element_type() != ffi::DataType::S32 || table_dims.size() != 2 ||
      table_dims[0] != q_dims[0] || table_dims[1] > INT32_MAX) {
    return invalid("the page table must be int32 [B, M], a row for each of q %s; it is %s",
                   shape_text(q).c_str(), shape_text(table).c_str());
  }
  if (positions.element_type() != ffi::DataType::S32 ||
      !has_shape(positions, {q_dims[0], q_dims[1]})) {
    return invalid("positions must be int32 [B, T], one for each token of q %s; they are %s",
                   shape_text(q).c_str(), shape_text(positions).c_str());
  }
  if (k_dims[2] < 1) return invalid("the pages of %s hold no token", shape_text(k).c_str());
  Attention a = {};
  if (ffi::Error error = read_operands(q, k, v, sinks, *out, k_dims[1], window, a); error.failure()) {
    return error;
  }
  const bool scaled = is_scaled(a.pools.type);
  for (const ffi::AnyBuffer* x : {&k_scales, &v_scales}) {
    if (x->element_type() != ffi::DataType::F32 ||
        !(scaled ? has_shape(*x, {k_dims[0], k_dims[1], k_dims[2]}) : has_shape(*x, {0}))) {
      return invalid("quantised pools need float32 scales [P, K, U], others none; pools %s have %s",
                     shape_text(k).c_str(), shape_text(*x).c_str());
    }
  }
  a.pools.k_scales = scaled ? k_scales.reinterpret_data<float>() : nullptr;
  a.pools.v_scales = scaled ? v_scales.reinterpret_data<float>() : nullptr;
  a.table = table.reinterpret_data<int32_t>();
  a.positions = positions.reinterpret_data<int32_t>();
  a.pages_per_row = static_cast<int>(table_dims[1]);
  a.pools.num_pages = k_dims[0];
  a.pools.page_size = static_cast<int>(k_dims[2]);
  a.pools.page_stride = k_dims[1] * k_dims[2];
  a.pools.head_stride = k_dims[2];
  a.pools.token_stride = 1;
  a.scale = scale;
  a.softcap = softcap;
  if (q.element_count() > 0) attention(a, static_cast<int>(q_dims[0]));
  return ffi::Error::Success();
}

// Dense keys are one page a row, whose tokens lie K * H apart.
ffi::Error dense_attention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> out, float scale,
                           float softcap, int64_t window) {
  const auto q_dims = q.dimensions(), k_dims = k.dimensions();
  if (q_dims.size() != 4 || k_dims.size() != 4 ||
      !has_shape(v, {k_dims[0], k_dims[1], k_dims[2], k_dims[3]}) || k_dims[0] != q_dims[0] ||
      k_dims[3] != q_dims[3]) {
    return invalid("q [B, T, N, H] and keys and values [B, S, K, H] do not fit: %s, %s, %s",
                   shape_text(q).c_str(), shape_text(k).c_str(), shape_text(v).c_str());
  }
  Attention a = {};
  if (ffi::Error error = read_operands(q, k, v, sinks, *out, k_dims[2], window, a); error.failure()) {
    return error;
  }
  if (is_scaled(a.pools.type)) return invalid("dense keys and values cannot be quantised");
  std::vector<int32_t> table(q_dims[0]), positions(q_dims[0] * q_dims[1]);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i % q_dims[1]);
  a.table = table.data();
  a.positions = positions.data();
  a.pages_per_row = k_dims[1] > 0 ? 1 : 0;
  a.pools.num_pages = k_dims[0];
  a.pools.page_size = static_cast<int>(std::max<int64_t>(1, k_dims[1]));
  a.pools.page_stride = k_dims[1] * k_dims[2];
  a.pools.head_stride = 1;
  a.pools.token_stride = k_dims[2];
  a.scale = scale;
  a.softcap = softcap;
  if (q.element_count() > 0) attention(a, static_cast<int>(q_dims[0]));
  return ffi::Error::Success();
}

}  // namespace

INFER_HANDLER(infer_paged_attention, paged_attention,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()  // q
                  .Arg<xla::ffi::AnyBuffer>()  // key pool
                  .Arg<xla::ffi::AnyBuffer>()  // value pool
                  .Arg<xla::ffi::AnyBuffer>()  // scales of keys, or [0]
                  .Arg<xla::ffi::AnyBuffer>()  // scales of values, or [0]
                  .Arg<xla::ffi::AnyBuffer>()  // page table
                  .Arg<xla::ffi::AnyBuffer>()  // positions
                  .Arg<xla::ffi::AnyBuffer>()  // sinks, or [0]
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<float>("scale")
                  .Attr<float>("softcap")
                  .Attr<int64_t>("window"));

INFER_HANDLER(infer_dense_attention, dense_attention,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()  // q
                  .Arg<xla::ffi::AnyBuffer>()  // keys
                  .Arg<xla::ffi::AnyBuffer>()  // values
                  .Arg<xla::ffi::AnyBuffer>()  // sinks, or [0]
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<float>("scale")
                  .Attr<float>("softcap")
                  .Attr<int64_t>("window"));

}  // namespace infer
