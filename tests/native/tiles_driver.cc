// The tile interface by itself, as a shared library for tests/native/test_amx.py.
#include <cstring>

#include "tiles.h"

namespace tiles = infer::tiles;

// sums [m, n] += x [m, 4k] w [k, 4n] as one instruction computes it; strides of `stride` bytes.
extern "C" void product(const int8_t* x, const int8_t* w, int32_t* sums, int m, int k, int n,
                        int64_t stride) {
  tiles::Config config{};
  config.palette = 1;
  const int rows[3] = {m, m, k}, bytes[3] = {4 * n, 4 * k, 4 * n};
  for (int i = 0; i < 3; ++i) {
    config.rows[i] = static_cast<uint8_t>(rows[i]);
    config.bytes[i] = static_cast<uint16_t>(bytes[i]);
  }
  tiles::configure(config);
  tiles::load<0>(sums, stride);
  tiles::load<1>(x, stride);
  tiles::load<2>(w, stride);
  tiles::dot<0, 1, 2>();
  tiles::store<0>(sums, stride);
  tiles::release();
}

// What a processor refuses, by number.
extern "C" void refused(int what) {
  tiles::Config config{};
  config.palette = what == 0 ? 2 : 1;
  for (int i = 0; i < 3; ++i) {
    config.rows[i] = what == 1 ? 17 : 4;
    config.bytes[i] = 16;
  }
  if (what == 2) config.rows[2] = 3;  // of w, whose rows are a quarter of x's bytes
  tiles::configure(config);
  if (what == 3) tiles::zero<5>();
  if (what == 4) tiles::release();
  tiles::dot<0, 1, 2>();
}

// Every instruction, for a disassembler.
extern "C" void listing(const tiles::Config& config, void* p, int64_t stride) {
  tiles::configure(config);
  tiles::load<0>(p, stride);
  tiles::load<5>(p, stride);
  tiles::load<7>(p, stride);
  tiles::zero<0>();
  tiles::zero<7>();
  tiles::dot<0, 4, 5>();
  tiles::dot<3, 6, 7>();
  tiles::dot<7, 1, 0>();
  tiles::store<0>(p, stride);
  tiles::store<7>(p, stride);
  tiles::release();
}
