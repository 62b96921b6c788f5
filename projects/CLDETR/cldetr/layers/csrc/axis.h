// Where a sample lies on one axis of a level: shared by the CPU and the CUDA kernels.
//
// The including file defines CLDETR_ISA, the namespace within cldetr of the kernels that it
// compiles: every instruction set has a copy of its own (see cpu/ms_deform_attn_kernel.h).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CLDETR_DEVICE __host__ __device__
#else
#define CLDETR_DEVICE
#endif

namespace cldetr::CLDETR_ISA {

// A sample on one axis.
template <typename T>
struct Axis {
  int32_t cell;  // its lower neighbour; with a border, counted from the border's cell
  int32_t step;  // cells from there to its higher neighbour
  T weight[2];   // of the lower and the higher neighbour
  T slope[2];    // derivatives of the weights by the location, in cells
};

// Places a location on an axis of `size` cells (a whole number).
//
// A location outside (-1, size) is moved to the end of that range: there each neighbour is outside
// the level or weighs nothing. NaN reaches the weights, and so the output, but never `cell`: a
// comparison with NaN is false. Counting from the border makes truncation round down.
//
// Without a border of zeros, what lies outside the level is another level's: a neighbour there is
// replaced by the cell inside and weighs nothing.
template <bool kBordered, typename T>
CLDETR_DEVICE inline Axis<T> place(T location, T size) {
  T at = location * size + T(0.5);
  const T slope = (at > T(0)) & (at < size + T(1)) ? T(1) : T(0);
  at = at < T(0) ? T(0) : at;
  at = at > size + T(1) ? size + T(1) : at;
  const int32_t cell = static_cast<int32_t>(at < size ? at : size);
  const T high_weight = at - static_cast<T>(cell);
  if (kBordered) return {cell, 1, {T(1) - high_weight, high_weight}, {-slope, slope}};
  const int32_t last = static_cast<int32_t>(size) - 1;
  const int32_t low = cell > 0 ? cell - 1 : 0;
  const int32_t high = cell < last ? cell : last;
  const T low_inside = cell > 0 ? T(1) : T(0);
  const T high_inside = cell <= last ? T(1) : T(0);
  return {low,
          high - low,
          {low_inside * (T(1) - high_weight), high_inside * high_weight},
          {low_inside * -slope, high_inside * slope}};
}

}  // namespace cldetr::CLDETR_ISA
