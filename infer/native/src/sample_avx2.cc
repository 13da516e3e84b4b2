#include "sample_kernels.h"

const infer::SampleKernels& infer::sample_kernels_avx2() { return infer::avx2::kSampleKernels; }
