// The op on CUDA: checks, allocation and launch. Of CUDA it includes c10's headers only: ATen's
// want the headers of libraries that a toolkit may lack.

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "../checks.h"
#include "ms_deform_attn_launch.h"

namespace cldetr::cuda {
namespace {

Levels levels(const Geometry& geometry) {
  TORCH_CHECK_VALUE(geometry.sizes.levels <= kMaxLevels, "at most ", kMaxLevels,
                    " levels are supported on CUDA, got ", geometry.sizes.levels);
  Levels levels{};
  for (size_t l = 0; l < geometry.levels.size(); ++l) levels.level[l] = geometry.levels[l];
  return levels;
}

template <typename T>
Inputs<T> inputs(const Geometry& geometry, const at::Tensor& value, const at::Tensor& locations,
                 const at::Tensor& attention) {
  return {geometry.sizes, levels(geometry), value.const_data_ptr<T>(),
          locations.const_data_ptr<Accumulate<T>>(), attention.const_data_ptr<Accumulate<T>>()};
}

at::Tensor forward(const at::Tensor& value_in, const at::Tensor& spatial_shapes,
                   const at::Tensor& locations_in, const at::Tensor& attention_in) {
  const Geometry geometry = check_inputs(value_in, spatial_shapes, locations_in, attention_in);
  const Sizes& s = geometry.sizes;
  const c10::cuda::CUDAGuard guard(value_in.device());
  const at::Tensor value = value_in.contiguous();
  const at::Tensor locations = locations_in.contiguous(), attention = attention_in.contiguous();
  const at::Tensor output =
      at::empty({s.images, s.queries, s.heads * s.channels}, value.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, value.scalar_type(), "ms_deform_attn_cuda", [&] {
        launch_forward<scalar_t>(inputs<scalar_t>(geometry, value, locations, attention),
                                 output.mutable_data_ptr<scalar_t>(),
                                 c10::cuda::getCurrentCUDAStream());
      });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output_in,
                                                        const at::Tensor& value_in,
                                                        const at::Tensor& spatial_shapes,
                                                        const at::Tensor& locations_in,
                                                        const at::Tensor& attention_in) {
  at::globalContext().alertNotDeterministic("ms_deform_attn_backward_cuda");
  const Geometry geometry = check_inputs(value_in, spatial_shapes, locations_in, attention_in);
  check_grad_output(grad_output_in, value_in, geometry.sizes);
  const c10::cuda::CUDAGuard guard(value_in.device());
  const at::Tensor grad_output = grad_output_in.contiguous(), value = value_in.contiguous();
  const at::Tensor locations = locations_in.contiguous(), attention = attention_in.contiguous();
  const at::Tensor grad_value = at::zeros(value.sizes(), locations.options());
  const at::Tensor grad_locations = at::empty_like(locations);
  const at::Tensor grad_attention = at::empty_like(attention);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, value.scalar_type(), "ms_deform_attn_backward_cuda", [&] {
        using A = Accumulate<scalar_t>;
        const Gradients<scalar_t> gradients{
            grad_output.const_data_ptr<scalar_t>(), grad_value.mutable_data_ptr<A>(),
            grad_locations.mutable_data_ptr<A>(), grad_attention.mutable_data_ptr<A>()};
        launch_backward<scalar_t>(inputs<scalar_t>(geometry, value, locations, attention),
                                  gradients, c10::cuda::getCurrentCUDAStream());
      });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {grad_value.to(value.scalar_type()), grad_locations, grad_attention};
}

}  // namespace
}  // namespace cldetr::cuda

// The schemas are declared in ms_deform_attn.py.
TORCH_LIBRARY_IMPL(cldetr, CUDA, m) {
  m.impl("ms_deform_attn", &cldetr::cuda::forward);
  m.impl("ms_deform_attn_backward", &cldetr::cuda::backward);
}
