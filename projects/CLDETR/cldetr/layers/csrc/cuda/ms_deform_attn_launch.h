// Launches the kernels; implemented in ms_deform_attn_launch.cu, which includes nothing of ATen: it
// is compiled once per GPU architecture, and ATen's headers would take most of that time.
#pragma once

#include <cuda_runtime_api.h>

#include "ms_deform_attn_types.h"

namespace cldetr::cuda {

// Contiguous tensors on the current device, with the shapes given in ms_deform_attn.py.
template <typename T>
struct Inputs {
  Sizes sizes;
  Levels levels;
  const T* value;
  const Accumulate<T>* locations;
  const Accumulate<T>* attention;
};

// `value` must hold zeros; it is accumulated in float32, also for half precision.
template <typename T>
struct Gradients {
  const T* output;
  Accumulate<T>* value;
  Accumulate<T>* locations;
  Accumulate<T>* attention;
};

template <typename T>
void launch_forward(const Inputs<T>& in, T* output, cudaStream_t stream);

template <typename T>
void launch_backward(const Inputs<T>& in, const Gradients<T>& gradients, cudaStream_t stream);

}  // namespace cldetr::cuda
