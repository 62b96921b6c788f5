#include "ms_deform_attn_launch.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "ms_deform_attn_kernels.cuh"

namespace cldetr::cuda {
namespace {

template <typename T, int kVector>
void forward(const Inputs<T>& in, T* output, cudaStream_t stream) {
  const Sizes& s = in.sizes;
  const int64_t threads = forward_threads(s, kVector);
  if (threads == 0) return;
  forward_kernel<T, kVector><<<grid_size(threads), kThreads, 0, stream>>>(
      s, in.levels, threads, in.value, in.locations, in.attention, output);
}

template <typename T, int kVector>
void backward(const Inputs<T>& in, const Gradients<T>& gradients, cudaStream_t stream) {
  const Sizes& s = in.sizes;
  const int64_t threads = backward_threads(s, kVector);
  if (threads == 0) return;
  backward_kernel<T, kVector><<<grid_size(threads), kThreads, 0, stream>>>(
      s, in.levels, backward_lanes(s, kVector), gradients.output, in.value, in.locations,
      in.attention, gradients.value, gradients.locations, gradients.attention);
}

}  // namespace

template <typename T>
void launch_forward(const Inputs<T>& in, T* output, cudaStream_t stream) {
  const bool wide =
      in.sizes.channels % kWidest<T> == 0 && is_aligned(in.value) && is_aligned(output);
  (wide ? &forward<T, kWidest<T>> : &forward<T, 1>)(in, output, stream);
}

template <typename T>
void launch_backward(const Inputs<T>& in, const Gradients<T>& gradients, cudaStream_t stream) {
  const bool wide = in.sizes.channels % kWidest<T> == 0 && is_aligned(in.value) &&
                    is_aligned(gradients.output) && is_aligned(gradients.value);
  (wide ? &backward<T, kWidest<T>> : &backward<T, 1>)(in, gradients, stream);
}

#define CLDETR_INSTANTIATE(T)                                                  \
  template void launch_forward<T>(const Inputs<T>&, T*, cudaStream_t);         \
  template void launch_backward<T>(const Inputs<T>&, const Gradients<T>&, cudaStream_t);
CLDETR_INSTANTIATE(float)
CLDETR_INSTANTIATE(double)
CLDETR_INSTANTIATE(c10::Half)
CLDETR_INSTANTIATE(c10::BFloat16)
#undef CLDETR_INSTANTIATE

}  // namespace cldetr::cuda
