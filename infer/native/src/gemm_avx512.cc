#include "gemm_kernels.h"

const infer::Kernels& infer::kernels_avx512() { return infer::avx512::kKernels; }
