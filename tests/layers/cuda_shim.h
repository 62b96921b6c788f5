// Runs CUDA kernels on the CPU: the words of the language that they use, and a launch.
//
// The threads of a warp are fibres. One runs until it shuffles, then waits until all threads that
// the shuffle names have come; a thread that never comes is an error, as it would hang a GPU.
// Nothing runs at the same time: races, and what atomics cost or reorder, do not show here.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#define CLDETR_SHIM  // the kernels take the ways of the newest GPUs
#define __global__
#define __device__
#define __launch_bounds__(...)

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct ShimIndex {
  unsigned x;
};
inline ShimIndex threadIdx, blockIdx, gridDim;

namespace shim {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Warp {
  ucontext_t scheduler;
  ucontext_t fibres[kWarp];
  std::vector<char> stacks = std::vector<char>(kWarp * kStackBytes);
  bool done[kWarp];
  uint64_t barriers[kWarp];  // that a thread has come to
  double slots[kWarp];       // what a thread gives to a shuffle; a double holds a float, too
  unsigned first_thread;
  const std::function<void()>* kernel;
  const char* error;
};
inline Warp warp;

inline unsigned lane() { return threadIdx.x % kWarp; }

inline void yield() {
  const unsigned thread = threadIdx.x;
  swapcontext(&warp.fibres[lane()], &warp.scheduler);
  threadIdx.x = thread;
}

inline void wait_for(unsigned mask) {
  if ((mask >> lane() & 1) == 0) warp.error = "a thread shuffles without naming itself";
  const uint64_t mine = ++warp.barriers[lane()];
  for (int other = 0; other < kWarp; ++other) {
    while ((mask >> other & 1) && warp.barriers[other] < mine && warp.error == nullptr) {
      if (warp.done[other]) warp.error = "a shuffle names a thread that has left";
      yield();
    }
  }
}

inline void run_fibre() {
  (*warp.kernel)();
  warp.done[lane()] = true;
  setcontext(&warp.scheduler);
}

inline void run_warp(const std::function<void()>& kernel, unsigned first_thread) {
  warp.kernel = &kernel;
  warp.first_thread = first_thread;
  warp.error = nullptr;
  for (int lane = 0; lane < kWarp; ++lane) {
    warp.done[lane] = false;
    warp.barriers[lane] = 0;
    getcontext(&warp.fibres[lane]);
    warp.fibres[lane].uc_stack.ss_sp = warp.stacks.data() + lane * kStackBytes;
    warp.fibres[lane].uc_stack.ss_size = kStackBytes;
    warp.fibres[lane].uc_link = nullptr;
    makecontext(&warp.fibres[lane], run_fibre, 0);
  }
  for (bool running = true; running && warp.error == nullptr;) {
    running = false;
    for (int lane = 0; lane < kWarp; ++lane) {
      if (warp.done[lane]) continue;
      running = true;
      threadIdx.x = first_thread + lane;
      swapcontext(&warp.scheduler, &warp.fibres[lane]);
    }
  }
  if (warp.error != nullptr) throw std::runtime_error(warp.error);
}

// kernel<<<blocks, threads>>>, one warp after the other.
inline void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (unsigned first = 0; first < threads; first += kWarp) run_warp(kernel, first);
  }
}

}  // namespace shim

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  shim::warp.slots[shim::lane()] = value;
  shim::wait_for(mask);
  const T other = static_cast<T>(shim::warp.slots[shim::lane() ^ step]);
  shim::wait_for(mask);  // nobody overwrites a slot before all have read
  return other;
}

template <typename T>
void atomicAdd(T* to, T addend) {
  *to += addend;
}

inline void atomicAdd(float4* to, float4 addend) {
  *to = {to->x + addend.x, to->y + addend.y, to->z + addend.z, to->w + addend.w};
}
