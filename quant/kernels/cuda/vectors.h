// Eight neighboring elements in the registers of one CUDA thread: load, store and conversion.
//
// Memory is accessed in words of 16 bytes (8 for one-byte elements) if `wide`, else element by element. The arithmetic
// is that of arithmetic.h. Instructions that convert two values at once are used where available; comments explain why
// the result is the same.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../arithmetic.h"
#include "../kernels.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#endif

#define DEEPQAT_DEVICE __device__ __forceinline__

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define DEEPQAT_HARDWARE_E4M3
#endif

namespace deepqat::cuda {

// Call body(0), ..., body(N - 1) with constant indices: an array indexed by a variable would leave the registers.
template <int N, typename Body>
DEEPQAT_DEVICE void unrolled(Body body) {
#pragma unroll
  for (int i = 0; i < N; ++i) body(i);
}

template <typename T>
struct Vector {
  T at[kVector];
};

template <typename T>
using Word = std::conditional_t<sizeof(T) == 1, uint2, uint4>;

template <typename T>
constexpr int kWords = sizeof(Vector<T>) / sizeof(Word<T>);

// True if vectors that start at multiples of kVector elements may be accessed in words.
template <typename... T>
bool aligned(const T*... start) {
  return ((reinterpret_cast<uintptr_t>(start) % sizeof(Word<T>) == 0) && ...);
}

// Load the first n elements of a vector, zero beyond. If kWide, n is 0 or kVector.
template <bool kWide, typename T>
DEEPQAT_DEVICE Vector<T> load_vector(const T* from, int n) {
  Vector<T> v{};
  if constexpr (kWide) {
    Word<T> words[kWords<T>] = {};
    if (n > 0) unrolled<kWords<T>>([&](int i) { words[i] = reinterpret_cast<const Word<T>*>(from)[i]; });
    memcpy(&v, words, sizeof v);
  } else {
    unrolled<kVector>([&](int i) {
      if (i < n) v.at[i] = from[i];
    });
  }
  return v;
}

template <bool kWide, typename T>
DEEPQAT_DEVICE void store_vector(const Vector<T>& v, T* to, int n) {
  if constexpr (kWide) {
    Word<T> words[kWords<T>];
    memcpy(words, &v, sizeof v);
    if (n > 0) unrolled<kWords<T>>([&](int i) { reinterpret_cast<Word<T>*>(to)[i] = words[i]; });
  } else {
    unrolled<kVector>([&](int i) {
      if (i < n) to[i] = v.at[i];
    });
  }
}

// ---- storage types and fp32

template <typename T>
DEEPQAT_DEVICE void values_of(const Vector<T>& v, float (&x)[kVector]) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t pairs[kVector / 2];  // one instruction each; extracting 16 bits first would cost another
    memcpy(pairs, &v, sizeof v);
    unrolled<kVector / 2>([&](int i) {
      x[2 * i] = float_of(pairs[i] << 16);
      x[2 * i + 1] = float_of(pairs[i] & 0xffff0000u);
    });
  } else {
    unrolled<kVector>([&](int i) { x[i] = load(v.at[i]); });
  }
}

// v if keep(i), else zero.
template <typename T, typename Keep>
DEEPQAT_DEVICE Vector<T> kept(const Vector<T>& v, Keep keep) {
  Vector<T> result;
  if constexpr (sizeof(T) == 2) {
    uint32_t pairs[kVector / 2];
    memcpy(pairs, &v, sizeof v);
    unrolled<kVector / 2>([&](int i) {
      pairs[i] &= (keep(2 * i) ? 0x0000ffffu : 0u) | (keep(2 * i + 1) ? 0xffff0000u : 0u);
    });
    memcpy(&result, pairs, sizeof result);
  } else {
    unrolled<kVector>([&](int i) { result.at[i] = deepqat::kept(v.at[i], keep(i)); });
  }
  return result;
}

template <typename T>
DEEPQAT_DEVICE Vector<T> stored(const float (&x)[kVector]) {
  Vector<T> v;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    uint32_t pairs[kVector / 2];
    unrolled<kVector / 2>([&](int i) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&pairs[i], &pair, sizeof pair);
        // The instruction converts every NaN to 0x7fff, the largest signed 16-bit integer; arithmetic.h uses 0x7fc0,
        // larger than the bits of every number.
        pairs[i] = __vmins2(pairs[i], 0x7fc07fc0u);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&pairs[i], &pair, sizeof pair);
      }
    });
    memcpy(&v, pairs, sizeof v);
    return v;
  }
#endif
  unrolled<kVector>([&](int i) { store(x[i], &v.at[i]); });
  return v;
}

// ---- rounding of v = x / s to the grid; grid_of(i) is the grid of element i

#if defined(DEEPQAT_HARDWARE_E4M3)

// Two codes, equal to E4M3::quantized(v): the conversion rounds to nearest, ties to even, subnormals included;
// saturates at +-448, infinities included, to which everything from 448 to 464 rounds anyway; keeps the sign of zero;
// and converts every NaN to 0x7f.
DEEPQAT_DEVICE __nv_fp8x2_storage_t code_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

// E4M3::decode of two codes, through fp16, which represents every e4m3 value.
DEEPQAT_DEVICE float2 e4m3_values(__nv_fp8x2_storage_t codes) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
}

#endif

template <typename GridOf>
using GridAt = std::invoke_result_t<GridOf, int>;

// Q(v)
template <typename GridOf>
DEEPQAT_DEVICE void round_to_grid(GridOf grid_of, const float (&v)[kVector], float (&rounded)[kVector]) {
#if defined(DEEPQAT_HARDWARE_E4M3)
  if constexpr (std::is_same_v<GridAt<GridOf>, E4M3>) {
    unrolled<kVector / 2>([&](int i) {
      const float2 pair = e4m3_values(code_pair(v[2 * i], v[2 * i + 1]));
      rounded[2 * i] = pair.x;
      rounded[2 * i + 1] = pair.y;
    });
    return;
  }
#endif
  unrolled<kVector>([&](int i) { rounded[i] = grid_of(i).round(v[i]); });
}

// Codes of Q(v).
template <typename GridOf>
DEEPQAT_DEVICE Vector<typename GridAt<GridOf>::Code> encoded(GridOf grid_of, const float (&v)[kVector]) {
  Vector<typename GridAt<GridOf>::Code> codes;
#if defined(DEEPQAT_HARDWARE_E4M3)
  if constexpr (std::is_same_v<GridAt<GridOf>, E4M3>) {
    __nv_fp8x2_storage_t pairs[kVector / 2];
    unrolled<kVector / 2>([&](int i) { pairs[i] = code_pair(v[2 * i], v[2 * i + 1]); });
    memcpy(&codes, pairs, sizeof codes);
    return codes;
  }
#endif
  unrolled<kVector>([&](int i) { codes.at[i] = grid_of(i).quantized(v[i]); });
  return codes;
}

template <typename GridOf>
DEEPQAT_DEVICE void decode(GridOf grid_of, const Vector<typename GridAt<GridOf>::Code>& codes,
                           float (&values)[kVector]) {
#if defined(DEEPQAT_HARDWARE_E4M3)
  if constexpr (std::is_same_v<GridAt<GridOf>, E4M3>) {
    __nv_fp8x2_storage_t pairs[kVector / 2];
    memcpy(pairs, &codes, sizeof codes);
    unrolled<kVector / 2>([&](int i) {
      const float2 pair = e4m3_values(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    });
    return;
  }
#endif
  unrolled<kVector>([&](int i) { values[i] = grid_of(i).decode(codes.at[i]); });
}

}  // namespace deepqat::cuda
