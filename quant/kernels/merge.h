// The sum of a weight and its adapter, w + s * (B A), of rows on the CPU: in fp64, rounded once to fp32 and to the weight's
// type.
//
// torch would make fp64 copies of the weight and multiply with a GEMM that is made for long sums; a rank is short, and most
// time goes to the copies. Here a few columns of A stay in the first cache, in fp64, while all rows pass: each element of the
// weight is read once, summed in registers and written once. The products of an element are added in the order of the rank,
// whatever rows and columns are computed together, so that any piece of the rows has the bits of the whole.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "arithmetic.h"

namespace deepqat::cpu {
namespace {

// Eight numbers, which the compiler takes apart where the processor has shorter registers.
using Numbers = double __attribute__((vector_size(64)));
constexpr int64_t kNumbers = 8, kVectors = 4, kTile = kVectors * kNumbers;  // columns at a time

// sum + b * a. Of bf16 and fp16 a product with a power of two as the factor is exact, so that it does not matter whether it
// is rounded by itself; of others that shows in the last bit of fp64.
Numbers plus_product(Numbers sum, double b, Numbers a) {
#if defined(__AVX512F__)
  const auto of_a = reinterpret_cast<__m512d>(a), whole = reinterpret_cast<__m512d>(sum);
  return reinterpret_cast<Numbers>(_mm512_fmadd_pd(_mm512_set1_pd(b), of_a, whole));
#else
  return sum + b * a;
#endif
}

// Adds to kTile columns of kRows rows of a weight: tile is [rank, kTile] of A, b is [kRows, rank], with the factor.
template <int kRows, typename T>
void merge_tile(const Numbers* tile, const double* b, int64_t rank, const T* w, T* out, int64_t stride, int64_t width) {
  Numbers sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < rank; ++k)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = plus_product(sums[r][v], b[r * rank + k], tile[k * kVectors + v]);
  for (int r = 0; r < kRows; ++r) {
    double found[kTile];
    memcpy(found, sums[r], sizeof found);
    const T* from = w + r * stride;
    T* to = out + r * stride;
    const auto add = [&](int64_t j) { store(static_cast<float>(load(from[j]) + found[j]), to + j); };
    if (width == kTile) {
#pragma GCC ivdep
      for (int64_t j = 0; j < kTile; ++j) add(j);
    } else {
      for (int64_t j = 0; j < width; ++j) add(j);
    }
  }
}

// Rows [begin, end) of one weight [out, in] with a [rank, in] and b [out, rank].
template <typename T>
void merge_rows(const T* w, const double* a, const double* b, int64_t in, int64_t rank, int64_t begin, int64_t end, T* out) {
  std::vector<Numbers> tile(rank * kVectors);
  for (int64_t column = 0; column < in; column += kTile) {
    const int64_t width = std::min(kTile, in - column);
    std::fill(tile.begin(), tile.end(), Numbers{});
    for (int64_t k = 0; k < rank; ++k) memcpy(&tile[k * kVectors], a + k * in + column, width * sizeof(double));
    int64_t row = begin;
    const auto at = [&](int64_t i) { return i * in + column; };
    for (; row + 4 <= end; row += 4)
      merge_tile<4>(tile.data(), b + row * rank, rank, w + at(row), out + at(row), in, width);
    for (; row < end; ++row) merge_tile<1>(tile.data(), b + row * rank, rank, w + at(row), out + at(row), in, width);
  }
}

}  // namespace
}  // namespace deepqat::cpu
