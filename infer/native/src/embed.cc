// infer_embed: rows of a packed weight as float32, for the embedding of tokens.
#include <cstring>

#include "activations.h"

namespace infer {
namespace {

namespace ffi = xla::ffi;

float from_f16(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31;
  uint32_t bits = sign | (exponent + 112) << 23 | static_cast<uint32_t>(h & 1023) << 13;
  if (exponent == 31) bits = sign | 0x7f800000 | static_cast<uint32_t>(h & 1023) << 13;
  float value;
  if (exponent == 0) {  // a subnormal counts units of 2^-24
    value = static_cast<float>(h & 1023) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

// Code k of one group of row `lane`; the inverse of put_codes in repack.cc.
template <int bits>
int code_at(const uint8_t* group, int lane, int k) {
  const int v = k / 4;
  const uint8_t* four = group + 4 * lane + k % 4;
  if constexpr (bits == 8) return four[64 * v];
  if constexpr (bits < 4) {
    const int low = four[64 * (v / 4)] >> 2 * (v % 4) & 3;
    return bits == 2 ? low : low | (four[128] >> v & 1) << 2;
  }
  int code = v < 4 ? four[64 * v] & 15 : four[64 * (v - 4)] >> 4;
  if constexpr (bits == 5) code |= (four[256] >> v & 1) << 4;
  if constexpr (bits == 6) code |= (four[256 + 64 * (v / 4)] >> 2 * (v % 4) & 3) << 4;
  return code;
}

template <int bits, bool has_min>
void row_of_32(const uint8_t* p, int lane, int in, float* y) {
  constexpr int kCodes = 64 * bits, kZero = has_min ? 0 : 1 << (bits - 1);
  for (int g = 0; g < in / kGroup; ++g, p += kCodes + (has_min ? 64 : 32)) {
    const float d = from_f16(p + kCodes + 2 * lane);
    const float m = has_min ? from_f16(p + kCodes + 32 + 2 * lane) : 0.0f;
    for (int k = 0; k < kGroup; ++k) {
      *y++ = d * static_cast<float>(code_at<bits>(p, lane, k) - kZero) + m;
    }
  }
}

template <int bits>
void row_of_k(const uint8_t* p, int lane, int in, float* y) {
  for (int block = 0; block < in / 256; ++block) {
    const float d = from_f16(p + 2 * lane), dmin = bits == 6 ? 0.0f : from_f16(p + 32 + 2 * lane);
    p += bits == 6 ? 32 : 64;
    for (int g = 0; g < 8; ++g, p += 64 * bits + 32) {
      const uint8_t first = p[64 * bits + lane], second = p[64 * bits + 16 + lane];
      for (int k = 0; k < kGroup; ++k) {
        const int code = code_at<bits>(p, lane, k);
        if constexpr (bits == 6) {
          const auto scale = static_cast<int8_t>(k < 16 ? first : second);
          *y++ = d * static_cast<float>(scale) * static_cast<float>(code - 32);
        } else {
          *y++ = d * static_cast<float>(first) * static_cast<float>(code) -
                 dmin * static_cast<float>(second);
        }
      }
    }
  }
}

using CodeAt = int (*)(const uint8_t*, int, int);
CodeAt code_at_of(int bits) {
  switch (bits) {
    case 2: return code_at<2>;
    case 3: return code_at<3>;
    case 4: return code_at<4>;
    case 5: return code_at<5>;
    case 6: return code_at<6>;
    default: return code_at<8>;
  }
}

float from_e4m3(uint8_t code) {
  const uint16_t h = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
  return from_f16(reinterpret_cast<const uint8_t*>(&h)) * 256.0f;
}

// The scale of row `lane` at p, which global does not change.
float scale_at(const Weight& w, const uint8_t* p, int lane) {
  if (w.half) return from_f16(p + 2 * lane);
  float scale;
  std::memcpy(&scale, p + 4 * lane, 4);
  return scale;
}

int zero_at(const Weight& w, const uint8_t* p, int lane) {
  return has_zero(w.format) ? p[(w.half ? 2 : 4) * kPanel + lane]
                            : 1 << (planar_bits(w.format) - 1);
}

void row_of_halves(const Weight& w, const uint8_t* p, int lane, float* y) {
  const int bits = planar_bits(w.format);
  const CodeAt code = code_at_of(bits);
  const int64_t scales = scale_bytes(w.format, w.half);
  p += sizeof(PlanarHeader);
  for (int g = 0; g < w.in / kGroup; ++g, p += 2 * scales + 2 * bits * kGroup) {
    for (int k = 0; k < kGroup; ++k) {
      const uint8_t* own = p + k / kHalfGroup * scales;
      const int value = code(p + 2 * scales, lane, k) - zero_at(w, own, lane);
      *y++ = static_cast<float>(value) * scale_at(w, own, lane);
    }
  }
}

void row_of_planar(const Weight& w, const uint8_t* p, int lane, float* y) {
  if (is_halved(w.format, w.span)) return row_of_halves(w, p, lane, y);
  const auto& header = *reinterpret_cast<const PlanarHeader*>(p);
  const int bits = planar_bits(w.format);
  const CodeAt code = code_at_of(bits);
  p += sizeof header;
  for (int start = 0; start < w.in; start += w.span) {
    float scale = scale_at(w, p, lane);
    const int zero = zero_at(w, p, lane);
    if (is_float(w.format)) scale *= header.global;
    p += scale_bytes(w.format, w.half);
    const int n = std::min(w.span, w.in - start);
    for (int k = 0; k < n; ++k) {
      float value;
      if (w.format == Format::kLevels) {
        value = header.levels[p[8 * (k & ~1) + lane] >> 4 * (k & 1) & 15];
      } else if (w.format == Format::kE4M3) {
        value = from_e4m3(p[kPanel * k + lane]);
      } else if (w.format == Format::kE5M2) {
        const uint8_t half[2] = {0, p[kPanel * k + lane]};
        value = from_f16(half);
      } else {
        value = static_cast<float>(code(p + 2 * bits * (k & ~31), lane, k & 31) - zero);
      }
      *y++ = value * scale;
    }
    p += 2 * bits * static_cast<int64_t>(n);
  }
}

void row_of_floats(Format format, const uint8_t* p, int lane, int in, float* y) {
  for (int k = 0; k < in; ++k) {
    const uint8_t* at = p + (format == Format::kF32 ? 4 : 2) * (kPanel * k + lane);
    uint32_t bits = 0;
    if (format == Format::kF16) {
      y[k] = from_f16(at);
    } else {
      std::memcpy(format == Format::kF32 ? reinterpret_cast<uint8_t*>(&bits)
                                         : reinterpret_cast<uint8_t*>(&bits) + 2,
                  at, format == Format::kF32 ? 4 : 2);
      std::memcpy(y + k, &bits, 4);
    }
  }
}

void unpack_row(const Weight& w, int row, float* y) {
  const uint8_t* p = w.panel(row / kPanel);
  const int lane = row % kPanel;
  if (is_planar(w.format)) return row_of_planar(w, p, lane, y);
  switch (w.format) {
    case Format::kQ4_0: return row_of_32<4, false>(p, lane, w.in, y);
    case Format::kQ4_1: return row_of_32<4, true>(p, lane, w.in, y);
    case Format::kQ5_0: return row_of_32<5, false>(p, lane, w.in, y);
    case Format::kQ5_1: return row_of_32<5, true>(p, lane, w.in, y);
    case Format::kQ8_0: return row_of_32<8, false>(p, lane, w.in, y);
    case Format::kQ4K: return row_of_k<4>(p, lane, w.in, y);
    case Format::kQ5K: return row_of_k<5>(p, lane, w.in, y);
    case Format::kQ6K: return row_of_k<6>(p, lane, w.in, y);
    default: return row_of_floats(w.format, p, lane, w.in, y);
  }
}

ffi::Error embed(ffi::AnyBuffer tokens, ffi::AnyBuffer data, ffi::Result<ffi::AnyBuffer> y,
                 int64_t format, int64_t out) {
  const auto dims = tokens.dimensions(), result = y->dimensions();
  if (tokens.element_type() != ffi::S32 || dims.size() != 1) {
    return invalid("tokens is %s; it must be int32 [T]", shape_text(tokens).c_str());
  }
  const int64_t in = result.size() == 2 ? result[1] : 0;
  INFER_CHECK(check_f32("result", *y, {dims[0], in}));
  Weight weight;
  INFER_CHECK(check_weight("weight", data, format, out, in, weight));
  const int32_t* ids = tokens.typed_data<int32_t>();
  float* to = y->typed_data<float>();
  parallel_for(static_cast<int>(dims[0]), [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      const int id = ids[t] < 0 ? 0 : ids[t] >= weight.out ? weight.out - 1 : ids[t];
      unpack_row(weight, id, to + t * in);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace infer

INFER_HANDLER(infer_embed, infer::embed,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<int64_t>("format")
                  .Attr<int64_t>("out"));
