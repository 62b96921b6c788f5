// From sampling locations to neighbours: where the four lie and how much each counts.
//
// Queries are handled in batches. All samples of a batch are placed by one loop without branches,
// over arrays, which the compiler turns into vector code.
#pragma once

#include "../axis.h"
#include "cells.h"

namespace cldetr::CLDETR_ISA {

constexpr int64_t kBatchSamples = 256;  // so that a batch's arrays stay in the first-level cache
constexpr int64_t kQueriesAhead = 32;   // queries whose locations are fetched ahead
constexpr int64_t kSamplesAhead = 8;    // samples whose neighbours are fetched ahead, in place

// One batch. A query has `per_query` samples: the points of all the task's levels, in the order of
// the tensors. Neighbours are numbered 0 upper left, 1 upper right, 2 lower left, 3 lower right.
template <typename T>
struct Samples {
  int64_t per_query;
  int64_t max_queries;
  // The same for every batch, from the sample's level: its size, and where its cells lie.
  T* width;
  T* height;
  int32_t* first;
  int32_t* row_step;
  // Given.
  T* locations;  // x, y in turn
  T* attention;
  // Where the neighbours lie, in elements: neighbour 0 from the first cell, 1 and 2 from there.
  int32_t* offset;
  int32_t* right;  // in place only: packed, it is column_step everywhere
  int32_t* down;   // in place only: packed, it is row_step
  T* weight[4];    // bilinear weight · attention

  Samples(Arena& arena, const Sizes& sizes, Range levels) {
    per_query = (levels.end - levels.begin) * sizes.points;
    max_queries = per_query < kBatchSamples ? kBatchSamples / (per_query > 0 ? per_query : 1) : 1;
    const int64_t count = max_queries * per_query;
    width = arena.take<T>(count);
    height = arena.take<T>(count);
    first = arena.take<int32_t>(count);
    row_step = arena.take<int32_t>(count);
    locations = arena.take<T>(2 * count);
    attention = arena.take<T>(count);
    // Fetching ahead looks a little further than the last sample.
    offset = arena.take<int32_t>(count + kSamplesAhead);
    right = arena.take<int32_t>(count + kSamplesAhead);
    down = arena.take<int32_t>(count + kSamplesAhead);
    for (T*& array : weight) array = arena.take<T>(count);
  }

  // Fills in what depends on the level alone.
  void set_levels(const Inputs<T>& in, const Cells<T>& cells, Range levels) {
    int64_t packed_first = 0;
    int64_t i = 0;
    for (int64_t l = levels.begin; l < levels.end; ++l) {
      const Level& level = in.levels[l];
      const int32_t border = cells.packed ? 2 : 0;
      const int64_t first_cell = cells.packed ? packed_first : level.first;
      for (int64_t p = 0; p < in.sizes.points; ++p, ++i) {
        width[i] = static_cast<T>(level.width);
        height[i] = static_cast<T>(level.height);
        first[i] = static_cast<int32_t>(first_cell * cells.column_step);
        row_step[i] = (level.width + border) * cells.column_step;
      }
      packed_first += bordered_cells(level);
    }
    for (; i < max_queries * per_query; ++i) {
      width[i] = width[i - per_query];
      height[i] = height[i - per_query];
      first[i] = first[i - per_query];
      row_step[i] = row_step[i - per_query];
    }
    for (i = 0; i < max_queries * per_query + kSamplesAhead; ++i) offset[i] = right[i] = down[i] = 0;
  }
};

// The first sample of a query at the task's first level; queries are `sample_stride` apart.
inline int64_t first_sample(const Sizes& s, int64_t image, int64_t query, int64_t head,
                            Range levels) {
  return (((image * s.queries + query) * s.heads + head) * s.levels + levels.begin) * s.points;
}

inline int64_t sample_stride(const Sizes& s) { return s.heads * s.levels * s.points; }

template <typename T>
inline void gather_samples(const Inputs<T>& in, int64_t image, int64_t head, Range levels,
                           Range queries, Samples<T>& samples) {
  const int64_t stride = sample_stride(in.sizes);
  const int64_t first = first_sample(in.sizes, image, queries.begin, head, levels);
  const int64_t count = samples.per_query;
  for (int64_t q = 0; q < queries.end - queries.begin; ++q) {
    const T* locations = in.locations + 2 * (first + q * stride);
    const T* attention = in.attention + first + q * stride;
    constexpr int64_t kLine = kScratchAlignment / sizeof(T);
    for (int64_t i = 0; i < count; i += kLine) {
      __builtin_prefetch(locations + 2 * kQueriesAhead * stride + 2 * i);
      __builtin_prefetch(locations + 2 * kQueriesAhead * stride + 2 * i + kLine);
      __builtin_prefetch(attention + kQueriesAhead * stride + i);
    }
    copy(samples.locations + 2 * q * count, locations, 2 * count);
    copy(samples.attention + q * count, attention, count);
  }
}

// Computes offsets and weights of the first `count` samples.
template <bool kPacked, typename T>
inline void place_samples(const Samples<T>& samples, int32_t column_step, int64_t count) {
  const T *width = samples.width, *height = samples.height;
  const int32_t *first = samples.first, *row_step = samples.row_step;
  const T *locations = samples.locations, *attention = samples.attention;
  int32_t *offset = samples.offset, *right = samples.right, *down = samples.down;
  T *weight0 = samples.weight[0], *weight1 = samples.weight[1];
  T *weight2 = samples.weight[2], *weight3 = samples.weight[3];
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const Axis<T> x = place<kPacked>(locations[2 * i], width[i]);
    const Axis<T> y = place<kPacked>(locations[2 * i + 1], height[i]);
    offset[i] = first[i] + y.cell * row_step[i] + x.cell * column_step;
    if (!kPacked) {
      right[i] = x.step * column_step;
      down[i] = y.step * row_step[i];
    }
    const T upper = attention[i] * y.weight[0];
    const T lower = attention[i] * y.weight[1];
    weight0[i] = upper * x.weight[0];
    weight1[i] = upper * x.weight[1];
    weight2[i] = lower * x.weight[0];
    weight3[i] = lower * x.weight[1];
  }
}

}  // namespace cldetr::CLDETR_ISA
