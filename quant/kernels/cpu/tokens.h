// Loops of the CPU kernels over tokens, and over groups of their features, with a scale each.

#pragma once

#include "loops.h"
#include "../token_grids.h"

namespace deepqat::cpu {
namespace {

constexpr int64_t kGroupedAtOnce = 2048;  // elements of groups whose scales are computed together

DEEPQAT_INLINE uint32_t size_bits(float x) { return bits_of(x) & 0x7fffffffu; }
DEEPQAT_INLINE uint16_t size_bits(BFloat16 x) { return x.bits & 0x7fffu; }
DEEPQAT_INLINE uint16_t size_bits(Half x) { return x.bits & 0x7fffu; }

// Largest magnitudes of groups of kFeatures elements, at most kGroupedAtOnce elements: neighbors are compared as
// integers (see largest_magnitude) until one per group is left.
template <int64_t kFeatures, typename T>
DEEPQAT_INLINE void largest_of_groups(const T* x, int64_t count, float* largest) {
  using Bits = decltype(size_bits(T{}));
  alignas(64) Bits one[kGroupedAtOnce], other[kGroupedAtOnce / 2];
  int64_t n = count * kFeatures;
  for (int64_t i = 0; i < n; ++i) one[i] = size_bits(x[i]);
  Bits *from = one, *to = other;
  for (int64_t left = kFeatures; left > 1; left /= 2, std::swap(from, to)) {
    n /= 2;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = std::max(from[2 * i], from[2 * i + 1]);
  }
  for (int64_t i = 0; i < count; ++i) {
    T found;
    memcpy(&found, from + i, sizeof found);
    largest[i] = load(found);
  }
}

// Scales of groups from their largest magnitudes, as in Grids::token.
DEEPQAT_INLINE void scales_of_groups(const FloatTokens& grids, const float* largest, int64_t count, float* scale) {
  if (grids.power_of_two) {
    for (int64_t i = 0; i < count; ++i) scale[i] = smallest_power_of_two(largest[i], E4M3::kMax);
  } else {
    for (int64_t i = 0; i < count; ++i) scale[i] = token_scale(largest[i], E4M3::kMax);
  }
}

DEEPQAT_INLINE void scales_of_groups(const Float4Tokens& grids, const float* largest, int64_t count, float* scale) {
  if (grids.above == nullptr) {
    for (int64_t i = 0; i < count; ++i) scale[i] = smallest_power_of_two(largest[i], E2M1::kMax);
  } else {
    const float above = *grids.above;
    for (int64_t i = 0; i < count; ++i) scale[i] = below_global_of(largest[i], above);
  }
}

// Grid of one token, for grids centered on 0, which need only the largest magnitude.
template <typename Grids, typename T>
  requires Grids::kCentred
auto token_of(const Grids& grids, const T* x, int64_t n) {
  return grids.token(0.0f, float_of(largest_magnitude(x, n)));
}

// Grid of one token from its range, extended to 0. NaNs are tracked separately: comparisons would drop them.
template <typename Grids, typename T>
auto token_of(const Grids& grids, const T* x, int64_t n) {
  float lowest[16] = {}, highest[16] = {};
  uint32_t nan[16] = {};
  const auto take = [&](int lane, float value) {
    lowest[lane] = value < lowest[lane] ? value : lowest[lane];
    highest[lane] = value > highest[lane] ? value : highest[lane];
    nan[lane] |= value != value ? 1u : 0u;
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) take(j, load(x[i + j]));
  for (; i < n; ++i) take(0, load(x[i]));
  const float low = *std::min_element(lowest, lowest + 16), high = *std::max_element(highest, highest + 16);
  const bool any_nan = *std::max_element(nan, nan + 16) != 0;
  return grids.token(low, any_nan ? float_of(0x7fc00000u) : high);
}

// store_scale for several tokens, in a form that is vectorized.
DEEPQAT_INLINE void store_scales(const float* its, const Tokens& tokens, int64_t first, int64_t count, void* scales) {
  if (tokens.stored_as == Stored::kE8M0) {
    auto* to = static_cast<uint8_t*>(scales) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = exponent_of(its[i]);
  } else if (tokens.stored_as == Stored::kE4M3) {
    auto* to = static_cast<uint8_t*>(scales) + first;
    const float above = *tokens.above;
    for (int64_t i = 0; i < count; ++i) to[i] = code_below(its[i], above);
  } else {
    std::copy_n(its, count, static_cast<float*>(scales) + first);
  }
}

// for_each_token for groups of kFeatures.
template <int64_t kFeatures, typename Grids, typename T, typename Known, typename Body>
void for_each_group(int64_t count, const Grids& grids, const T* x, Known known, Body body) {
  constexpr int64_t kAtOnce = kGroupedAtOnce / kFeatures;
  at::parallel_for(0, (count + kAtOnce - 1) / kAtOnce, 4 * kSegment / kGroupedAtOnce, [&](int64_t begin, int64_t end) {
    float largest[kAtOnce], scale[kAtOnce], inverse[kAtOnce];
    for (int64_t batch = begin; batch < end; ++batch) {
      const int64_t first = batch * kAtOnce, n = std::min(kAtOnce, count - first), offset = first * kFeatures;
      largest_of_groups<kFeatures>(x + offset, n, largest);
      scales_of_groups(grids, largest, n, scale);
      for (int64_t i = 0; i < n; ++i) inverse[i] = 1.0f / scale[i];
      const typename Grids::Grid grid{};
      known(first, n, scale, grid);
      for_each_chunk(n, kFeatures, scale, inverse, [&](int64_t start, int64_t length, const ScalesOfChunk& s) {
        body(offset + start, length, grid, s);
      });
    }
  });
}

// Call known(first, count, scales, grid) for consecutive tokens of x that share a grid, and body(offset, length, grid,
// scale) for stretches of one token, or of several short tokens.
template <typename Grids, typename T, typename Known, typename Body>
void for_each_token(const Tokens& tokens, const Grids& grids, const T* x, Known known, Body body) {
  const int64_t features = tokens.features;
  if constexpr (Grids::kCentred && std::is_empty_v<typename Grids::Grid>) {
    if (features == 16) return for_each_group<16>(tokens.count, grids, x, known, body);
    if (features == 32) return for_each_group<32>(tokens.count, grids, x, known, body);
  }
  at::parallel_for(0, tokens.count, 1 + 4 * kSegment / (features + 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const auto its = token_of(grids, x + token * features, features);
      known(token, 1, &its.scale, its.grid);
      body(token * features, features, its.grid, Scale{its.scale, its.inverse, its.scale, 0.0f});
    }
  });
}

}  // namespace
}  // namespace deepqat::cpu
