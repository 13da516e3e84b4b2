#include "sample_kernels.h"

const infer::SampleKernels& infer::sample_kernels_avx512() { return infer::avx512::kSampleKernels; }
