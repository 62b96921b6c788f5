// One head's cells, as the sampling loops see them: packed, or in place.
//
// In the value tensor the cells of one head lie M·D elements apart. Sampled there, they fall into
// a few sets of the cache, and every neighbour of a sample may be outside its level. So cells that
// are sampled often are packed first: side by side, channels padded to whole vectors, each level
// inside a border of zeros. Samples then need no test for the edge. With few queries (a decoder)
// packing would cost more than sampling, and the cells are read in place.
#pragma once

#include "arena.h"
#include "simd.h"

namespace cldetr::CLDETR_ISA {

// Cells that the processor is asked to fetch ahead while packing: it does not see the stride.
constexpr int64_t kPackAhead = 16;

template <typename T>
struct Cells {
  const T* value;
  T* gradient;          // null in the forward pass
  int32_t column_step;  // elements from a cell to the one on its right
  bool packed;
};

template <typename T>
inline int64_t padded_channels(const Sizes& sizes) {
  return (sizes.channels + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// Channels that do not fill whole vectors are always packed: loads in place would run into the next
// head, and past the end of the tensor.
template <typename T>
inline bool should_pack(const Sizes& sizes) {
  return sizes.channels % kLanes<T> != 0 ||
         sizes.queries * sizes.levels * sizes.points >= sizes.cells;
}

inline int64_t bordered_cells(const Level& level) {
  return (level.height + int64_t{2}) * (level.width + int64_t{2});
}

// Elements from a packed cell to the next. In the backward pass a cell's gradient follows its
// value, so that both are found together.
template <typename T>
inline int64_t packed_step(const Sizes& sizes, bool backward) {
  return padded_channels<T>(sizes) * (backward ? 2 : 1);
}

template <typename T>
inline int64_t packed_elements(const Inputs<T>& in, Range levels, bool backward) {
  if (!should_pack<T>(in.sizes)) return 0;
  int64_t cells = 0;
  for (int64_t l = levels.begin; l < levels.end; ++l) cells += bordered_cells(in.levels[l]);
  return cells * packed_step<T>(in.sizes, backward);
}

// The first element of one image's cell of one head.
inline int64_t element(const Sizes& sizes, int64_t image, int64_t cell, int64_t head) {
  return ((image * sizes.cells + cell) * sizes.heads + head) * sizes.channels;
}

// Copies the levels' cells into `slab`; in the backward pass zeroes the gradients beside them.
template <typename T>
inline Cells<T> pack(const Inputs<T>& in, int64_t image, int64_t head, Range levels, T* slab,
                     bool backward) {
  const Sizes& s = in.sizes;
  const int64_t padded = padded_channels<T>(s);
  const int64_t step = packed_step<T>(s, backward);
  const int64_t stride = s.heads * s.channels;
  T* to = slab;
  const auto zero_cells = [&to, step](int64_t count) {
    fill_zero(to, count * step);
    to += count * step;
  };
  for (int64_t l = levels.begin; l < levels.end; ++l) {
    const Level& level = in.levels[l];
    const T* from = in.value + element(s, image, level.first, head);
    zero_cells(level.width + int64_t{2});
    for (int32_t y = 0; y < level.height; ++y) {
      zero_cells(1);
      for (int32_t x = 0; x < level.width; ++x) {
        for (int64_t c = 0; c < s.channels; c += kScratchAlignment / sizeof(T)) {
          __builtin_prefetch(from + kPackAhead * stride + c);
        }
        copy(to, from, s.channels);
        fill_zero(to + s.channels, step - s.channels);
        from += stride;
        to += step;
      }
      zero_cells(1);
    }
    zero_cells(level.width + int64_t{2});
  }
  return {slab, backward ? slab + padded : nullptr, static_cast<int32_t>(step), true};
}

// Copies the gradients of packed cells, without the border, to where they belong.
template <typename T>
inline void unpack_gradient(const Inputs<T>& in, const Cells<T>& cells, int64_t image,
                            int64_t head, Range levels, T* grad_value) {
  const Sizes& s = in.sizes;
  const T* from = cells.gradient;
  for (int64_t l = levels.begin; l < levels.end; ++l) {
    const Level& level = in.levels[l];
    T* to = grad_value + element(s, image, level.first, head);
    from += (level.width + int64_t{2}) * cells.column_step;
    for (int32_t y = 0; y < level.height; ++y) {
      from += cells.column_step;
      for (int32_t x = 0; x < level.width; ++x) {
        copy(to, from, s.channels);
        from += cells.column_step;
        to += s.heads * s.channels;
      }
      from += cells.column_step;
    }
    from += (level.width + int64_t{2}) * cells.column_step;
  }
}

template <typename T>
inline Cells<T> in_place(const Inputs<T>& in, int64_t image, int64_t head, T* grad_value) {
  const int64_t first = element(in.sizes, image, 0, head);
  return {in.value + first, grad_value == nullptr ? nullptr : grad_value + first,
          static_cast<int32_t>(in.sizes.heads * in.sizes.channels), false};
}

}  // namespace cldetr::CLDETR_ISA
