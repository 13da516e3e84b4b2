#include "gemm_kernels.h"

const infer::Kernels& infer::kernels_avx2() { return infer::avx2::kKernels; }
