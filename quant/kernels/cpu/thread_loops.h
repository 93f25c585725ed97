// Loops of the CPU kernels: over runs and segments on all threads, inside them in a form that the compiler vectorizes,
// and sums in the order of kernels.h.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

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
  i = blocks_of<32>(i, n, body);
  i = blocks_of<16>(i, n, body);  // groups of NVFP4
  for (; i < n; ++i) body(i);
}

// Scale of a run. `learned` is s0 * exp(theta), before rounding.
struct Scale {
  float value, inverse, learned, zero;
};

void effective_scales(const Scales& scales, int64_t begin, int64_t end, float* value, float* inverse, float* learned) {
  const int64_t n = end - begin;
  scales.s0 == nullptr ? std::fill_n(learned, n, 1.0f) : std::copy_n(scales.s0 + begin, n, learned);
  if (scales.theta != nullptr) {
    with_dtype(scales.theta_dtype, [&](auto zero) {
      const auto* theta = static_cast<const decltype(zero)*>(scales.theta) + begin;
      for (int64_t i = 0; i < n; ++i) learned[i] *= learned_factor(load(theta[i]));
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
      for (int64_t i = 0; i < n; ++i)
        value[i] = below_global(learned[i], scales.above[(begin + i) / scales.per_above]);
      break;
  }
  for (int64_t i = 0; i < n; ++i) inverse[i] = 1.0f / value[i];
}

// Scale of one run.
Scale scale_of(const Scales& scales, int64_t run) {
  Scale scale{};
  effective_scales(scales, run, run + 1, &scale.value, &scale.inverse, &scale.learned);
  if (scales.zero != nullptr) scale.zero = scales.zero[run];
  return scale;
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
        const float zero = scales.zero == nullptr ? 0.0f : scales.zero[run];
        body(run * scales.block + start, length, Scale{value[i], inverse[i], learned[i], zero}, run, segment);
      }
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

// Sum of n terms in the order of kernels.h; term(i) may have side effects for element i.
template <typename Term>
DEEPQAT_INLINE float sum_in_order(int64_t n, Term term) {
  alignas(64) float accumulators[kPositions];
  const int64_t used = std::min<int64_t>(n, kPositions);
  unrolled(used, [&](int64_t p) { accumulators[p] = 0.0f + term(p); });
  for (int64_t begin = kPositions; begin < n; begin += kPositions)
    unrolled(std::min<int64_t>(kPositions, n - begin), [&](int64_t p) { accumulators[p] += term(begin + p); });
  // Accumulators beyond the last one used, up to a power of two of lanes, are zero.
  int64_t lanes = 1;
  while (lanes * kVector < used) lanes *= 2;
  std::fill(accumulators + used, accumulators + lanes * kVector, 0.0f);
  return lanes == 4 ? sum_of_lanes(accumulators, 4) : sum_of_lanes(accumulators, lanes);  // unrolled for groups of 32
}

// Mask of n <= kChunk values, one bit each: 1 inside the range.
template <typename G>
DEEPQAT_INLINE void pack_inside(const G& grid, const float* v, int64_t n, uint8_t* mask) {
  uint8_t flags[kChunk];
  unrolled(n, [&](int64_t j) { flags[j] = grid.inside(v[j]) ? 1 : 0; });
  std::fill(flags + n, flags + (n + 7) / 8 * 8, 0);
  for (int64_t j = 0; j < n; j += 8) {
    uint64_t eight;
    memcpy(&eight, flags + j, sizeof eight);
    mask[j / 8] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);  // byte k to bit k of the top byte
  }
}

// Outputs of quantized values: codes, and unless null, mask and fake-quantized values.
template <typename T, typename G>
struct Writer {
  G grid;
  typename G::Code* codes;
  uint8_t* mask;
  T* values;

  // Write the n <= kChunk values y from element i on, a multiple of eight if there is a mask; y is overwritten.
  DEEPQAT_INLINE void write(float* y, int64_t i, int64_t n, const Scale& s) const {
    const auto g = grid.at(s.zero);  // copies, as references could alias the output
    const float inverse = s.inverse, value = s.value;
    unrolled(n, [&](int64_t j) { y[j] *= inverse; });
    auto* to = codes + i;
    unrolled(n, [&](int64_t j) { to[j] = g.quantized(y[j]); });
    if (mask != nullptr) pack_inside(g, y, n, mask + i / 8);
    if (values == nullptr) return;
    T* out = values + i;
    unrolled(n, [&](int64_t j) { store(g.round(y[j]) * value, out + j); });
  }
};

template <typename T, typename G>
Writer<T, G> writer(G grid, void* codes, uint8_t* mask, void* values) {
  return {grid, static_cast<typename G::Code*>(codes), mask, static_cast<T*>(values)};
}

// Largest magnitude, or NaN if there is a NaN: as integers, the bits of magnitudes have the order of their values, with
// NaNs at the end.
template <typename T>
float largest_magnitude(const T* x, int64_t n) {
  uint32_t lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] = std::max(lanes[j], bits_of(load(x[i + j])) & 0x7fffffffu);
  for (; i < n; ++i) lanes[0] = std::max(lanes[0], bits_of(load(x[i])) & 0x7fffffffu);
  return float_of(*std::max_element(lanes, lanes + 16));
}

}  // namespace
}  // namespace deepqat::cpu
