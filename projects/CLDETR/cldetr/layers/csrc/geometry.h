// The sizes of one call, shared by the CPU and the CUDA code; nothing of PyTorch.
#pragma once

#include <cstdint>

namespace cldetr {

// One feature level: `height` × `width` cells of every image, from cell `first` on.
struct Level {
  int64_t first;
  int32_t height;
  int32_t width;
};

struct Sizes {
  int64_t images;    // N
  int64_t cells;     // S, of all levels
  int64_t heads;     // M
  int64_t channels;  // D, per head
  int64_t queries;   // Q
  int64_t levels;    // L
  int64_t points;    // P, per head and level
};

}  // namespace cldetr
