// Causal attention over paged keys and values: the data, and the kernels of each instruction set.
//
// The keys of a sequence are cut at absolute positions 0, 128, 256, ...  A split is attended to on
// its own,
//
//     m = max s_j,  p_j = exp(s_j - m),  total = sum p_j,  acc = sum p_j v_j
//
// over its visible keys, and the splits of a query are merged in order, as in online softmax.
// Every sum has one order: a score adds its products from dimension 0 up, acc its keys from the
// first up, total 16 keys at a time.  So a query's bits depend on its own keys alone: not on the
// chunk or batch it came in, the thread that had it, the instruction set, or whether splits were
// computed side by side.  (Where values are finite: those that only later queries of a tile see
// are multiplied by 0.)
// Source: Dao 2023, Flash-Decoding.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infer {

constexpr int kSplit = 128;  // keys
// Query rows (tokens times heads of a group) that share the keys they read.
constexpr int kTileRows = 48;
// With no more rows than these, the time goes into reading keys and values.
constexpr int kFewRows = 16;

enum class PoolType { kF32, kBf16, kF16, kI8, kI4, kE4M3 };
inline bool is_scaled(PoolType type) { return type >= PoolType::kI8; }

// Keys and values of all sequences, a row [H] a token and key head; strides count rows.  Where
// there are scales, row i stands for its numbers times scale i.  A row of kI4 is H / 2 bytes: the
// first half of its numbers in the low nibbles, the second in the high ones, each plus 8.
struct Pools {
  PoolType type;
  const void* k;
  const void* v;
  const float* k_scales;  // null but where is_scaled(type)
  const float* v_scales;
  int64_t num_pages;
  int page_size;
  int64_t page_stride, head_stride, token_stride;
};

struct Attention {
  const float* q;            // [B, T, N, H]
  float* out;                // [B, T, N, H]
  const float* sinks;        // [N], or null
  const int32_t* table;      // [B, M]; an entry outside [0, num_pages) is no page
  const int32_t* positions;  // [B, T]; negative for padding
  Pools pools;
  int num_queries, num_heads, num_kv, width, pages_per_row;
  float scale, softcap;  // softcap 0 for none
  int64_t window;        // visible keys

  int group() const { return num_heads / num_kv; }
  int padded_width() const { return (width + 15) / 16 * 16; }
};

// Queries [t0, t1) of one sequence with the query heads of key heads [head, head + num_heads).  Its
// rows go by key head, then token, then query head of the group.
struct Tile {
  int row, head, num_heads, t0, t1;
  int rows_of_head(const Attention& a) const { return (t1 - t0) * a.group(); }
  int rows(const Attention& a) const { return num_heads * rows_of_head(a); }
};

// What a tile's rows have seen: m [rows], total [rows], acc [rows, padded_width].
struct Part {
  float* m;
  float* total;
  float* acc;
};
inline Part part_at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }
inline int64_t part_floats(const Attention& a, int rows) {
  // Whole cache lines, so that parts of different threads share none.
  return (int64_t{rows} * (a.padded_width() + 2) + 15) / 16 * 16;
}

// Floats that `attend` needs beside the part, aligned to 64 bytes.
inline int64_t scratch_floats(const Attention& a, int rows) {
  const int64_t width = a.padded_width();
  return width * rows + int64_t{kSplit} * rows + width * (16 * 4 + 32 + 1);
}

struct AttentionKernels {
  // The part of keys [split * kSplit, (split + 1) * kSplit).
  void (*attend)(const Attention& a, const Tile& tile, int split, float* scratch, const Part& part);
  // The part of no keys, with the sinks if there are any.
  void (*begin)(const Attention& a, const Tile& tile, const Part& part);
  // into := into and, after it, next.
  void (*merge)(const Attention& a, const Tile& tile, const Part& next, const Part& into);
  void (*finish)(const Attention& a, const Tile& tile, const Part& part);
};

const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();

}  // namespace infer
