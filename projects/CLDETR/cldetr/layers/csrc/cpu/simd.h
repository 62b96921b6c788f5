// A short vector of T, as wide as the instruction set of this translation unit allows.
//
// Written with the vector extensions that GCC and Clang share, so that one source becomes SSE2,
// AVX2 or NEON code.
#pragma once

#include <cstdint>

#if defined(CLDETR_AVX2)
#include <immintrin.h>
#endif

namespace cldetr::CLDETR_ISA {

#if defined(CLDETR_AVX2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  // The same, at any address.
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};

template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vector<T> vector) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(to) = vector;
}

// Runs of a few vectors, for which a call of memcpy would cost more than the copy.
template <typename T>
inline void copy(T* to, const T* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

template <typename T>
inline void fill_zero(T* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) store(to + i, Vector<T>{});
  for (; i < count; ++i) to[i] = T(0);
}

// Stores the sums of the lanes of four vectors to to[0..3], or adds them to what is there.
template <typename T>
inline void sum_lanes(T* to, bool add, Vector<T> a, Vector<T> b, Vector<T> c, Vector<T> d) {
  T sums[4] = {0, 0, 0, 0};
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    sums[0] += a[lane];
    sums[1] += b[lane];
    sums[2] += c[lane];
    sums[3] += d[lane];
  }
  for (int i = 0; i < 4; ++i) to[i] = add ? to[i] + sums[i] : sums[i];
}

#if defined(CLDETR_AVX2)
// The compiler does not find the horizontal additions by itself.
template <>
inline void sum_lanes<float>(float* to, bool add, Vector<float> a, Vector<float> b,
                             Vector<float> c, Vector<float> d) {
  const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  _mm_storeu_ps(to, add ? _mm_add_ps(_mm_loadu_ps(to), sums) : sums);
}
#endif

}  // namespace cldetr::CLDETR_ISA
