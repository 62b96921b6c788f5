// What both devices require of the op's arguments; ms_deform_attn.py holds its twin in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "geometry.h"

namespace cldetr {

struct Geometry {
  Sizes sizes;
  std::vector<Level> levels;
};

// Locations and attention weights are never half precision: between 0.5 and 1 a float16 moves in
// steps of 1/2048, a good part of a cell.
inline at::ScalarType coordinate_type(at::ScalarType value_type) {
  return value_type == at::kDouble ? at::kDouble : at::kFloat;
}

// The kernels address the cells of one image with 32 bits. The bound covers how the CPU packs them:
// inside a border, channels padded to whole vectors, gradients beside values.
inline void check_addressable(const Geometry& geometry) {
  constexpr int64_t kWidestVector = 8;
  const Sizes& s = geometry.sizes;
  const int64_t cell = std::max(s.heads * s.channels, 2 * (s.channels + kWidestVector));
  int64_t cells = 0;
  for (const Level& level : geometry.levels) {
    cells += (level.height + int64_t{2}) * (level.width + int64_t{2});
  }
  TORCH_CHECK_VALUE(cells <= std::numeric_limits<int32_t>::max() / cell,
                    "one image's value is too large: ", cells, " cells of ", cell, " elements");
}

inline Geometry check_inputs(const at::Tensor& value, const at::Tensor& spatial_shapes,
                             const at::Tensor& locations, const at::Tensor& attention) {
  TORCH_CHECK_VALUE(value.dim() == 4, "value must be (N, S, M, D), got ", value.sizes());
  TORCH_CHECK_VALUE(spatial_shapes.dim() == 2 && spatial_shapes.size(1) == 2,
                    "spatial_shapes must be (L, 2), got ", spatial_shapes.sizes());
  TORCH_CHECK_VALUE(spatial_shapes.scalar_type() == at::kLong,
                    "spatial_shapes must be int64, got ", spatial_shapes.scalar_type());
  TORCH_CHECK_VALUE(locations.dim() == 6 && locations.size(5) == 2,
                    "sampling_locations must be (N, Q, M, L, P, 2), got ", locations.sizes());
  const Sizes s{value.size(0),     value.size(1),          value.size(2),    value.size(3),
                locations.size(1), spatial_shapes.size(0), locations.size(4)};
  TORCH_CHECK_VALUE(locations.size(0) == s.images && locations.size(2) == s.heads &&
                        locations.size(3) == s.levels,
                    "sampling_locations ", locations.sizes(), " do not fit value ", value.sizes(),
                    " and ", s.levels, " levels");
  TORCH_CHECK_VALUE(attention.sizes() == locations.sizes().slice(0, 5), "attention_weights ",
                    attention.sizes(), " do not fit sampling_locations ", locations.sizes());

  const at::ScalarType type = value.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble || type == at::kHalf ||
                        type == at::kBFloat16,
                    "value must be float32, float64, float16 or bfloat16, got ", type);
  const at::ScalarType expected = coordinate_type(type);
  TORCH_CHECK_VALUE(locations.scalar_type() == expected && attention.scalar_type() == expected,
                    "for a value of ", type, ", sampling_locations and attention_weights must be ",
                    expected, ", got ", locations.scalar_type(), " and ",
                    attention.scalar_type());
  TORCH_CHECK_VALUE(
      locations.device() == value.device() && attention.device() == value.device(),
      "value, sampling_locations and attention_weights must be on one device, got ",
      value.device(), ", ", locations.device(), " and ", attention.device());
  TORCH_CHECK_VALUE(spatial_shapes.is_cpu() || spatial_shapes.device() == value.device(),
                    "spatial_shapes must be on the CPU or with value, got ",
                    spatial_shapes.device());

  // On the host: free when the tensor is there already, one synchronisation when it is not.
  const at::Tensor shapes = spatial_shapes.to(at::kCPU).contiguous();
  const int64_t* size = shapes.const_data_ptr<int64_t>();
  constexpr int64_t kMostCells = std::numeric_limits<int32_t>::max();
  constexpr int64_t kLongest = int64_t{1} << 24;  // what a float counts exactly
  Geometry geometry{s, {}};
  int64_t cells = 0;
  for (int64_t l = 0; l < s.levels; ++l) {
    const int64_t height = size[2 * l], width = size[2 * l + 1];
    TORCH_CHECK_VALUE(height > 0 && width > 0 && height <= kLongest && width <= kLongest &&
                          height <= kMostCells / width,
                      "level ", l, " has no valid size: ", height, " x ", width);
    geometry.levels.push_back({cells, static_cast<int32_t>(height), static_cast<int32_t>(width)});
    cells += height * width;
  }
  TORCH_CHECK_VALUE(cells == s.cells, "value has ", s.cells, " cells, spatial_shapes make ", cells);
  check_addressable(geometry);
  return geometry;
}

inline void check_grad_output(const at::Tensor& grad_output, const at::Tensor& value,
                              const Sizes& s) {
  const bool fits = grad_output.dim() == 3 && grad_output.size(0) == s.images &&
                    grad_output.size(1) == s.queries &&
                    grad_output.size(2) == s.heads * s.channels;
  TORCH_CHECK_VALUE(fits, "grad_output ", grad_output.sizes(), " is not (", s.images, ", ",
                    s.queries, ", ", s.heads * s.channels, ")");
  TORCH_CHECK_VALUE(grad_output.scalar_type() == value.scalar_type() &&
                        grad_output.device() == value.device(),
                    "grad_output must be of value's type and on its device");
}

}  // namespace cldetr
