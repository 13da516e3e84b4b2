#include "paged_attention_kernels.h"

const infer::AttentionKernels& infer::attention_kernels_avx2() {
  return infer::avx2::kAttentionKernels;
}
