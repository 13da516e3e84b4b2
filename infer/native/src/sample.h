// From logits to log-sum-exp and tokens: the data, and the kernels that each instruction set has.
//
//     s_v = (x_v - max x) / T
//     kept: s_v above the edge of top_k and top_p, ties up to the id `last`, and s_v >= floor
//     token = argmax over the kept v of s_v + gumbel_v
//
// A NaN counts as the largest logit.  Where the largest is no finite number nothing is kept, and the
// token of a draw is 0; a greedy row's is the first id of the largest, or 0 if all are -inf.
//
// What the plain forms are: infer/sampling/draw.py.
#pragma once

#include <cstdint>

namespace infer {

// Logits that are summed up together: fixed, so that the order of the sums is.
constexpr int kLogitSegment = 4096;

struct LogitSum {
  float max;
  float sum;  // of exp(logit - max); NaN if there is a NaN
};

struct Best {
  float score;
  int32_t id;  // the lowest of the best, -1 if all scores are -inf
};

// What a row draws with.
struct Draw {
  float top;          // the row's largest logit
  float temperature;  // > 0
  float floor;        // log(min_p)
  float edge;         // the lowest s that top_k and top_p keep, -inf for all
  int32_t last;       // the last id that is kept of those on the edge
  uint32_t key[2];    // of threefry
};

// s = (x - top) / temperature in bins of equal width: bin 0 begins at 0, the last holds all below
// -kScaledRange.
constexpr int kBins = 1024;
constexpr float kScaledRange = 16.0f;
struct Bins {
  int64_t count[kBins + 1];
  double mass[kBins + 1];  // the sum of exp(s)
};

struct SampleKernels {
  LogitSum (*sum)(const float* x, int n);

  // The largest of x [n]; the first NaN if there is one.
  Best (*top)(const float* x, int n);

  // Count the s of x [n] into `bins`.
  void (*count)(const float* x, int n, const Draw& draw, Bins& bins);

  // Write the s of one bin and their indices; returns how many.  NaN is written as -inf.
  int (*gather)(const float* x, int n, const Draw& draw, int bin, float* s, int32_t* index);

  // The best score of the ids [first, first + n), whose logits are x.
  Best (*draw)(const float* x, int n, int first, const Draw& draw);
};

const SampleKernels& sample_kernels_avx2();
const SampleKernels& sample_kernels_avx512();

}  // namespace infer
