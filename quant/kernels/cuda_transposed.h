// Codes of a matrix and of its transpose, which the fp8 GEMM of a gradient wants, in one pass: a block takes tiles of
// kTileSide x kTileSide, one after the other, by way of shared memory. A Source is a struct with
//
//     load<kWide>(i, n, scale)   the codes of eight neighbouring elements from i on, of which the row has n; it stores
//                                them, too, where they are not there yet
//     inverse()                  what it multiplies elements with
//
// Eight threads write 64 neighbouring bytes of a row of either matrix.

#pragma once

#include "cuda_scales.h"

namespace deepqat::cuda {

constexpr int kTileSide = 64;
constexpr int kVectorsPerSide = kTileSide / kVector;

template <typename T, typename G>
struct GradientCodes {
  const T* grad;
  const float* largest;
  uint8_t* codes;
  float* scale;

  DEEPQAT_DEVICE float inverse() const {
    const float found = token_scale(*largest, G::kMax);
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = found;
    return 1.0f / found;
  }

  template <bool kWide>
  DEEPQAT_DEVICE Vector<uint8_t> load(int64_t i, int n, float inverse) const {
    float v[kVector];
    values_of(load_vector<kWide>(grad + i, n), v);
    unrolled<kVector>([&](int j) { v[j] *= inverse; });
    const auto found = encoded([](int) { return G{}; }, v);
    store_vector<kWide>(found, codes + i, n);
    return found;
  }
};

// Of e4m3, with one scale for the whole tensor.
template <typename T>
struct CodesOf {
  const T* x;
  DeviceScales scales;
  float* scale;

  DEEPQAT_DEVICE float inverse() const {
    const Scale found = scales.of_run<false>(0);
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = found.value;
    return found.inverse;
  }

  template <bool kWide>
  DEEPQAT_DEVICE Vector<uint8_t> load(int64_t i, int n, float inverse) const {
    float v[kVector];
    values_of(load_vector<kWide>(x + i, n), v);
    unrolled<kVector>([&](int j) { v[j] *= inverse; });
    return encoded([](int) { return E4M3{}; }, v);
  }
};

struct GivenCodes {
  const uint8_t* codes;

  DEEPQAT_DEVICE float inverse() const { return 1.0f; }

  template <bool kWide>
  DEEPQAT_DEVICE Vector<uint8_t> load(int64_t i, int n, float) const {
    return load_vector<kWide>(codes + i, n);
  }
};

// A row of the tile has four bytes more than it holds, so that threads that read down its columns meet in few banks.
struct TransposedTile {
  uint32_t words[kTileSide][kTileSide / 4 + 1];

  DEEPQAT_DEVICE void put(int row, int vector, const Vector<uint8_t>& codes) {
    uint32_t two[2];
    memcpy(two, &codes, sizeof two);
    words[row][2 * vector] = two[0];
    words[row][2 * vector + 1] = two[1];
  }

  DEEPQAT_DEVICE uint8_t at(int row, int column) const {
    return static_cast<uint8_t>(words[row][column / 4] >> (column % 4 * 8) & 0xffu);
  }
};

template <typename Source>
__global__ void __launch_bounds__(kLanes, 2)
    transposed(Source source, int64_t rows, int64_t columns, Divisor by_tiles_per_row, int64_t tiles_per_row,
               int64_t tiles, int64_t length, uint8_t* out, bool wide) {
  __shared__ TransposedTile tile;
  const float inverse = source.inverse();
  for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    const int64_t tile_row = by_tiles_per_row.quotient(number);
    const int64_t row = tile_row * kTileSide, column = (number - tile_row * tiles_per_row) * kTileSide;
    for (int at = static_cast<int>(threadIdx.x); at < kTileSide * kVectorsPerSide; at += kLanes) {
      const int r = at / kVectorsPerSide, v = at % kVectorsPerSide;
      const int64_t left = columns - column - v * kVector;
      const int n = row + r >= rows || left <= 0 ? 0 : left < kVector ? static_cast<int>(left) : kVector;
      const int64_t i = (row + r) * columns + column + v * kVector;
      Vector<uint8_t> codes{};
      if (n > 0) codes = wide ? source.template load<true>(i, n, inverse) : source.template load<false>(i, n, inverse);
      tile.put(r, v, codes);
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < kTileSide * kVectorsPerSide; at += kLanes) {
      const int c = at / kVectorsPerSide, v = at % kVectorsPerSide;
      if (column + c >= columns || row + v * kVector >= length) continue;
      Vector<uint8_t> codes;
      unrolled<kVector>([&](int j) { codes.at[j] = tile.at(v * kVector + j, c); });
      store_vector<true>(codes, out + (column + c) * length + row + v * kVector, kVector);
    }
    __syncthreads();  // before the next tile takes its place
  }
}

}  // namespace deepqat::cuda
