// The kernels for every processor of the architecture.

#define CLDETR_ISA cpu::baseline
#include "ms_deform_attn_body.h"

namespace cldetr::cpu {

template <>
Kernels<float> baseline_kernels() {
  return baseline::kernels<float>();
}

template <>
Kernels<double> baseline_kernels() {
  return baseline::kernels<double>();
}

}  // namespace cldetr::cpu
