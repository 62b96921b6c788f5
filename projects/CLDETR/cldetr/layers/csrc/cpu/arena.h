// Cuts one block of memory into aligned arrays; with no block it only counts the bytes needed.
#pragma once

#include "ms_deform_attn_kernel.h"

namespace cldetr::CLDETR_ISA {

class Arena {
 public:
  explicit Arena(void* block) : block_(static_cast<char*>(block)) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + bytes_);
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    bytes_ += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    return array;
  }

  size_t bytes() const { return bytes_; }

 private:
  char* block_;
  size_t bytes_ = 0;
};

}  // namespace cldetr::CLDETR_ISA
