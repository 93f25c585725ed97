// Loops of the CPU kernels: over runs, segments and tokens on all threads, inside them in a form that the compiler
// vectorizes, and sums in the order of kernels.h.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "../arithmetic.h"
#include "../dispatch.h"
#include "../kernels.h"

namespace deepqat::cpu {
namespace {

constexpr int64_t kChunk = 64;        // elements of one fully unrolled loop
constexpr int64_t kScalesAtOnce = 256;

// Call body(i) for i from `begin` in full blocks of kLength up to n; return the end of the last block.
template <int64_t kLength, typename Body>
DEEPQAT_INLINE int64_t blocks_of(int64_t begin, int64_t n, Body body) {
  for (; begin + kLength <= n; begin += kLength) {
#pragma GCC ivdep
    for (int64_t j = 0; j < kLength; ++j) body(begin + j);
  }
  return begin;
}

// Call body(i) for i in [0, n), mostly in loops of constant length.
template <typename Body>
DEEPQAT_INLINE void unrolled(int64_t n, Body body) {
  int64_t i = blocks_of<kChunk>(0, n, body);
  i = blocks_of<32>(i, n, body);  // GCC unrolls shorter loops completely before it vectorizes
  for (; i < n; ++i) body(i);
}

// Scale of a stretch of one run. `learned` is s0 * exp(theta), before rounding.
struct Scale {
  float value, inverse, learned, zero;

  DEEPQAT_INLINE float value_at(int64_t) const { return value; }
  DEEPQAT_INLINE float inverse_at(int64_t) const { return inverse; }
};

// Scale per element of several short runs: the compiler does not vectorize loops over a single short run.
struct ScalesOfChunk {
  alignas(64) float value[kChunk];
  alignas(64) float inverse[kChunk];

  // In whole vectors if possible: a vector load after narrower stores stalls.
  DEEPQAT_INLINE void fill(int64_t begin, int64_t n, float its_value, float its_inverse) {
    if (n % 16 != 0) {
      std::fill_n(value + begin, n, its_value);
      std::fill_n(inverse + begin, n, its_inverse);
      return;
    }
    using Sixteen = float __attribute__((vector_size(64)));
    const Sixteen values = its_value - Sixteen{}, inverses = its_inverse - Sixteen{};
    for (int64_t i = begin; i < begin + n; i += 16) {
      memcpy(value + i, &values, sizeof values);
      memcpy(inverse + i, &inverses, sizeof inverses);
    }
  }
  DEEPQAT_INLINE float value_at(int64_t i) const { return value[i]; }
  DEEPQAT_INLINE float inverse_at(int64_t i) const { return inverse[i]; }
};

// Grid of a stretch; without a zero point for several runs.
template <typename Grid>
DEEPQAT_INLINE auto grid_at(const Grid& grid, const Scale& scale) {
  return grid.at(scale.zero);
}

template <typename Grid>
DEEPQAT_INLINE auto grid_at(const Grid& grid, const ScalesOfChunk&) {
  return grid.at(0.0f);
}

// True if runs of `block` elements are processed several at a time: a loop over a whole chunk is faster.
constexpr bool is_short(int64_t block) { return block > 0 && block <= 32 && kChunk % block == 0; }

float zero_of(const Scales& scales, int64_t run) { return scales.zero == nullptr ? 0.0f : scales.zero[run]; }

void effective_scales(const Scales& scales, int64_t begin, int64_t end, float* value, float* inverse, float* learned) {
  const float* s0 = scales.s0 + begin;
  const int64_t n = end - begin;
  if (scales.theta == nullptr) {
    for (int64_t i = 0; i < n; ++i) learned[i] = s0[i];
  } else {
    with_dtype(scales.theta_dtype, [&](auto zero) {
      const auto* theta = static_cast<const decltype(zero)*>(scales.theta) + begin;
      for (int64_t i = 0; i < n; ++i) learned[i] = s0[i] * learned_factor(load(theta[i]));
    });
  }
  const auto stored_in = [&](auto zero) {
    for (int64_t i = 0; i < n; ++i) value[i] = stored_scale<decltype(zero)>(learned[i]);
  };
  switch (scales.stored_as) {
    case Stored::kFloat32: stored_in(float{}); break;
    case Stored::kBFloat16: stored_in(BFloat16{}); break;
    case Stored::kHalf: stored_in(Half{}); break;
    case Stored::kE8M0:
      for (int64_t i = 0; i < n; ++i) value[i] = power_of_two(learned[i]);
      break;
    case Stored::kE4M3:
      for (int64_t i = 0; i < n;) {
        const int64_t which = (begin + i) / scales.per_above;
        const int64_t last = std::min(n, (which + 1) * scales.per_above - begin);
        const float above = scales.above[which];
        for (; i < last; ++i) value[i] = below_global(learned[i], above);
      }
      break;
  }
  for (int64_t i = 0; i < n; ++i) inverse[i] = 1.0f / value[i];
}

// Call body(offset, length, scale, run, segment) for every segment of every run, on all threads.
template <typename Body>
void for_each_segment(const Scales& scales, Body body) {
  const int64_t segments = segments_of(scales.block);
  // A task is some 16,384 elements: a segment, or many short runs.
  const int64_t runs_at_once = std::clamp<int64_t>(kSegment / std::max<int64_t>(scales.block, 1), 1, kScalesAtOnce);
  const int64_t batches = (scales.count + runs_at_once - 1) / runs_at_once;
  at::parallel_for(0, batches * segments, 4, [&](int64_t begin, int64_t end) {
    float value[kScalesAtOnce], inverse[kScalesAtOnce], learned[kScalesAtOnce];
    int64_t known = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t batch = task / segments, segment = task % segments;
      const int64_t first = batch * runs_at_once, last = std::min(first + runs_at_once, scales.count);
      if (batch != known) effective_scales(scales, first, last, value, inverse, learned);
      known = batch;
      const int64_t start = segment * kSegment, length = std::min<int64_t>(kSegment, scales.block - start);
      for (int64_t run = first; run < last; ++run) {
        const int64_t i = run - first;
        body(run * scales.block + start, length, Scale{value[i], inverse[i], learned[i], zero_of(scales, run)}, run, segment);
      }
    }
  });
}

// Fake-quantize a stretch. For several runs in two loops, which the compiler vectorizes better.
template <typename T, typename G, typename S>
DEEPQAT_INLINE void through_grid(const T* from, T* to, int64_t n, const G& g, const S& s) {
  if constexpr (std::is_same_v<S, ScalesOfChunk>) {
    float v[kChunk];
    unrolled(n, [&](int64_t i) { v[i] = load(from[i]) * s.inverse[i]; });
    unrolled(n, [&](int64_t i) { store(g.round(v[i]) * s.value[i], to + i); });
  } else {
    unrolled(n, [&](int64_t i) { store(g.round(load(from[i]) * s.inverse) * s.value, to + i); });
  }
}

// Call body(offset, length, scales) for the chunks of `count` runs of `block` elements each, with their scales.
template <typename Body>
DEEPQAT_INLINE void for_each_chunk(int64_t count, int64_t block, const float* value, const float* inverse, Body body) {
  ScalesOfChunk of_chunk;
  const auto chunks = [&](auto known) {  // runs of NVFP4 and MX have a constant length
    const int64_t length = known.value > 0 ? known.value : block, runs = kChunk / length;
    for (int64_t first = 0; first < count; first += runs) {
      const int64_t n = std::min(runs, count - first);
      for (int64_t run = 0; run < n; ++run) of_chunk.fill(run * length, length, value[first + run], inverse[first + run]);
      body(first * length, n * length, of_chunk);
    }
  };
  if (block == 16) return chunks(std::integral_constant<int64_t, 16>{});
  if (block == 32) return chunks(std::integral_constant<int64_t, 32>{});
  chunks(std::integral_constant<int64_t, 0>{});
}

// Call body(offset, length, scale) for stretches of one run, or of several short runs if the grid has no zero points.
template <bool kShifted, typename Body>
void for_each_stretch(const Scales& scales, Body body) {
  if (kShifted || !is_short(scales.block))
    return for_each_segment(scales, [&](int64_t offset, int64_t n, const Scale& s, int64_t, int64_t) { body(offset, n, s); });
  const int64_t batches = (scales.count + kScalesAtOnce - 1) / kScalesAtOnce;
  at::parallel_for(0, batches, 4, [&](int64_t begin, int64_t end) {
    float value[kScalesAtOnce], inverse[kScalesAtOnce], learned[kScalesAtOnce];
    for (int64_t batch = begin; batch < end; ++batch) {
      const int64_t first = batch * kScalesAtOnce, last = std::min(first + kScalesAtOnce, scales.count);
      effective_scales(scales, first, last, value, inverse, learned);
      for_each_chunk(last - first, scales.block, value, inverse, [&](int64_t offset, int64_t n, const auto& s) {
        body(first * scales.block + offset, n, s);
      });
    }
  });
}

// Step 3 of the order of addition in kernels.h, on `lanes` times kVector accumulators, which are overwritten.
DEEPQAT_INLINE float sum_of_lanes(float* a, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane, a += kVector)
    for (int half = kVector / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) a[j] += a[j + half];
  a -= lanes * kVector;
  for (int64_t half = lanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) a[lane * kVector] += a[(lane + half) * kVector];
  return a[0];
}

float sum_by_halves(float* accumulators, int64_t lanes) {
  switch (lanes) {  // constants for groups of weights, for unrolling
    case 4: return sum_of_lanes(accumulators, 4);
    case 8: return sum_of_lanes(accumulators, 8);
    case 16: return sum_of_lanes(accumulators, 16);
    default: return sum_of_lanes(accumulators, lanes);
  }
}

// Sum of n terms in the order of kernels.h; term(i) may have side effects for element i.
template <typename Term>
DEEPQAT_INLINE float sum_in_order(int64_t n, Term term) {
  alignas(64) float accumulators[kPositions];
  const int64_t used = std::min<int64_t>(n, kPositions);
  const int64_t padded = (used + kVector - 1) / kVector * kVector;
  unrolled(used, [&](int64_t p) { accumulators[p] = 0.0f + term(p); });
  for (int64_t p = used; p < padded; ++p) accumulators[p] = 0.0f;
  int64_t begin = kPositions;
  for (; begin + kPositions <= n; begin += kPositions)
    unrolled(kPositions, [&](int64_t p) { accumulators[p] += term(begin + p); });
  if (begin < n) unrolled(n - begin, [&](int64_t p) { accumulators[p] += term(begin + p); });
  // Lanes beyond the last one used, up to a power of two, are zero as well.
  int64_t lanes = 1;
  while (lanes * kVector < used) lanes *= 2;
  for (int64_t p = padded; p < lanes * kVector; ++p) accumulators[p] = 0.0f;
  return sum_by_halves(accumulators, lanes);
}

// Signs of eight integers, one bit each.
DEEPQAT_INLINE uint8_t signs_of(const int32_t* x) {
#if defined(__AVX__)
  return static_cast<uint8_t>(_mm256_movemask_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(x))));
#else
  uint8_t signs = 0;
  for (int j = 0; j < 8; ++j) signs |= static_cast<uint8_t>(static_cast<uint32_t>(x[j]) >> 31 << j);
  return signs;
#endif
}

// Mask of n <= kChunk values, one bit each: 1 inside the range.
template <typename G>
DEEPQAT_INLINE void pack_inside(const G& grid, const float* v, int64_t n, uint8_t* mask) {
  int32_t flags[kChunk];
  unrolled(n, [&](int64_t j) { flags[j] = grid.inside(v[j]) ? -1 : 0; });
  for (int64_t j = n; j % 8 != 0; ++j) flags[j] = 0;
  for (int64_t j = 0; j < n; j += 8) mask[j / 8] = signs_of(flags + j);
}

// Pack n codes of four bits, a multiple of eight, as pair_of does.
DEEPQAT_INLINE void pack_pairs(const uint8_t* codes, int64_t n, uint8_t* packed) {
  for (int64_t j = 0; j < n; j += 8) {
    uint64_t eight;
    memcpy(&eight, codes + j, sizeof eight);
    eight = (eight | eight >> 4) & 0x00ff00ff00ff00ffu;
    eight = (eight | eight >> 8) & 0x0000ffff0000ffffu;
    const auto four = static_cast<uint32_t>(eight | eight >> 16);
    memcpy(packed + j / 2, &four, sizeof four);
  }
}

// For every byte of a mask: words with all bits set for the kept elements of eight.
template <size_t kSize>
struct Kept {
  uint64_t words[256][kSize];

  constexpr Kept() : words() {
    const int bits = 8 * static_cast<int>(kSize), in_word = 64 / bits;
    for (int byte = 0; byte < 256; ++byte)
      for (int j = 0; j < 8; ++j)
        if ((byte >> j & 1) != 0) words[byte][j / in_word] |= ~0ull >> (64 - bits) << (j % in_word * bits);
  }
};

template <size_t kSize>
constexpr Kept<kSize> kKept;

// Largest magnitude, or NaN if there is a NaN: as integers, the bits of magnitudes have the order of their values, with
// NaNs at the end.
template <typename T>
uint32_t largest_magnitude(const T* x, int64_t n) {
  uint32_t lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] = std::max(lanes[j], bits_of(load(x[i + j])) & 0x7fffffffu);
  for (; i < n; ++i) lanes[0] = std::max(lanes[0], bits_of(load(x[i])) & 0x7fffffffu);
  for (int half = 8; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] = std::max(lanes[j], lanes[j + half]);
  return lanes[0];
}

}  // namespace
}  // namespace deepqat::cpu
