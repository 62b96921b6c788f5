// The CUDA kernels' own source, compiled as C++ and callable through ctypes.

#include "cuda_shim.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "cuda/ms_deform_attn_kernels.cuh"

using namespace cldetr;
using namespace cldetr::cuda;

namespace {

char error[256];

struct Problem {
  Sizes sizes;
  Levels levels;
};

Problem problem(const int64_t* sizes, const int64_t* shapes) {
  Problem p{{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]}, {}};
  int64_t first = 0;
  for (int64_t l = 0; l < p.sizes.levels; ++l) {
    const int32_t height = static_cast<int32_t>(shapes[2 * l]);
    const int32_t width = static_cast<int32_t>(shapes[2 * l + 1]);
    p.levels.level[l] = {first, height, width};
    first += int64_t{height} * width;
  }
  return p;
}

// `most_blocks` makes the grid smaller than the work.
template <typename T, int kVector>
const char* forward(const int64_t* sizes, const int64_t* shapes, unsigned most_blocks,
                    const void* value, const void* locations, const void* attention,
                    void* output) {
  const Problem p = problem(sizes, shapes);
  const int64_t threads = forward_threads(p.sizes, kVector);
  const unsigned blocks = std::min(grid_size(threads), most_blocks);
  shim::launch(blocks, kThreads, [&] {
    forward_kernel<T, kVector>(p.sizes, p.levels, threads, static_cast<const T*>(value),
                               static_cast<const Accumulate<T>*>(locations),
                               static_cast<const Accumulate<T>*>(attention),
                               static_cast<T*>(output));
  });
  return nullptr;
}

template <typename T, int kVector>
const char* backward(const int64_t* sizes, const int64_t* shapes, unsigned most_blocks,
                     const void* grad_output, const void* value, const void* locations,
                     const void* attention, void* grad_value, void* grad_locations,
                     void* grad_attention) {
  using A = Accumulate<T>;
  const Problem p = problem(sizes, shapes);
  const unsigned blocks = std::min(grid_size(backward_threads(p.sizes, kVector)), most_blocks);
  try {
    shim::launch(blocks, kThreads, [&] {
      backward_kernel<T, kVector>(p.sizes, p.levels, backward_lanes(p.sizes, kVector),
                                  static_cast<const T*>(grad_output), static_cast<const T*>(value),
                                  static_cast<const A*>(locations),
                                  static_cast<const A*>(attention), static_cast<A*>(grad_value),
                                  static_cast<A*>(grad_locations),
                                  static_cast<A*>(grad_attention));
    });
  } catch (const std::exception& failure) {
    snprintf(error, sizeof(error), "%s", failure.what());
    return error;
  }
  return nullptr;
}

}  // namespace

// forward_<type>_<narrow or wide>, backward_…: null, or what went wrong.
#define EXPORT(NAME, T, VECTOR)                                                             \
  extern "C" const char* forward_##NAME(const int64_t* sizes, const int64_t* shapes,        \
                                        unsigned blocks, const void* value, const void* x,  \
                                        const void* a, void* output) {                      \
    return forward<T, VECTOR>(sizes, shapes, blocks, value, x, a, output);                  \
  }                                                                                         \
  extern "C" const char* backward_##NAME(                                                   \
      const int64_t* sizes, const int64_t* shapes, unsigned blocks, const void* grad,       \
      const void* value, const void* x, const void* a, void* dv, void* dx, void* da) {      \
    return backward<T, VECTOR>(sizes, shapes, blocks, grad, value, x, a, dv, dx, da);       \
  }
EXPORT(float32_narrow, float, 1)
EXPORT(float32_wide, float, kWidest<float>)
EXPORT(float64_narrow, double, 1)
EXPORT(float64_wide, double, kWidest<double>)
EXPORT(float16_narrow, c10::Half, 1)
EXPORT(float16_wide, c10::Half, kWidest<c10::Half>)
EXPORT(bfloat16_narrow, c10::BFloat16, 1)
EXPORT(bfloat16_wide, c10::BFloat16, kWidest<c10::BFloat16>)
