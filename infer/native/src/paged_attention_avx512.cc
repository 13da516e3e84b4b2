#include "paged_attention_kernels.h"

const infer::AttentionKernels& infer::attention_kernels_avx512() {
  return infer::avx512::kAttentionKernels;
}
