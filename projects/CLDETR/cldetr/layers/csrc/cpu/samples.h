// From sampling locations to neighbours: where the four lie and how much each counts.
//
// Queries are handled in batches. Their samples are placed by a loop without branches, over arrays,
// which the compiler turns into vector code.
#pragma once

#include "../axis.h"
#include "cells.h"

namespace cldetr::CLDETR_ISA {

constexpr int64_t kBatchSamples = 256;  // so that a batch's arrays stay in the first-level cache
constexpr int64_t kQueriesAhead = 32;   // queries whose locations are fetched ahead
constexpr int64_t kSamplesAhead = 8;    // samples whose neighbours are fetched ahead, in place

// The samples of a task: a query has `per_query`, the points of all the task's levels, in the order
// of the tensors. Neighbours are numbered 0 upper left, 1 upper right, 2 lower left, 3 lower right.
template <typename T>
struct Samples {
  int64_t per_query;
  int64_t max_queries;
  // For each sample of a query, from its level: the size, and where the cells lie.
  T* width;
  T* height;
  int32_t* first;
  int32_t* row_step;
  // For each sample of a batch, what is given.
  T* locations;  // x, y in turn
  T* attention;
  // For each sample of a batch, where the neighbours lie, in elements: neighbour 0 from the first
  // cell, 1 and 2 from there.
  int32_t* offset;
  int32_t* right;  // in place only: packed, it is column_step everywhere
  int32_t* down;   // in place only: packed, it is row_step
  T* weight[4];    // bilinear weight · attention

  Samples(Arena& arena, const Sizes& sizes, Range levels) {
    per_query = (levels.end - levels.begin) * sizes.points;
    max_queries = per_query < kBatchSamples ? kBatchSamples / (per_query > 0 ? per_query : 1) : 1;
    width = arena.take<T>(per_query);
    height = arena.take<T>(per_query);
    first = arena.take<int32_t>(per_query);
    row_step = arena.take<int32_t>(per_query);
    const int64_t count = max_queries * per_query;
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
    for (i = 0; i < max_queries * per_query + kSamplesAhead; ++i) {
      offset[i] = right[i] = down[i] = 0;
    }
  }
};

// The first of a query's samples at the task's levels.
inline int64_t first_sample(const Sizes& s, int64_t image, int64_t query, int64_t head,
                            Range levels) {
  return (((image * s.queries + query) * s.heads + head) * s.levels + levels.begin) * s.points;
}

// Copies locations and attention weights of some queries. A head's lie far apart, on a page of its
// own every few queries: reading them all at once keeps the processor from waiting for one by one.
template <typename T>
inline void gather_samples(const Inputs<T>& in, int64_t image, int64_t head, Range levels,
                           Range queries, const Samples<T>& samples) {
  constexpr int64_t kLine = kScratchAlignment / sizeof(T);
  const int64_t count = samples.per_query;
  const int64_t stride = in.sizes.heads * in.sizes.levels * in.sizes.points;
  for (int64_t q = queries.begin; q < queries.end; ++q) {
    const int64_t from = first_sample(in.sizes, image, q, head, levels);
    const int64_t to = (q - queries.begin) * count;
    for (int64_t i = 0; i < count; i += kLine) {
      const int64_t ahead = from + kQueriesAhead * stride + i;
      __builtin_prefetch(in.locations + 2 * ahead);
      __builtin_prefetch(in.locations + 2 * ahead + kLine);
      __builtin_prefetch(in.attention + ahead);
    }
    copy(samples.locations + 2 * to, in.locations + 2 * from, 2 * count);
    copy(samples.attention + to, in.attention + from, count);
  }
}

// Computes offsets and weights of the gathered samples of `queries` queries.
template <bool kPacked, typename T>
inline void place_samples(const Samples<T>& samples, int64_t queries, int32_t column_step) {
  const int64_t count = samples.per_query;
  const T *width = samples.width, *height = samples.height;
  const int32_t *first = samples.first, *row_step = samples.row_step;
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t at = q * count;
    const T *locations = samples.locations + 2 * at, *attention = samples.attention + at;
    int32_t *offset = samples.offset + at, *right = samples.right + at, *down = samples.down + at;
    T *weight0 = samples.weight[0] + at, *weight1 = samples.weight[1] + at;
    T *weight2 = samples.weight[2] + at, *weight3 = samples.weight[3] + at;
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
}

// From the dot products of a sample's neighbours with the output's gradient (four per sample) to
// the gradients of its location and its attention weight.
template <bool kPacked, typename T>
inline void finish_gradients(const Inputs<T>& in, int64_t image, int64_t head, Range levels,
                             Range queries, const Samples<T>& samples, const T* all_dots,
                             const Gradients<T>& grad) {
  const int64_t count = samples.per_query;
  const T *width = samples.width, *height = samples.height;
  for (int64_t q = queries.begin; q < queries.end; ++q) {
    const int64_t from = (q - queries.begin) * count;
    const int64_t to = first_sample(in.sizes, image, q, head, levels);
    const T *locations = samples.locations + 2 * from, *attention = samples.attention + from;
    T *grad_locations = grad.locations + 2 * to, *grad_attention = grad.attention + to;
    const T* dots = all_dots + 4 * from;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const Axis<T> x = place<kPacked>(locations[2 * i], width[i]);
      const Axis<T> y = place<kPacked>(locations[2 * i + 1], height[i]);
      const T upper = x.weight[0] * dots[4 * i] + x.weight[1] * dots[4 * i + 1];
      const T lower = x.weight[0] * dots[4 * i + 2] + x.weight[1] * dots[4 * i + 3];
      const T upper_slope = x.slope[0] * dots[4 * i] + x.slope[1] * dots[4 * i + 1];
      const T lower_slope = x.slope[0] * dots[4 * i + 2] + x.slope[1] * dots[4 * i + 3];
      const T a = attention[i];
      grad_attention[i] = y.weight[0] * upper + y.weight[1] * lower;
      grad_locations[2 * i] =
          a * width[i] * (y.weight[0] * upper_slope + y.weight[1] * lower_slope);
      grad_locations[2 * i + 1] = a * height[i] * (y.slope[0] * upper + y.slope[1] * lower);
    }
  }
}

}  // namespace cldetr::CLDETR_ISA
