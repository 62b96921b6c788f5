// The CUDA kernels. Plain enough that the tests also compile them as C++ and run them on the CPU
// (tests/layers/cuda_shim.h); so this file includes nothing of CUDA or PyTorch.
#pragma once

#include "ms_deform_attn_types.h"

#define CLDETR_ISA cuda
#include "../axis.h"

namespace cldetr::cuda {

constexpr int kThreads = 256;  // per block
// Blocks that a multiprocessor holds at least. With three, no kernel spills registers; left to
// itself the compiler spills some to fit a fourth (benchmarks/kernel_registers.py).
constexpr int kResidentBlocks = 3;
constexpr int kWarp = 32;

// Neighbouring channels that one thread moves at once.
template <typename T, int kVector>
struct alignas(sizeof(T) * kVector) Pack {
  T channel[kVector];
};

// Divides indices; in 32 bits where they fit, as 64 take some hundred instructions.
__device__ inline int64_t divide(int64_t dividend, int64_t divisor, int64_t& remainder) {
  if (((dividend | divisor) >> 32) == 0) {
    const uint32_t quotient = static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
    remainder = dividend - quotient * divisor;
    return quotient;
  }
  const int64_t quotient = dividend / divisor;
  remainder = dividend - quotient * divisor;
  return quotient;
}

// A sample's four neighbours: 0 upper left, 1 upper right, 2 lower left, 3 lower right. Offsets are
// in elements from an image's first cell, and fit 32 bits: more would cost registers.
template <typename A>
struct Neighbours {
  Axis<A> x;
  Axis<A> y;
  int32_t upper_left;
  int32_t right;
  int32_t down;

  __device__ Neighbours(const Level& level, const A* location, int32_t cell_stride)
      : x(place<false>(location[0], static_cast<A>(level.width))),
        y(place<false>(location[1], static_cast<A>(level.height))) {
    const int32_t first = static_cast<int32_t>(level.first);
    upper_left = (first + y.cell * level.width + x.cell) * cell_stride;
    right = x.step * cell_stride;
    down = y.step * level.width * cell_stride;
  }

  __device__ int32_t offset(int neighbour) const {
    return upper_left + (neighbour % 2 == 1 ? right : 0) + (neighbour / 2 == 1 ? down : 0);
  }

  __device__ A weight(int neighbour) const {
    return y.weight[neighbour / 2] * x.weight[neighbour % 2];
  }
};

// One thread computes kVector channels of one query and head. `threads` is the number of threads
// with work; where the grid is smaller, threads take several pieces.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    forward_kernel(const Sizes s, const Levels levels, const int64_t threads,
                   const T* __restrict__ value, const Accumulate<T>* __restrict__ locations,
                   const Accumulate<T>* __restrict__ attention, T* __restrict__ output) {
  using A = Accumulate<T>;
  using Channels = Pack<T, kVector>;
  const int32_t cell_stride = static_cast<int32_t>(s.heads * s.channels);
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < threads;
       index += grid) {
    int64_t block, query, head;
    const int64_t row = divide(index, s.channels / kVector, block);  // (image, query, head)
    const int64_t image = divide(divide(row, s.heads, head), s.queries, query);
    const T* cells = value + image * s.cells * cell_stride + head * s.channels + block * kVector;
    int64_t sample = row * s.levels * s.points;
    A sum[kVector] = {};
    for (int l = 0; l < s.levels; ++l) {
      for (int p = 0; p < s.points; ++p, ++sample) {
        const Neighbours<A> neighbours(levels.level[l], locations + 2 * sample, cell_stride);
        const A a = attention[sample];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const Channels v = *reinterpret_cast<const Channels*>(cells + neighbours.offset(n));
          const A weight = a * neighbours.weight(n);
#pragma unroll
          for (int c = 0; c < kVector; ++c) sum[c] += weight * static_cast<A>(v.channel[c]);
        }
      }
    }
    Channels result;
#pragma unroll
    for (int c = 0; c < kVector; ++c) result.channel[c] = static_cast<T>(sum[c]);
    *reinterpret_cast<Channels*>(output + row * s.channels + block * kVector) = result;
  }
}

// Whether four float32 can be added at once: from compute capability 9.0 on.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900) || defined(CLDETR_SHIM)
constexpr bool kVectorAtomics = true;
#else
constexpr bool kVectorAtomics = false;
#endif

// Adds kVector neighbouring channels to global memory.
template <int kVector, typename A>
__device__ inline void atomic_add(A* to, const A (&addend)[kVector]) {
  if constexpr (kVectorAtomics && sizeof(A) == sizeof(float) && kVector % 4 == 0) {
#pragma unroll
    for (int c = 0; c < kVector; c += 4) {
      atomicAdd(reinterpret_cast<float4*>(to + c),
                make_float4(addend[c], addend[c + 1], addend[c + 2], addend[c + 3]));
    }
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) atomicAdd(to + c, addend[c]);
  }
}

// A group of `lanes` threads (a power of two, at most a warp) takes one query and head; its threads
// share the channels. So the gradients of locations and attention weights are sums within a group,
// and only the gradient of the value, which queries share, needs atomic additions.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    backward_kernel(const Sizes s, const Levels levels, const int lanes,
                    const T* __restrict__ grad_output, const T* __restrict__ value,
                    const Accumulate<T>* __restrict__ locations,
                    const Accumulate<T>* __restrict__ attention,
                    Accumulate<T>* __restrict__ grad_value,
                    Accumulate<T>* __restrict__ grad_locations,
                    Accumulate<T>* __restrict__ grad_attention) {
  using A = Accumulate<T>;
  using Channels = Pack<T, kVector>;
  const int32_t cell_stride = static_cast<int32_t>(s.heads * s.channels);
  const int lane = threadIdx.x % lanes;
  // Groups of one warp may leave the loop at different times: each names its own threads only.
  const unsigned group = (lanes == kWarp ? ~0u : (1u << lanes) - 1)
                         << (threadIdx.x % kWarp / lanes * lanes);
  const int64_t rows = s.images * s.queries * s.heads;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kThreads / lanes);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
       row < rows; row += groups) {
    int64_t query, head;
    const int64_t image = divide(divide(row, s.heads, head), s.queries, query);
    const int64_t first = image * s.cells * cell_stride + head * s.channels;
    int64_t sample = row * s.levels * s.points;
    for (int l = 0; l < s.levels; ++l) {
      for (int p = 0; p < s.points; ++p, ++sample) {
        const Neighbours<A> neighbours(levels.level[l], locations + 2 * sample, cell_stride);
        const Axis<A>&x = neighbours.x, &y = neighbours.y;
        const A a = attention[sample];
        A grad_a = 0, grad_x = 0, grad_y = 0;
        for (int32_t channel = lane * kVector; channel < s.channels; channel += lanes * kVector) {
          const Channels g =
              *reinterpret_cast<const Channels*>(grad_output + row * s.channels + channel);
          A dots[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int32_t at = neighbours.offset(n) + channel;
            const Channels v = *reinterpret_cast<const Channels*>(value + first + at);
            const A weight = a * neighbours.weight(n);
            A addend[kVector];
            dots[n] = 0;
#pragma unroll
            for (int c = 0; c < kVector; ++c) {
              const A gradient = static_cast<A>(g.channel[c]);
              dots[n] += gradient * static_cast<A>(v.channel[c]);
              addend[c] = gradient * weight;
            }
            // Neighbours outside the level weigh nothing.
            if (weight != A(0)) atomic_add<kVector>(grad_value + first + at, addend);
          }
          const A upper = x.weight[0] * dots[0] + x.weight[1] * dots[1];
          const A lower = x.weight[0] * dots[2] + x.weight[1] * dots[3];
          const A upper_slope = x.slope[0] * dots[0] + x.slope[1] * dots[1];
          const A lower_slope = x.slope[0] * dots[2] + x.slope[1] * dots[3];
          grad_a += y.weight[0] * upper + y.weight[1] * lower;
          grad_x += y.weight[0] * upper_slope + y.weight[1] * lower_slope;
          grad_y += y.slope[0] * upper + y.slope[1] * lower;
        }
        for (int step = lanes / 2; step > 0; step /= 2) {
          grad_a += __shfl_xor_sync(group, grad_a, step);
          grad_x += __shfl_xor_sync(group, grad_x, step);
          grad_y += __shfl_xor_sync(group, grad_y, step);
        }
        if (lane == 0) {
          grad_attention[sample] = grad_a;
          grad_locations[2 * sample] = a * static_cast<A>(levels.level[l].width) * grad_x;
          grad_locations[2 * sample + 1] = a * static_cast<A>(levels.level[l].height) * grad_y;
        }
      }
    }
  }
}

// How to launch them.

// Channels that a thread moves at once when head size and addresses allow it: 16 bytes.
constexpr int kWidestBytes = 16;
template <typename T>
constexpr int kWidest = kWidestBytes / static_cast<int>(sizeof(T));

inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kWidestBytes == 0;
}

inline int64_t forward_threads(const Sizes& s, int vector) {
  return s.images * s.queries * s.heads * (s.channels / vector);
}

inline int backward_lanes(const Sizes& s, int vector) {
  int lanes = 1;
  while (lanes < kWarp && lanes < s.channels / vector) lanes *= 2;
  return lanes;
}

inline int64_t backward_threads(const Sizes& s, int vector) {
  return s.images * s.queries * s.heads * backward_lanes(s, vector);
}

inline unsigned grid_size(int64_t threads) {
  constexpr int64_t kMost = int64_t{1} << 20;
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}

}  // namespace cldetr::cuda
