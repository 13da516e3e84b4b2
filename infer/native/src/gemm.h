// Weights times activations: the data, and the kernels that each instruction set has.
//
// A weight [out, in] is repacked into panels of 16 output rows (infer/native/repack.py), so that
// one vector lane is one output row.  Activations are quantised per row and group of 32 to int8:
//
//     d = max|x| / 127,  q = round(x / d)
//     y_o = sum over groups of d * (scale_o * sum(w q) + min_o * sum(q))
//
// or, where a format names its own rounding of activations, with one d for the row (Rounding).
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
  // Planar: integers of 2 to 8 bits, with a zero point (kIntZ) or the middle code for it; 16 levels
  // in floats; 8-bit floats.
  kInt2 = 11,
  kInt3 = 12,
  kInt4 = 13,
  kInt5 = 14,
  kInt6 = 15,
  kInt8 = 16,
  kIntZ2 = 17,
  kIntZ3 = 18,
  kIntZ4 = 19,
  kIntZ5 = 20,
  kIntZ6 = 21,
  kIntZ8 = 22,
  kLevels = 23,
  kE4M3 = 24,
  kE5M2 = 25,
};
constexpr int kFormats = 26;

// Whether activations are multiplied as floats.
inline bool is_float(Format format) {
  return format <= Format::kBf16 || format >= Format::kLevels;
}
inline bool is_planar(Format format) { return format >= Format::kInt2; }
inline bool has_zero(Format format) {
  return format >= Format::kIntZ2 && format <= Format::kIntZ8;
}

// Each panel of a planar weight begins with it.
struct PlanarHeader {
  float global;  // on every scale
  float unused[15];
  float levels[16];  // kLevels: what the codes stand for
};
static_assert(sizeof(PlanarHeader) == 128);

// Integers whose scales are of half a group: they lie by group, two times scales (and zero points)
// before its codes.
constexpr int kHalfGroup = 16;
inline bool is_halved(Format format, int64_t span) {
  return is_planar(format) && !is_float(format) && span == kHalfGroup;
}

// Whether the kernels can do a span.
inline bool span_fits(Format format, int64_t span) {
  return span > 0 && (span % (is_float(format) ? 2 : kGroup) == 0 || is_halved(format, span));
}

inline int planar_bits(Format format) {
  constexpr int kBits[] = {2, 3, 4, 5, 6, 8, 2, 3, 4, 5, 6, 8, 4, 8, 8};
  return kBits[static_cast<int>(format) - static_cast<int>(Format::kInt2)];
}
// Bytes of 16 scales, and of their zero points if there are any: what stands before the codes of
// each span.
inline int64_t scale_bytes(Format format, bool half) {
  const int64_t scales = half ? 32 : 64;
  return has_zero(format) ? (half ? 64 : 128) : scales;
}
inline int64_t planar_panel_bytes(Format format, int64_t in, int64_t span, bool half) {
  return static_cast<int64_t>(sizeof(PlanarHeader)) +
         (in + span - 1) / span * scale_bytes(format, half) + in * 2 * planar_bits(format);
}

// A format as Python gives it: the number, and of planar ones in bit 8 whether scales are float16
// (else float32), and above bit 16 the span, inputs that share a scale.
struct Spec {
  Format format;
  bool half;
  int64_t span;
  explicit Spec(int64_t number)
      : format(static_cast<Format>(number & 255)), half((number >> 8 & 1) != 0),
        span(number >> 16) {}
};

// Weights in a block along the input, and bytes of 16 rows of it.
inline int block_width(Format format) {
  if (is_planar(format)) return 32;
  return is_float(format) ? 1 : format >= Format::kQ4K ? 256 : 32;
}
inline int64_t block_bytes(Format format) {  // not of planar formats
  constexpr int64_t kBytes[] = {64,  32,  32,  256 + 32,       256 + 64,      320 + 32,
                                        384, 544, 64 + 8 * 288, 64 + 8 * 352, 32 + 8 * 416};
  return kBytes[static_cast<int>(format)];
}
inline int64_t panel_bytes(const Spec& spec, int64_t in) {
  return is_planar(spec.format) ? planar_panel_bytes(spec.format, in, spec.span, spec.half)
                                : in / block_width(spec.format) * block_bytes(spec.format);
}

struct Weight {
  Format format;
  const uint8_t* data;
  int out, in;
  int64_t bytes;  // of a panel
  int span;       // planar: inputs that share a scale
  bool half;      // planar: scales are float16, else float32

  int panels() const { return (out + kPanel - 1) / kPanel; }
  int pairs() const { return (panels() + 1) / 2; }
  const uint8_t* panel(int p) const { return data + p * bytes; }
};

// What one d of the quantised activations is of: a group of 32; a row, max|x| / 127 over it; or of
// everything, given.
enum class Rounding : int { kGroup = 0, kRow = 1, kGiven = 2 };

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
  Rounding rounding;    // kGroup unless set
  float given;          // d of kGiven

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

  // The same of one group x [32], rounded as a group.
  void (*prepare_group)(const float* x, const Rows& to, int row, int group);

  // ya [count, 16] := rows [row, row + count) times the panel `a` of the weight, and yb likewise with
  // `b` unless that is null.  `row` begins a block, count <= kRowBlock.
  void (*panels)(const Weight& w, const uint8_t* a, const uint8_t* b, const Rows& x, int row,
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
