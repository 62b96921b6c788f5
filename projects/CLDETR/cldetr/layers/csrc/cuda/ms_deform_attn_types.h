// What the kernels and the code that launches them share.
#pragma once

#include "../geometry.h"

namespace cldetr::cuda {

constexpr int kMaxLevels = 16;

// Passed by value: it lies in constant memory, and needs neither an allocation nor a copy.
struct Levels {
  Level level[kMaxLevels];
};

// Sums, locations and attention weights are float32, except for double.
template <typename T>
struct Accumulated {
  using type = float;
};
template <>
struct Accumulated<double> {
  using type = double;
};
template <typename T>
using Accumulate = typename Accumulated<T>::type;

}  // namespace cldetr::cuda
