#include "gemm_amx.h"

const infer::Kernels& infer::kernels_avx512() { return infer::avx512::kKernels; }
const infer::Kernels& infer::kernels_amx() { return infer::avx512::kAmxKernels; }
