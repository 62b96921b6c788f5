// Large results, in memory that costs little to touch for the first time.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace cldetr::cpu {

// Asks for huge pages where the tensor's memory is new. The op writes every byte of its results, and
// with pages of 4 kB the faults take as long as the arithmetic. Advice only: it may be ignored.
inline void advise_huge_pages([[maybe_unused]] const at::Tensor& tensor) {
#if defined(__linux__)
  constexpr size_t kWorthwhile = size_t{2} << 20;
  if (tensor.nbytes() < kWorthwhile) return;
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + tensor.nbytes()) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
  advise_huge_pages(tensor);
  return tensor;
}

// Like at::zeros, but large blocks come zeroed from the operating system and are not written twice.
inline at::Tensor new_zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  size_t bytes = options.dtype().itemsize();
  for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
  void* block = std::calloc(bytes > 0 ? bytes : 1, 1);
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "cannot allocate ", bytes, " bytes");
  at::Tensor tensor = at::from_blob(block, sizes, std::free, options);
  advise_huge_pages(tensor);
  return tensor;
}

}  // namespace cldetr::cpu
