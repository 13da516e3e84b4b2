// Weights times activations: the data, and the kernels that each instruction set has.
//
// A weight [out, in] is repacked into panels of 16 output rows (infer/native/repack.py), so that
// one vector lane is one output row.  Activations are quantised per row and group of 32 to int8:
//
//     d = max|x| / 127,  q = round(x / d)
//     y_o = sum over groups of d * (scale_o * sum(w q) + min_o * sum(q))
//
// The sums in a group are exact in int32, and each lane adds its groups in order with one chain of
// fused multiply-adds.  So the bits of a row's result depend on that row and the weight alone: not
// on the other rows, the tile, the thread or the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infer {

constexpr int kPanel = 16;     // output rows side by side in a packed weight
constexpr int kGroup = 32;     // activations with one scale
constexpr int kTileRows = 16;  // activation rows of an AMX tile
constexpr int kRowBlock = 64;  // activation rows that pass a panel before the next panel

// The numbers are part of the Python side (repack.py).
enum class Format : int {
  kF32 = 0,
  kF16 = 1,
  kBf16 = 2,
  kQ4_0 = 3,
  kQ4_1 = 4,
  kQ5_0 = 5,
  kQ5_1 = 6,
  kQ8_0 = 7,
  kQ4K = 8,
  kQ5K = 9,
  kQ6K = 10,
};
constexpr int kFormats = 11;

inline bool is_float(Format format) { return format <= Format::kBf16; }

// Weights in a block along the input, and bytes of 16 rows of it.
inline int block_width(Format format) {
  return is_float(format) ? 1 : format >= Format::kQ4K ? 256 : 32;
}
inline int64_t block_bytes(Format format) {
  constexpr int64_t kBytes[kFormats] = {64,  32,  32,  256 + 32,       256 + 64,      320 + 32,
                                        384, 544, 64 + 8 * 288, 64 + 8 * 352, 32 + 8 * 416};
  return kBytes[static_cast<int>(format)];
}
inline int64_t panel_bytes(Format format, int64_t in) {
  return in / block_width(format) * block_bytes(format);
}

struct Weight {
  Format format;
  const uint8_t* data;
  int out, in;

  int panels() const { return (out + kPanel - 1) / kPanel; }
  int pairs() const { return (panels() + 1) / 2; }
  const uint8_t* panel(int p) const { return data + p * panel_bytes(format, in); }
};

// Rows of activations [rows, in], quantised, as floats, or both: whatever the weights need.  The
// quantised ones lie group by group, and in a group row by row, within each block of rows: what
// meets one group of weights is side by side.
struct Rows {
  int in;
  int stride;           // rows of a block: kRowBlock, or all if they are fewer
  float* x;             // [rows, in], for float weights
  int8_t* q;            // [blocks, in / 32, stride, 32]
  float* d;             // [blocks, in / 32, stride]
  float* d_sum;         // likewise: d times the sum of the group's q
  int32_t* minus_sum;   // likewise: less the sum of the group's q
  int32_t* minus_half;  // [blocks, in / 32, stride, 2]: less the sums of its halves

  int64_t at(int row, int group) const {
    return (static_cast<int64_t>(row / kRowBlock) * (in / kGroup) + group) * stride +
           row % kRowBlock;
  }
};

enum class Activation : int { kSilu = 0, kGeluTanh = 1 };

struct Kernels {
  // Row `row` of `to` := the RMS norm of x [in], or x itself where gain is null; quantised if there
  // is to.q, copied if there is to.x.
  void (*prepare)(const float* x, const float* gain, float eps, const Rows& to, int row);

  // The same of one group x [32].
  void (*prepare_group)(const float* x, const Rows& to, int row, int group);

  // ya [count, 16] := rows [row, row + count) times the panel `a` of a weight of this format, and yb
  // likewise with `b` unless that is null.  `row` begins a block, count <= kRowBlock.
  void (*panels)(Format format, const uint8_t* a, const uint8_t* b, const Rows& x, int row,
                 int count, float* ya, float* yb);

  // y[i] := (tile[i] + bias) + residual[i] for n = 1 to 16 outputs; both may be null.
  void (*finish)(const float* tile, const float* bias, const float* residual, int n, float* y);

  // gate [n] := act(gate) * up, n a multiple of 16.
  void (*gate)(float* gate, const float* up, Activation act, int n);

  // Of this thread's tiles, before and after calls of `panels` with kTileRows rows or more; null
  // where there are no tiles.
  void (*configure_tiles)();
  void (*release_tiles)();
};

// While it lives, this thread may call k.panels with up to `rows` rows.  Tiles are released after
// each piece of work: others on the thread, XLA's products among them, have tiles of their own, and
// used ones make a switch of threads save 8 KB more.
class TilesFor {
 public:
  TilesFor(const Kernels& k, int rows)
      : release_(rows < kTileRows ? nullptr : k.release_tiles) {
    if (release_ != nullptr) k.configure_tiles();
  }
  ~TilesFor() {
    if (release_ != nullptr) release_();
  }
  TilesFor(const TilesFor&) = delete;

 private:
  void (*release_)();
};

// Of best_isa(), which must not be kNone.
const Kernels& kernels();

const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_amx();

}  // namespace infer
