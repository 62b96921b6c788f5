// The kernels, compiled once per instruction set: the including file defines CLDETR_ISA as the
// namespace within cldetr.
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

// The addresses of a sample's neighbours. `left` and `right` point to the first cell and to the one
// on its right; `first` is the query's first sample in the batch.
template <bool kPacked, typename T, typename Element>
inline void neighbours(const Samples<T>& samples, Element* left, Element* right, int64_t first,
                       int64_t sample, Element* (&cells)[4]) {
  const int64_t offset = samples.offset[first + sample];
  const int64_t down =
      offset + (kPacked ? samples.row_step[sample] : samples.down[first + sample]);
  if (!kPacked) right = left + samples.right[first + sample];
  cells[0] = left + offset;
  cells[1] = right + offset;
  cells[2] = left + down;
  cells[3] = right + down;
}

// Asks for the cells of a later sample, in place, where they are spread over memory.
template <int kVectors, typename T>
inline void fetch_samples_ahead(const T* cells, const Samples<T>& samples, int64_t sample) {
  const T* later[4];
  neighbours<false>(samples, cells, cells, sample, kSamplesAhead, later);
  for (const T* cell : later) {
    for (int v = 0; v < kVectors; v += kScratchAlignment / kVectorBytes) {
      __builtin_prefetch(cell + v * kLanes<T>);
    }
  }
}

// Sums the weighted samples of a query: kVectors vectors of channels, from `channel` on.
template <int kVectors, bool kPacked, typename T>
inline void sum_samples(const Cells<T> cells, const Samples<T> samples, int64_t first,
                        int64_t channel, T* output) {
  constexpr int kLane = kLanes<T>;
  // Several sums, so that an addition need not wait for the one before.
  constexpr int kSums = kVectors < 4 ? 4 : 2;
  Vector<T> sums[kSums][kVectors] = {};
  const T* left = cells.value + channel;
  const T* right = left + cells.column_step;
  for (int64_t i = 0; i < samples.per_query; ++i) {
    if (!kPacked) fetch_samples_ahead<kVectors>(left, samples, first + i);
    const T* values[4];
    neighbours<kPacked>(samples, left, right, first, i, values);
    for (int n = 0; n < 4; ++n) {
      const T weight = samples.weight[n][first + i];
      for (int v = 0; v < kVectors; ++v) {
        sums[n % kSums][v] += weight * load(values[n] + v * kLane);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Vector<T> sum = sums[0][v] + sums[1][v];
    if (kSums == 4) sum += sums[kSums - 2][v] + sums[kSums - 1][v];
    store(output + v * kLane, sum);
  }
}

// For the samples of a query: adds the weighted gradient of its output to the neighbours'
// gradients, and gives its dot products with the neighbours' values; those of the first channels
// are stored, the others added. Structures come by value: for all the compiler knows, a vector
// store could change them otherwise.
template <int kVectors, bool kPacked, typename T>
inline void spread_samples(const Cells<T> cells, const Samples<T> samples, int64_t first,
                           int64_t channel, const T* grad, T* dots) {
  constexpr int kLane = kLanes<T>;
  Vector<T> g[kVectors];
  for (int v = 0; v < kVectors; ++v) g[v] = load(grad + v * kLane);
  const T* value = cells.value + channel;
  T* gradient = cells.gradient + channel;
  for (int64_t i = 0; i < samples.per_query; ++i) {
    if (!kPacked) {
      fetch_samples_ahead<kVectors>(value, samples, first + i);
      fetch_samples_ahead<kVectors, T>(gradient, samples, first + i);
    }
    const T* values[4];
    T* gradients[4];
    neighbours<kPacked>(samples, value, value + cells.column_step, first, i, values);
    neighbours<kPacked>(samples, gradient, gradient + cells.column_step, first, i, gradients);
    Vector<T> dot[4];
    for (int n = 0; n < 4; ++n) {
      const T weight = samples.weight[n][first + i];
      dot[n] = g[0] * load(values[n]);
      for (int v = 1; v < kVectors; ++v) dot[n] += g[v] * load(values[n] + v * kLane);
      // In place, two neighbours may be one cell: the first is stored before the next is loaded.
      for (int v = 0; v < kVectors; ++v) {
        T* at = gradients[n] + v * kLane;
        store(at, load(at) + weight * g[v]);
      }
    }
    sum_lanes<T>(dots + 4 * i, channel > 0, dot[0], dot[1], dot[2], dot[3]);
  }
}

template <typename T>
struct Scratch {
  Samples<T> samples;
  T* row;   // one query's output, or its gradient, padded
  T* dots;  // backward: (samples of a batch, 4)
  T* slab;

  Scratch(Arena& arena, const Inputs<T>& in, Range levels, bool backward)
      : samples(arena, in.sizes, levels),
        row(arena.take<T>(padded_channels<T>(in.sizes))),
        dots(arena.take<T>(backward ? 4 * samples.max_queries * samples.per_query : 0)),
        slab(arena.take<T>(packed_elements(in, levels, backward))) {}
};

template <bool kPacked, typename T>
inline void forward_queries(const Inputs<T>& in, const Cells<T>& cells, T* output, int64_t image,
                            int64_t head, Range queries, const Scratch<T>& scratch) {
  const Sizes& s = in.sizes;
  const Samples<T>& samples = scratch.samples;
  const int64_t channels = padded_channels<T>(s);
  for (int64_t begin = queries.begin; begin < queries.end; begin += samples.max_queries) {
    const int64_t left = queries.end - begin;
    const Range batch{begin, begin + (left < samples.max_queries ? left : samples.max_queries)};
    gather_samples(in, image, head, {0, s.levels}, batch, samples);
    place_samples<kPacked>(samples, batch.end - batch.begin, cells.column_step);
    for (int64_t q = batch.begin; q < batch.end; ++q) {
      const int64_t first = (q - begin) * samples.per_query;
      T* to = output + ((image * s.queries + q) * s.heads + head) * s.channels;
      T* row = channels == s.channels ? to : scratch.row;
      for_channel_blocks<T>(channels, [&]<int kVectors>(int64_t c) {
        sum_samples<kVectors, kPacked>(cells, samples, first, c, row + c);
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
  Scratch<T> scratch(arena, in, levels, false);
  const Cells<T> cells = should_pack<T>(in.sizes)
                             ? pack(in, image, head, levels, scratch.slab, false)
                             : in_place<T>(in, image, head, nullptr);
  scratch.samples.set_levels(in, cells, levels);
  const auto run = cells.packed ? &forward_queries<true, T> : &forward_queries<false, T>;
  run(in, cells, output, image, head, queries, scratch);
}

template <bool kPacked, typename T>
inline void backward_queries(const Inputs<T>& in, const Cells<T>& cells, const Gradients<T>& grad,
                             int64_t image, int64_t head, Range levels,
                             const Scratch<T>& scratch) {
  const Sizes& s = in.sizes;
  const Samples<T>& samples = scratch.samples;
  const int64_t channels = padded_channels<T>(s);
  fill_zero(scratch.row, channels);
  // Without channels the loops below give no dot products.
  fill_zero(scratch.dots, 4 * samples.max_queries * samples.per_query);
  for (int64_t begin = 0; begin < s.queries; begin += samples.max_queries) {
    const int64_t left = s.queries - begin;
    const Range batch{begin, begin + (left < samples.max_queries ? left : samples.max_queries)};
    gather_samples(in, image, head, levels, batch, samples);
    place_samples<kPacked>(samples, batch.end - batch.begin, cells.column_step);
    for (int64_t q = batch.begin; q < batch.end; ++q) {
      const int64_t first = (q - begin) * samples.per_query;
      const T* row = grad.output + ((image * s.queries + q) * s.heads + head) * s.channels;
      for (int64_t c = 0; c < s.channels; c += kScratchAlignment / sizeof(T)) {
        __builtin_prefetch(row + kPackAhead * s.heads * s.channels + c);
      }
      if (channels != s.channels) {
        copy(scratch.row, row, s.channels);
        row = scratch.row;
      }
      for_channel_blocks<T>(channels, [&]<int kVectors>(int64_t c) {
        spread_samples<kVectors, kPacked>(cells, samples, first, c, row + c,
                                          scratch.dots + 4 * first);
      });
    }
    finish_gradients<kPacked>(in, image, head, levels, batch, samples, scratch.dots, grad);
  }
}

template <typename T>
void backward(const Inputs<T>& in, const Gradients<T>& grad, int64_t image, int64_t head,
              Range levels, void* memory) {
  Arena arena(memory);
  Scratch<T> scratch(arena, in, levels, true);
  const Cells<T> cells = should_pack<T>(in.sizes)
                             ? pack(in, image, head, levels, scratch.slab, true)
                             : in_place<T>(in, image, head, grad.value);
  scratch.samples.set_levels(in, cells, levels);
  const auto run = cells.packed ? &backward_queries<true, T> : &backward_queries<false, T>;
  run(in, cells, grad, image, head, levels, scratch);
  if (cells.packed) unpack_gradient(in, cells, image, head, levels, grad.value);
}

template <typename T>
size_t scratch_bytes(const Inputs<T>& in, Range levels, bool backward) {
  Arena arena(nullptr);
  Scratch<T> scratch(arena, in, levels, backward);
  return arena.bytes();
}

template <typename T>
Kernels<T> kernels() {
  return {&should_pack<T>, &scratch_bytes<T>, &forward<T>, &backward<T>};
}
template Kernels<float> kernels();
template Kernels<double> kernels();

}  // namespace cldetr::CLDETR_ISA
