// The kernels, compiled once per instruction set: the including file defines CLDETR_ISA as
// the namespace within cldetr.
#pragma once

#include "samples.h"

namespace cldetr::CLDETR_ISA {

// Calls run<vectors>(first channel) until `channels`, whole vectors, are done: as many vectors at a
// time as the registers hold, then the rest.
template <typename T, typename Run>
inline void for_channel_blocks(int64_t channels, Run run) {
  int64_t c = 0;
  for (; c + 4 * kLanes<T> <= channels; c += 4 * kLanes<T>) run.template operator()<4>(c);
  if (c + 2 * kLanes<T> <= channels) {
    run.template operator()<2>(c);
    c += 2 * kLanes<T>;
  }
  if (c < channels) run.template operator()<1>(c);
}

// Offsets of a sample's four neighbours from the first cell.
template <bool kPacked, typename T>
inline void neighbours(const Samples<T>& samples, int32_t column_step, int64_t sample,
                       int64_t (&offsets)[4]) {
  const int64_t right = kPacked ? column_step : samples.right[sample];
  const int64_t down = kPacked ? samples.row_step[sample] : samples.down[sample];
  offsets[0] = samples.offset[sample];
  offsets[1] = offsets[0] + right;
  offsets[2] = offsets[0] + down;
  offsets[3] = offsets[2] + right;
}

template <int kVectors, bool kPacked, typename T>
inline void fetch_ahead(const T* cells, const Samples<T>& samples, int32_t column_step,
                        int64_t sample) {
  int64_t offsets[4];
  neighbours<kPacked>(samples, column_step, sample + kSamplesAhead, offsets);
  for (const int64_t offset : offsets) {
    for (int v = 0; v < kVectors; v += kScratchAlignment / kVectorBytes) {
      __builtin_prefetch(cells + offset + v * kLanes<T>);
    }
  }
}

// Sums the weighted samples [begin, end): kVectors vectors of channels, from `channel` on.
template <int kVectors, bool kPacked, typename T>
inline void sum_samples(const Cells<T>& cells, const Samples<T>& samples, int64_t begin,
                        int64_t end, int64_t channel, T* output) {
  constexpr int kLane = kLanes<T>;
  // Several sums, so that an addition need not wait for the one before.
  constexpr int kSums = kVectors < 4 ? 4 : 2;
  Vector<T> sums[kSums][kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    const T* value = cells.value + channel;
    if (!kPacked) fetch_ahead<kVectors, kPacked>(value, samples, cells.column_step, i);
    int64_t offsets[4];
    neighbours<kPacked>(samples, cells.column_step, i, offsets);
    for (int n = 0; n < 4; ++n) {
      const T weight = samples.weight[n][i];
      for (int v = 0; v < kVectors; ++v) {
        sums[n % kSums][v] += weight * load(value + offsets[n] + v * kLane);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Vector<T> sum = sums[0][v] + sums[1][v];
    if (kSums == 4) sum += sums[kSums - 2][v] + sums[kSums - 1][v];
    store(output + v * kLane, sum);
  }
}

// For samples [begin, end): adds the dot products of `grad` with the four neighbours to `dots` (four
// per sample), and the weighted `grad` to the neighbours' gradients.
template <int kVectors, bool kPacked, typename T>
inline void spread_samples(const Cells<T> cells, const Samples<T> samples, int64_t begin,
                           int64_t end, int64_t channel, const T* grad, T* dots) {
  constexpr int kLane = kLanes<T>;
  Vector<T> g[kVectors];
  for (int v = 0; v < kVectors; ++v) g[v] = load(grad + v * kLane);
  for (int64_t i = begin; i < end; ++i) {
    if (!kPacked) {
      fetch_ahead<kVectors, kPacked>(cells.value + channel, samples, cells.column_step, i);
      fetch_ahead<kVectors, kPacked>(cells.gradient + channel, samples, cells.column_step, i);
    }
    int64_t offsets[4];
    neighbours<kPacked>(samples, cells.column_step, i, offsets);
    Vector<T> dot[4];
    for (int n = 0; n < 4; ++n) {
      const T* value = cells.value + offsets[n] + channel;
      T* gradient = cells.gradient + offsets[n] + channel;
      const T weight = samples.weight[n][i];
      dot[n] = g[0] * load(value);
      for (int v = 1; v < kVectors; ++v) dot[n] += g[v] * load(value + v * kLane);
      // In place, two neighbours may be one cell: the first is stored before the next is loaded.
      for (int v = 0; v < kVectors; ++v) {
        store(gradient + v * kLane, load(gradient + v * kLane) + weight * g[v]);
      }
    }
    add_lane_sums<T>(dots + 4 * i, dot[0], dot[1], dot[2], dot[3]);
  }
}

// From the dot products to the gradients of the first `count` locations and attention weights.
template <bool kPacked, typename T>
inline void finish_gradients(const Samples<T>& samples, int64_t count, const T* __restrict dots,
                             T* __restrict grad_locations, T* __restrict grad_attention) {
  const T *width = samples.width, *height = samples.height;
  const T *locations = samples.locations, *attention = samples.attention;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const Axis<T> x = place<kPacked>(locations[2 * i], width[i]);
    const Axis<T> y = place<kPacked>(locations[2 * i + 1], height[i]);
    const T *upper_dots = dots + 4 * i, *lower_dots = upper_dots + 2;
    const T upper = x.weight[0] * upper_dots[0] + x.weight[1] * upper_dots[1];
    const T lower = x.weight[0] * lower_dots[0] + x.weight[1] * lower_dots[1];
    const T upper_slope = x.slope[0] * upper_dots[0] + x.slope[1] * upper_dots[1];
    const T lower_slope = x.slope[0] * lower_dots[0] + x.slope[1] * lower_dots[1];
    const T a = attention[i];
    grad_attention[i] = y.weight[0] * upper + y.weight[1] * lower;
    grad_locations[2 * i] =
        a * width[i] * (y.weight[0] * upper_slope + y.weight[1] * lower_slope);
    grad_locations[2 * i + 1] = a * height[i] * (y.slope[0] * upper + y.slope[1] * lower);
  }
}

template <typename T>
struct ForwardScratch {
  Samples<T> samples;
  T* row;  // one query's output, padded
  T* slab;

  ForwardScratch(Arena& arena, const Inputs<T>& in, Range levels)
      : samples(arena, in.sizes, levels),
        row(arena.take<T>(padded_channels<T>(in.sizes))),
        slab(arena.take<T>(packed_elements(in, levels, false))) {}
};

template <bool kPacked, typename T>
inline void forward_queries(const Inputs<T>& in, const Cells<T>& cells, T* output, int64_t image,
                            int64_t head, Range queries, ForwardScratch<T>& scratch) {
  const Sizes& s = in.sizes;
  const Range levels{0, s.levels};
  const int64_t channels = padded_channels<T>(s);
  Samples<T>& samples = scratch.samples;
  for (int64_t begin = queries.begin; begin < queries.end; begin += samples.max_queries) {
    const int64_t left = queries.end - begin;
    const int64_t count = left < samples.max_queries ? left : samples.max_queries;
    gather_samples(in, image, head, levels, {begin, begin + count}, samples);
    place_samples<kPacked>(samples, cells.column_step, count * samples.per_query);
    for (int64_t q = 0; q < count; ++q) {
      T* to = output + ((image * s.queries + begin + q) * s.heads + head) * s.channels;
      T* row = channels == s.channels ? to : scratch.row;
      for_channel_blocks<T>(channels, [&]<int kVectors>(int64_t c) {
        sum_samples<kVectors, kPacked>(cells, samples, q * samples.per_query,
                                       (q + 1) * samples.per_query, c, row + c);
      });
      if (row != to) copy(to, row, s.channels);
    }
  }
}

template <typename T>
void forward(const Inputs<T>& in, T* output, int64_t image, int64_t head, Range queries,
             void* memory) {
  const Range levels{0, in.sizes.levels};
  Arena arena(memory);
  ForwardScratch<T> scratch(arena, in, levels);
  const Cells<T> cells = should_pack<T>(in.sizes)
                             ? pack(in, image, head, levels, scratch.slab, false)
                             : in_place<T>(in, image, head, nullptr);
  scratch.samples.set_levels(in, cells, levels);
  const auto run = cells.packed ? &forward_queries<true, T> : &forward_queries<false, T>;
  run(in, cells, output, image, head, queries, scratch);
}

template <typename T>
struct BackwardScratch {
  Samples<T> samples;
  T* row;   // the gradient of one query's output, padded
  T* dots;  // (samples, 4)
  T* grad_locations;
  T* grad_attention;
  T* slab;

  BackwardScratch(Arena& arena, const Inputs<T>& in, Range levels)
      : samples(arena, in.sizes, levels),
        row(arena.take<T>(padded_channels<T>(in.sizes))),
        dots(arena.take<T>(4 * samples.max_queries * samples.per_query)),
        grad_locations(arena.take<T>(2 * samples.max_queries * samples.per_query)),
        grad_attention(arena.take<T>(samples.max_queries * samples.per_query)),
        slab(arena.take<T>(packed_elements(in, levels, true))) {}
};

template <bool kPacked, typename T>
inline void backward_queries(const Inputs<T>& in, const Cells<T>& cells, const Gradients<T>& grad,
                             int64_t image, int64_t head, Range levels,
                             BackwardScratch<T>& scratch) {
  const Sizes& s = in.sizes;
  const int64_t channels = padded_channels<T>(s);
  Samples<T>& samples = scratch.samples;
  const int64_t per_query = samples.per_query;
  if (channels != s.channels) fill_zero(scratch.row, channels);
  for (int64_t begin = 0; begin < s.queries; begin += samples.max_queries) {
    const int64_t left = s.queries - begin;
    const int64_t count = left < samples.max_queries ? left : samples.max_queries;
    gather_samples(in, image, head, levels, {begin, begin + count}, samples);
    place_samples<kPacked>(samples, cells.column_step, count * per_query);
    fill_zero(scratch.dots, 4 * count * per_query);
    for (int64_t q = 0; q < count; ++q) {
      const T* row = grad.output + ((image * s.queries + begin + q) * s.heads + head) * s.channels;
      for (int64_t c = 0; c < s.channels; c += kScratchAlignment / sizeof(T)) {
        __builtin_prefetch(row + kPackAhead * s.heads * s.channels + c);
      }
      if (channels != s.channels) {
        copy(scratch.row, row, s.channels);
        row = scratch.row;
      }
      for_channel_blocks<T>(channels, [&]<int kVectors>(int64_t c) {
        spread_samples<kVectors, kPacked>(cells, samples, q * per_query, (q + 1) * per_query, c,
                                          row + c, scratch.dots);
      });
    }
    finish_gradients<kPacked>(samples, count * per_query, scratch.dots, scratch.grad_locations,
                              scratch.grad_attention);
    const int64_t first = first_sample(s, image, begin, head, levels);
    for (int64_t q = 0; q < count; ++q) {
      const int64_t to = first + q * sample_stride(s);
      copy(grad.locations + 2 * to, scratch.grad_locations + 2 * q * per_query, 2 * per_query);
      copy(grad.attention + to, scratch.grad_attention + q * per_query, per_query);
    }
  }
}

template <typename T>
void backward(const Inputs<T>& in, const Gradients<T>& grad, int64_t image, int64_t head,
              Range levels, void* memory) {
  Arena arena(memory);
  BackwardScratch<T> scratch(arena, in, levels);
  const Cells<T> cells = should_pack<T>(in.sizes)
                             ? pack(in, image, head, levels, scratch.slab, true)
                             : in_place<T>(in, image, head, grad.value);
  scratch.samples.set_levels(in, cells, levels);
  const auto run = cells.packed ? &backward_queries<true, T> : &backward_queries<false, T>;
  run(in, cells, grad, image, head, levels, scratch);
  if (cells.packed) unpack_gradient(in, cells, image, head, levels, grad.value);
}

template <typename T, typename Scratch>
size_t scratch_bytes(const Inputs<T>& in, Range levels) {
  Arena arena(nullptr);
  Scratch scratch(arena, in, levels);
  return arena.bytes();
}

template <typename T>
Kernels<T> kernels() {
  return {&should_pack<T>, &scratch_bytes<T, ForwardScratch<T>>, &forward<T>,
          &scratch_bytes<T, BackwardScratch<T>>, &backward<T>};
}

}  // namespace cldetr::CLDETR_ISA
