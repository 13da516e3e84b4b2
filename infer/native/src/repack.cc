// GGUF blocks, row by row, into panels of 16 rows: the same codes and scales in the order in which
// gemm_kernels.h reads them.  The formats are those of infer/quant/legacy.py and k_quants.py.
#include <cstring>

#include "gemm.h"
#include "handler.h"
#include "threads.h"

namespace infer {
namespace {

// One row's block, unpacked: codes in the order of the weights, scales as bytes.
struct Block {
  uint8_t codes[256];
  uint8_t halves[4];    // d, and m or dmin, as float16
  uint8_t scales[16];   // by group, or by half a group
  uint8_t mins[8];
};

void nibbles(const uint8_t* p, uint8_t* codes) {  // 16 bytes: low nibbles first
  for (int i = 0; i < 16; ++i) {
    codes[i] = p[i] & 15;
    codes[16 + i] = p[i] >> 4;
  }
}

void fifth_bits(const uint8_t* p, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  for (int i = 0; i < 32; ++i) codes[i] |= (bits >> i & 1) << 4;
}

void scales_mins(const uint8_t* p, Block& b) {
  for (int i = 0; i < 4; ++i) {
    b.scales[i] = p[i] & 63;
    b.mins[i] = p[4 + i] & 63;
    b.scales[4 + i] = (p[8 + i] & 15) | p[i] >> 6 << 4;
    b.mins[4 + i] = p[8 + i] >> 4 | p[4 + i] >> 6 << 4;
  }
}

void k_codes(const uint8_t* p, uint8_t* codes) {  // 32 bytes hold two groups
  for (int c = 0; c < 4; ++c) {
    for (int i = 0; i < 32; ++i) {
      codes[64 * c + i] = p[32 * c + i] & 15;
      codes[64 * c + 32 + i] = p[32 * c + i] >> 4;
    }
  }
}

template <Format format>
void unpack(const uint8_t* p, Block& b) {
  if constexpr (format == Format::kQ4_0) {
    std::memcpy(b.halves, p, 2);
    nibbles(p + 2, b.codes);
  } else if constexpr (format == Format::kQ4_1) {
    std::memcpy(b.halves, p, 4);
    nibbles(p + 4, b.codes);
  } else if constexpr (format == Format::kQ5_0) {
    std::memcpy(b.halves, p, 2);
    nibbles(p + 6, b.codes);
    fifth_bits(p + 2, b.codes);
  } else if constexpr (format == Format::kQ5_1) {
    std::memcpy(b.halves, p, 4);
    nibbles(p + 8, b.codes);
    fifth_bits(p + 4, b.codes);
  } else if constexpr (format == Format::kQ8_0) {
    std::memcpy(b.halves, p, 2);
    for (int i = 0; i < 32; ++i) b.codes[i] = p[2 + i] ^ 128;
  } else if constexpr (format == Format::kQ4K) {
    std::memcpy(b.halves, p, 4);
    scales_mins(p + 4, b);
    k_codes(p + 16, b.codes);
  } else if constexpr (format == Format::kQ5K) {
    std::memcpy(b.halves, p, 4);
    scales_mins(p + 4, b);
    k_codes(p + 48, b.codes);
    for (int g = 0; g < 8; ++g) {
      for (int i = 0; i < 32; ++i) b.codes[32 * g + i] |= (p[16 + i] >> g & 1) << 4;
    }
  } else if constexpr (format == Format::kQ6K) {
    for (int h = 0; h < 2; ++h) {
      const uint8_t *low = p + 64 * h, *high = p + 128 + 32 * h;
      uint8_t* codes = b.codes + 128 * h;
      for (int i = 0; i < 32; ++i) {
        codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
        codes[32 + i] = (low[32 + i] & 15) | (high[i] >> 2 & 3) << 4;
        codes[64 + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
        codes[96 + i] = low[32 + i] >> 4 | (high[i] >> 6) << 4;
      }
    }
    std::memcpy(b.scales, p + 192, 16);
    std::memcpy(b.halves, p + 208, 2);
  }
}

// Bytes of one row's block in a GGUF file.
constexpr int source_bytes(Format format) {
  constexpr int kBytes[] = {4, 2, 2, 18, 20, 22, 24, 34, 144, 176, 210};
  return kBytes[static_cast<int>(format)];
}

constexpr int bits_of(Format format) {
  return format == Format::kQ8_0                               ? 8
         : format == Format::kQ6K                              ? 6
         : format == Format::kQ5_0 || format == Format::kQ5_1 || format == Format::kQ5K ? 5
                                                                                        : 4;
}

// One group of one row (of 16) into the panel's `to`.
template <int bits>
void put_codes(const uint8_t* codes, int row, uint8_t* to) {
  uint8_t* lane = to + 4 * row;
  if constexpr (bits < 4) {
    uint32_t high = 0;
    for (int v = 0; v < 8; ++v) {
      uint32_t four, pairs;
      std::memcpy(&four, codes + 4 * v, 4);
      uint8_t* at = lane + 64 * (v / 4);
      std::memcpy(&pairs, at, 4);
      pairs = v % 4 == 0 ? four & 0x03030303 : pairs | (four & 0x03030303) << 2 * (v % 4);
      std::memcpy(at, &pairs, 4);
      high |= (four >> 2 & 0x01010101) << v;
    }
    if constexpr (bits == 3) std::memcpy(lane + 128, &high, 4);
    return;
  }
  for (int v = 0; v < (bits == 8 ? 8 : 4); ++v) {
    uint32_t four, upper;
    std::memcpy(&four, codes + 4 * v, 4);
    if constexpr (bits < 8) {
      std::memcpy(&upper, codes + 16 + 4 * v, 4);
      four = (four & 0x0f0f0f0f) | (upper & 0x0f0f0f0f) << 4;
    }
    std::memcpy(lane + 64 * v, &four, 4);
  }
  if constexpr (bits == 5) {
    uint32_t high = 0;
    for (int v = 0; v < 8; ++v) {
      uint32_t four;
      std::memcpy(&four, codes + 4 * v, 4);
      high |= (four >> 4 & 0x01010101) << v;
    }
    std::memcpy(lane + 256, &high, 4);
  }
  if constexpr (bits == 6) {
    for (int half = 0; half < 2; ++half) {
      uint32_t high = 0;
      for (int v = 0; v < 4; ++v) {
        uint32_t four;
        std::memcpy(&four, codes + 16 * half + 4 * v, 4);
        high |= (four >> 4 & 0x03030303) << 2 * v;
      }
      std::memcpy(lane + 256 + 64 * half, &high, 4);
    }
  }
}

template <Format format>
void put(const Block& b, int row, uint8_t* to) {
  constexpr int bits = bits_of(format);
  constexpr bool affine = format == Format::kQ4_1 || format == Format::kQ5_1;
  constexpr bool min_scales = format == Format::kQ4K || format == Format::kQ5K;
  if constexpr (format >= Format::kQ4K) {
    std::memcpy(to + 2 * row, b.halves, 2);
    if constexpr (min_scales) std::memcpy(to + 32 + 2 * row, b.halves + 2, 2);
    uint8_t* group = to + (min_scales ? 64 : 32);
    for (int g = 0; g < 8; ++g, group += 64 * bits + 32) {
      put_codes<bits>(b.codes + 32 * g, row, group);
      group[64 * bits + row] = min_scales ? b.scales[g] : b.scales[2 * g];
      group[64 * bits + 16 + row] = min_scales ? b.mins[g] : b.scales[2 * g + 1];
    }
  } else {
    put_codes<bits>(b.codes, row, to);
    std::memcpy(to + 64 * bits + 2 * row, b.halves, 2);
    if constexpr (affine) std::memcpy(to + 64 * bits + 32 + 2 * row, b.halves + 2, 2);
  }
}

// 16 rows, or what there are, into one panel, which is zero before.
template <Format format>
void repack_blocks(const uint8_t* from, int64_t row_bytes, int rows, int in, uint8_t* panel) {
  const int blocks = in / block_width(format);
  for (int i = 0; i < blocks; ++i, panel += block_bytes(format)) {
    for (int r = 0; r < rows; ++r) {
      Block b;
      unpack<format>(from + r * row_bytes + i * source_bytes(format), b);
      put<format>(b, r, panel);
    }
  }
}

template <typename T>
void transpose(const uint8_t* from, int64_t row_bytes, int rows, int in, uint8_t* panel) {
  for (int r = 0; r < rows; ++r) {
    const uint8_t* row = from + r * row_bytes;
    for (int k = 0; k < in; ++k) {
      std::memcpy(panel + sizeof(T) * (kPanel * k + r), row + sizeof(T) * k, sizeof(T));
    }
  }
}

using Repack = void (*)(const uint8_t*, int64_t, int, int, uint8_t*);
constexpr Repack kRepack[] = {
    transpose<uint32_t>,           transpose<uint16_t>,           transpose<uint16_t>,
    repack_blocks<Format::kQ4_0>,  repack_blocks<Format::kQ4_1>,  repack_blocks<Format::kQ5_0>,
    repack_blocks<Format::kQ5_1>,  repack_blocks<Format::kQ8_0>,  repack_blocks<Format::kQ4K>,
    repack_blocks<Format::kQ5K>,   repack_blocks<Format::kQ6K>,
};

using PutCodes = void (*)(const uint8_t*, int, uint8_t*);
PutCodes put_codes_of(int bits) {
  switch (bits) {
    case 2: return put_codes<2>;
    case 3: return put_codes<3>;
    case 4: return put_codes<4>;
    case 5: return put_codes<5>;
    case 6: return put_codes<6>;
    default: return put_codes<8>;
  }
}

// Planar parts of a weight, each row by row.
struct Parts {
  const uint8_t* codes;   // [out, in], a byte each
  const uint8_t* scales;  // [out, spans], float16 or float32
  const uint8_t* zeros;   // [out, spans], or null
};

// 16 rows from `first` on, or what there are, into one panel, which is zero before.
void repack_planar(const Spec& spec, const Parts& from, int64_t first, int rows, int in,
                   uint8_t* panel) {
  const int size = spec.half ? 2 : 4, bits = planar_bits(spec.format);
  const int spans = static_cast<int>((in + spec.span - 1) / spec.span);
  const bool numbers = is_float(spec.format);
  const PutCodes put = put_codes_of(bits);
  const int64_t scales = scale_bytes(spec.format, spec.half);
  uint8_t* p = panel + sizeof(PlanarHeader);
  const auto put_scales = [&](int r, int i, uint8_t* to) {
    const int64_t at = (first + r) * spans + i;
    std::memcpy(to + size * r, from.scales + size * at, size);
    if (from.zeros != nullptr) to[size * kPanel + r] = from.zeros[at];
  };
  if (is_halved(spec.format, spec.span)) {
    for (int g = 0; g < in / kGroup; ++g, p += 2 * scales + 2 * bits * kGroup) {
      for (int r = 0; r < rows; ++r) {
        put_scales(r, 2 * g, p);
        put_scales(r, 2 * g + 1, p + scales);
        put(from.codes + (first + r) * in + kGroup * g, r, p + 2 * scales);
      }
    }
    return;
  }
  for (int i = 0; i < spans; ++i) {
    const int start = static_cast<int>(i * spec.span);
    const int end = start + spec.span < in ? static_cast<int>(start + spec.span) : in;
    uint8_t* codes = p + scales;
    for (int r = 0; r < rows; ++r) {
      put_scales(r, i, p);
      const uint8_t* row = from.codes + (first + r) * in + start;
      if (spec.format == Format::kLevels) {
        for (int k = 0; k < end - start; k += 2) codes[8 * k + r] = row[k] | row[k + 1] << 4;
      } else if (numbers) {
        for (int k = 0; k < end - start; ++k) codes[kPanel * k + r] = row[k];
      } else {
        for (int k = 0; k < end - start; k += kGroup) put(row + k, r, codes + 2 * bits * k);
      }
    }
    p = codes + 2 * bits * static_cast<int64_t>(end - start);
  }
}

}  // namespace
}  // namespace infer

// Bytes of a packed weight [out, in]: repack.py asks, so that the layout is written once.
extern "C" INFER_EXPORT int64_t infer_native_panel_bytes(int64_t spec, int64_t in) {
  return infer::panel_bytes(infer::Spec(spec), in);
}

// `to` is zeroed, [panels, panel_bytes]; the caller has checked everything.
extern "C" INFER_EXPORT void infer_native_repack(int format, const uint8_t* from, int64_t row_bytes,
                                                 int out, int in, uint8_t* to) {
  using namespace infer;
  const int64_t bytes = panel_bytes(Spec(format), in);
  parallel_for((out + kPanel - 1) / kPanel, [&](int begin, int end) {
    for (int64_t p = begin; p < end; ++p) {
      const int rows = out - p * kPanel < kPanel ? static_cast<int>(out - p * kPanel) : kPanel;
      kRepack[format](from + p * kPanel * row_bytes, row_bytes, rows, in, to + p * bytes);
    }
  });
}

// Likewise of planar parts (Parts above): `global` on every scale, `levels` [16] or null.
extern "C" INFER_EXPORT void infer_native_repack_planar(int64_t number, const uint8_t* codes,
                                                        const uint8_t* scales,
                                                        const uint8_t* zeros, float global,
                                                        const float* levels, int out, int in,
                                                        uint8_t* to) {
  using namespace infer;
  const Spec spec(number);
  const int64_t bytes = panel_bytes(spec, in);
  PlanarHeader header{};
  header.global = global;
  if (levels != nullptr) std::memcpy(header.levels, levels, sizeof header.levels);
  parallel_for((out + kPanel - 1) / kPanel, [&](int begin, int end) {
    for (int64_t p = begin; p < end; ++p) {
      const int rows = out - p * kPanel < kPanel ? static_cast<int>(out - p * kPanel) : kPanel;
      std::memcpy(to + p * bytes, &header, sizeof header);
      repack_planar(spec, {codes, scales, zeros}, p * kPanel, rows, in, to + p * bytes);
    }
  });
}
