// The kernels for processors with AVX2 and FMA; compiled with these enabled, whatever the default.

#if defined(__x86_64__)

#define CLDETR_ISA cpu::avx2
#include "ms_deform_attn_body.h"

namespace cldetr::cpu {

template <>
Kernels<float> avx2_kernels() {
  return avx2::kernels<float>();
}

template <>
Kernels<double> avx2_kernels() {
  return avx2::kernels<double>();
}

}  // namespace cldetr::cpu

#endif
