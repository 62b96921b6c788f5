// The op on the CPU: checks, conversions, and tasks for the threads. See ms_deform_attn_body.h for
// what a task computes.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "../checks.h"
#include "ms_deform_attn_kernel.h"

namespace cldetr::cpu {
namespace {

// PyTorch's own choice of instruction set, so that ATEN_CPU_CAPABILITY=default holds here too.
template <typename T>
const Kernels<T>& kernels() {
  static const Kernels<T> chosen = [] {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX2" || capability == "AVX512") return avx2::kernels<T>();
#endif
    return baseline::kernels<T>();
  }();
  return chosen;
}

template <typename T>
Inputs<T> inputs(const Geometry& geometry, const at::Tensor& value, const at::Tensor& locations,
                 const at::Tensor& attention) {
  return {geometry.sizes, geometry.levels.data(), value.const_data_ptr<T>(),
          locations.const_data_ptr<T>(), attention.const_data_ptr<T>()};
}

// Like at::zeros_like, but a large block comes zeroed from the operating system, in huge pages
// where it has them. With few queries, touching new memory page by page, once to fill it with zeros
// and once to add to it, would take longer than the gradients.
at::Tensor new_zeros_like(const at::Tensor& tensor) {
  const size_t bytes = std::max<size_t>(tensor.nbytes(), 1);
  void* block = std::calloc(bytes, 1);
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "cannot allocate ", bytes, " bytes");
#if defined(__linux__)
  constexpr size_t kHugePage = size_t{2} << 20;
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes >= kHugePage) {
    const size_t skipped = (page - reinterpret_cast<uintptr_t>(block) % page) % page;
    madvise(static_cast<char*>(block) + skipped, bytes - skipped, MADV_HUGEPAGE);  // or not: advice
  }
#endif
  return at::from_blob(block, tensor.sizes(), std::free, tensor.options());
}

// Runs `task(index, scratch)` for every index, on all threads.
template <typename Task>
void run_tasks(int64_t count, size_t scratch_bytes, const Task& task) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const at::Tensor scratch = at::empty({static_cast<int64_t>(scratch_bytes)}, at::kByte);
    for (int64_t index = begin; index < end; ++index) task(index, scratch.mutable_data_ptr());
  });
}

// Splits images × heads further when there are fewer than threads.
int64_t parts_per_head(const Sizes& s) {
  const int64_t heads = std::max<int64_t>(s.images * s.heads, 1);
  return (at::get_num_threads() + heads - 1) / heads;
}

at::Tensor forward(const at::Tensor& value_in, const at::Tensor& spatial_shapes,
                   const at::Tensor& locations_in, const at::Tensor& attention_in) {
  const Geometry geometry = check_inputs(value_in, spatial_shapes, locations_in, attention_in);
  const Sizes& s = geometry.sizes;
  // Half precision is computed in float32: the cast is small beside the sampling.
  const at::Tensor value = value_in.to(locations_in.scalar_type()).contiguous();
  const at::Tensor locations = locations_in.contiguous(), attention = attention_in.contiguous();
  const at::Tensor output =
      at::empty({s.images, s.queries, s.heads * s.channels}, value.options());

  AT_DISPATCH_FLOATING_TYPES(value.scalar_type(), "ms_deform_attn_cpu", [&] {
    const Kernels<scalar_t>& kernel = kernels<scalar_t>();
    const Inputs<scalar_t> in = inputs<scalar_t>(geometry, value, locations, attention);
    scalar_t* out = output.mutable_data_ptr<scalar_t>();
    const int64_t parts = parts_per_head(s);
    const int64_t part = (s.queries + parts - 1) / parts;
    run_tasks(s.images * s.heads * parts, kernel.scratch_bytes(in, {0, s.levels}, false),
              [&](int64_t index, void* scratch) {
                const int64_t head = index / parts % s.heads, image = index / parts / s.heads;
                const int64_t begin = std::min(index % parts * part, s.queries);
                const Range queries{begin, std::min(begin + part, s.queries)};
                kernel.forward(in, out, image, head, queries, scratch);
              });
  });
  return output.to(value_in.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output_in,
                                                        const at::Tensor& value_in,
                                                        const at::Tensor& spatial_shapes,
                                                        const at::Tensor& locations_in,
                                                        const at::Tensor& attention_in) {
  const Geometry geometry = check_inputs(value_in, spatial_shapes, locations_in, attention_in);
  const Sizes& s = geometry.sizes;
  check_grad_output(grad_output_in, value_in, s);
  const at::ScalarType type = locations_in.scalar_type();
  const at::Tensor grad_output = grad_output_in.to(type).contiguous();
  const at::Tensor value = value_in.to(type).contiguous();
  const at::Tensor locations = locations_in.contiguous(), attention = attention_in.contiguous();
  const at::Tensor grad_locations = at::empty_like(locations);
  const at::Tensor grad_attention = at::empty_like(attention);
  at::Tensor grad_value;

  AT_DISPATCH_FLOATING_TYPES(type, "ms_deform_attn_backward_cpu", [&] {
    const Kernels<scalar_t>& kernel = kernels<scalar_t>();
    const Inputs<scalar_t> in = inputs<scalar_t>(geometry, value, locations, attention);
    grad_value = kernel.packs(s) ? at::empty_like(value) : new_zeros_like(value);
    const Gradients<scalar_t> gradients{
        grad_output.const_data_ptr<scalar_t>(), grad_value.mutable_data_ptr<scalar_t>(),
        grad_locations.mutable_data_ptr<scalar_t>(), grad_attention.mutable_data_ptr<scalar_t>()};
    // A cell's gradient is summed by one task, query by query: the sum depends neither on the
    // number of threads nor on whether levels are tasks of their own.
    const int64_t parts = parts_per_head(s) > 1 ? std::max<int64_t>(s.levels, 1) : 1;
    const auto levels = [&](int64_t part) {
      return parts > 1 ? Range{part, part + 1} : Range{0, s.levels};
    };
    size_t scratch_bytes = 0;
    for (int64_t part = 0; part < parts; ++part) {
      scratch_bytes = std::max(scratch_bytes, kernel.scratch_bytes(in, levels(part), true));
    }
    run_tasks(s.images * s.heads * parts, scratch_bytes, [&](int64_t index, void* scratch) {
      const int64_t head = index / parts % s.heads, image = index / parts / s.heads;
      kernel.backward(in, gradients, image, head, levels(index % parts), scratch);
    });
  });
  return {grad_value.to(value_in.scalar_type()), grad_locations, grad_attention};
}

}  // namespace
}  // namespace cldetr::cpu

// The schemas are declared in ms_deform_attn.py.
TORCH_LIBRARY_IMPL(cldetr, CPU, m) {
  m.impl("ms_deform_attn", &cldetr::cpu::forward);
  m.impl("ms_deform_attn_backward", &cldetr::cpu::backward);
}
