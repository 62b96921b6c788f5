// What the CPU kernels compute on: plain pointers and sizes, nothing of PyTorch.
//
// The kernels are compiled once per instruction set (ms_deform_attn_baseline.cpp,
// ms_deform_attn_avx2.cpp) and chosen at run time. Their translation units must include no header
// with inline functions that the rest of the library also uses: the linker keeps one copy of such a
// function, and the copy it keeps might hold AVX2 instructions.
#pragma once

#include <cstddef>

#include "../geometry.h"

namespace cldetr::cpu {

// All tensors are contiguous, with the shapes given in ms_deform_attn.py.
template <typename T>
struct Inputs {
  Sizes sizes;
  const Level* levels;
  const T* value;      // (N, S, M, D)
  const T* locations;  // (N, Q, M, L, P, 2)
  const T* attention;  // (N, Q, M, L, P)
};

template <typename T>
struct Gradients {
  const T* output;  // (N, Q, M·D), given; the others are written
  T* value;
  T* locations;
  T* attention;
};

struct Range {
  int64_t begin;
  int64_t end;
};

// The kernels of one instruction set. A task is one image and head, and a part of the queries
// (forward) or of the levels (backward): tasks write to places of their own, so they may run in any
// order and on any number of threads and still give the same bits. `scratch` is memory for one task
// at a time, aligned to kScratchAlignment.
template <typename T>
struct Kernels {
  // Whether the task packs the cells; if not, backward expects Gradients::value filled with zeros.
  bool (*packs)(const Sizes&);
  size_t (*scratch_bytes)(const Inputs<T>&, Range levels, bool backward);
  void (*forward)(const Inputs<T>&, T* output, int64_t image, int64_t head, Range queries,
                  void* scratch);
  void (*backward)(const Inputs<T>&, const Gradients<T>&, int64_t image, int64_t head,
                   Range levels, void* scratch);
};

constexpr size_t kScratchAlignment = 64;  // one cache line

namespace baseline {
template <typename T>
Kernels<T> kernels();
}
namespace avx2 {
template <typename T>
Kernels<T> kernels();
}

}  // namespace cldetr::cpu
