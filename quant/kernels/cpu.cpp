// The kernels on the CPU: the same arithmetic as on the GPU, in loops that the compiler turns into SIMD.

#include <ATen/Parallel.h>

#include <algorithm>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "arithmetic.h"
#include "kernels.h"

namespace deepqat::cpu {
namespace {

constexpr int64_t kChunk = 64;        // elements of one fully unrolled loop
constexpr int64_t kScalesAtOnce = 256;

// Calls f with a value of the type that `dtype` names.
template <typename F>
void with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kFloat32: return f(float{});
    case Dtype::kBFloat16: return f(BFloat16{});
    case Dtype::kHalf: return f(Half{});
  }
}

template <typename F>
void with_grid(int grid, const Scales& scales, F f) {
  if (grid == kE4M3Grid) return f(E4M3{});
  if (grid == kE2M1Grid) return f(E2M1{});
  const float half = static_cast<float>(1 << (grid - 1));
  const Integer codes{-half, half - 1.0f};
  if (scales.zero != nullptr) return f(ShiftedIntegers{codes});
  f(codes);
}

template <typename F>
void with_token_grid(int grid, bool symmetric, F f) {
  if (grid == kE4M3Grid) return f(FloatTokens{});
  const float half = static_cast<float>(1 << (grid - 1));
  f(IntegerTokens{{-half, half - 1.0f}, symmetric});
}

// body(i) for i from `begin` in blocks of kLength, as many as fit before n; returns where it stopped.
template <int64_t kLength, typename Body>
DEEPQAT_INLINE int64_t blocks_of(int64_t begin, int64_t n, Body body) {
  for (; begin + kLength <= n; begin += kLength) {
#pragma GCC ivdep
    for (int64_t j = 0; j < kLength; ++j) body(begin + j);
  }
  return begin;
}

// body(i) for i in [0, n), mostly in loops whose length the compiler knows.
template <typename Body>
DEEPQAT_INLINE void unrolled(int64_t n, Body body) {
  int64_t i = blocks_of<kChunk>(0, n, body);
  i = blocks_of<32>(i, n, body);  // shorter ones GCC takes apart before it looks for vectors
  for (; i < n; ++i) body(i);
}

// What one stretch of a run needs to know of its scale. `learned` is s0 * exp(theta), before rounding.
struct Scale {
  float value, inverse, learned, zero;
};

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
  with_dtype(scales.stored_as, [&](auto zero) {
    for (int64_t i = 0; i < n; ++i) value[i] = rounded_to<decltype(zero)>(learned[i]);
  });
  for (int64_t i = 0; i < n; ++i) inverse[i] = 1.0f / value[i];
}

// Calls body(offset, length, scale, run, segment) for every segment of every run, on all threads.
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

// Step 3 of the order of addition in kernels.h, of `lanes` times kVector accumulators, which it overwrites.
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
  switch (lanes) {  // those of groups of weights, whose loops the compiler can take apart
    case 4: return sum_of_lanes(accumulators, 4);
    case 8: return sum_of_lanes(accumulators, 8);
    case 16: return sum_of_lanes(accumulators, 16);
    default: return sum_of_lanes(accumulators, lanes);
  }
}

// Sum of n terms in the order of kernels.h, where term(i) may do other work with element i.
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

// The signs of eight integers, a bit each.
DEEPQAT_INLINE uint8_t signs_of(const int32_t* x) {
#if defined(__AVX__)
  return static_cast<uint8_t>(_mm256_movemask_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(x))));
#else
  uint8_t signs = 0;
  for (int j = 0; j < 8; ++j) signs |= static_cast<uint8_t>(static_cast<uint32_t>(x[j]) >> 31 << j);
  return signs;
#endif
}

// Which of n <= kChunk values are inside the range, a bit each.
template <typename G>
DEEPQAT_INLINE void pack_inside(const G& grid, const float* v, int64_t n, uint8_t* mask) {
  int32_t flags[kChunk];
  unrolled(n, [&](int64_t j) { flags[j] = grid.inside(v[j]) ? -1 : 0; });
  for (int64_t j = n; j % 8 != 0; ++j) flags[j] = 0;
  for (int64_t j = 0; j < n; j += 8) mask[j / 8] = signs_of(flags + j);
}

// For every byte of a mask: all bits of those of eight elements that it keeps, as words.
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

// Largest magnitude, or NaN if there is one: as integers, the bits of magnitudes are in the order of their values, and
// those of NaNs above all.
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

// Range of one token, extended to 0. NaN where the token holds a NaN: a comparison with one would drop it.
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

template <typename Body>
void for_each_token(int64_t tokens, int64_t features, Body body) {
  at::parallel_for(0, tokens, 1 + 4 * kSegment / (features + 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) body(token);
  });
}

}  // namespace

void effective_scale(const Scales& scales, float* out) {
  at::parallel_for(0, (scales.count + kScalesAtOnce - 1) / kScalesAtOnce, 4, [&](int64_t begin, int64_t end) {
    float inverse[kScalesAtOnce], learned[kScalesAtOnce];
    for (int64_t batch = begin; batch < end; ++batch) {
      const int64_t first = batch * kScalesAtOnce;
      effective_scales(scales, first, std::min(first + kScalesAtOnce, scales.count), out + first, inverse, learned);
    }
  });
}

void quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* codes_, uint8_t* mask,
              void* values_) {
  with_dtype(dtype, [&](auto zero) {
    with_grid(grid, scales, [&](auto the_grid) {
      using T = decltype(zero);
      const auto* x = static_cast<const T*>(x_);
      auto* codes = static_cast<typename decltype(the_grid)::Code*>(codes_);
      auto* values = static_cast<T*>(values_);
      // A byte of the mask may belong to two runs; then the mask is made in a pass of its own.
      const bool bytes_of_runs = scales.block % 8 == 0 || scales.count == 1;
      for_each_segment(scales, [&](int64_t offset, int64_t length, Scale s, int64_t, int64_t) {
        const auto g = the_grid.at(s.zero);  // a copy: what is written could alias a reference
        for (int64_t i = 0; i < length; i += kChunk) {
          const int64_t n = std::min(kChunk, length - i);
          const auto* in = x + offset + i;
          float v[kChunk];
          unrolled(n, [&](int64_t j) { v[j] = load(in[j]) * s.inverse; });
          auto* out = codes + offset + i;
          unrolled(n, [&](int64_t j) { out[j] = g.quantized(v[j]); });
          if (values != nullptr) {
            auto* to = values + offset + i;
            unrolled(n, [&](int64_t j) { store(g.round(v[j]) * s.value, to + j); });
          }
          if (mask != nullptr && bytes_of_runs) pack_inside(g, v, n, mask + (offset + i) / 8);
        }
      });
      if (mask == nullptr || bytes_of_runs) return;
      std::fill(mask, mask + (scales.numel() + 7) / 8, 0);
      float value, inverse, learned;
      for (int64_t run = 0; run < scales.count; ++run) {
        effective_scales(scales, run, run + 1, &value, &inverse, &learned);
        const auto g = the_grid.at(zero_of(scales, run));
        for (int64_t i = run * scales.block; i < (run + 1) * scales.block; ++i)
          mask[i / 8] |= static_cast<uint8_t>((g.inside(load(x[i]) * inverse) ? 1 : 0) << (i % 8));
      }
    });
  });
}

void dequantize(const void* codes_, const Scales& scales, int grid, Dtype dtype, void* out_) {
  with_dtype(dtype, [&](auto zero) {
    with_grid(grid, scales, [&](auto the_grid) {
      const auto* codes = static_cast<const typename decltype(the_grid)::Code*>(codes_);
      auto* out = static_cast<decltype(zero)*>(out_);
      for_each_segment(scales, [&](int64_t offset, int64_t length, Scale s, int64_t, int64_t) {
        const auto g = the_grid.at(s.zero);  // a copy: what is written could alias a reference
        const auto* from = codes + offset;
        auto* to = out + offset;
        unrolled(length, [&](int64_t i) { store(g.decode(from[i]) * s.value, to + i); });
      });
    });
  });
}

void fake_quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* out_) {
  with_dtype(dtype, [&](auto zero) {
    with_grid(grid, scales, [&](auto the_grid) {
      const auto* x = static_cast<const decltype(zero)*>(x_);
      auto* out = static_cast<decltype(zero)*>(out_);
      for_each_segment(scales, [&](int64_t offset, int64_t length, Scale s, int64_t, int64_t) {
        const auto g = the_grid.at(s.zero);  // a copy: what is written could alias a reference
        const auto* from = x + offset;
        auto* to = out + offset;
        unrolled(length, [&](int64_t i) { store(g.round(load(from[i]) * s.inverse) * s.value, to + i); });
      });
    });
  });
}

void fake_quantize_backward(const void* grad_, const void* x_, Dtype dtype, const Scales& scales, int grid,
                            float factor, void* grad_x_, float* partial_sums, void* grad_theta) {
  const int64_t segments = segments_of(scales.block);
  with_dtype(dtype, [&](auto zero) {
    with_grid(grid, scales, [&](auto the_grid) {
      using T = decltype(zero);
      const auto* grad = static_cast<const T*>(grad_);
      const auto* x = static_cast<const T*>(x_);
      auto* grad_x = static_cast<T*>(grad_x_);
      for_each_segment(scales, [&](int64_t offset, int64_t length, Scale s, int64_t run, int64_t segment) {
        const auto g = the_grid.at(s.zero);  // a copy: what is written could alias a reference
        const auto *from = x + offset, *dy = grad + offset;
        auto* dx = grad_x + offset;
        if (grad_theta == nullptr)
          return unrolled(length, [&](int64_t i) { dx[i] = kept(dy[i], g.inside(load(from[i]) * s.inverse)); });
        partial_sums[run * segments + segment] = sum_in_order(length, [&](int64_t i) {
          const float v = load(from[i]) * s.inverse;
          const T dy_i = dy[i];
          dx[i] = kept(dy_i, g.inside(v));
          return load(dy_i) * g.scale_term(v, g.round(v));
        });
      });
    });
  });
  if (grad_theta == nullptr) return;
  with_dtype(scales.theta_dtype, [&](auto zero) {
    auto* out = static_cast<decltype(zero)*>(grad_theta);
    at::parallel_for(0, (scales.count + kScalesAtOnce - 1) / kScalesAtOnce, 4, [&](int64_t begin, int64_t end) {
      float value[kScalesAtOnce], inverse[kScalesAtOnce], learned[kScalesAtOnce];
      for (int64_t batch = begin; batch < end; ++batch) {
        const int64_t first = batch * kScalesAtOnce, last = std::min(first + kScalesAtOnce, scales.count);
        effective_scales(scales, first, last, value, inverse, learned);
        for (int64_t run = first; run < last; ++run) {
          const float* sums = partial_sums + run * segments;
          const float sum = segments == 1 ? sums[0] : sum_in_order(segments, [&](int64_t i) { return sums[i]; });
          store(sum * learned[run - first] * factor, out + run);
        }
      }
    });
  });
}

void masked(const void* grad_, const uint8_t* mask, Dtype dtype, int64_t numel, void* out_) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* grad = static_cast<const T*>(grad_);
    auto* out = static_cast<T*>(out_);
    at::parallel_for(0, (numel + kSegment - 1) / kSegment, 4, [&](int64_t begin, int64_t end) {
      const int64_t last = std::min<int64_t>(end * kSegment, numel);
      int64_t i = begin * kSegment;
      for (; i + 8 <= last; i += 8) {
        uint64_t eight[sizeof(T)];
        memcpy(eight, grad + i, sizeof eight);
        for (size_t w = 0; w < sizeof(T); ++w) eight[w] &= kKept<sizeof(T)>.words[mask[i / 8]][w];
        memcpy(out + i, eight, sizeof eight);
      }
      for (; i < last; ++i) out[i] = kept(grad[i], (mask[i / 8] >> (i % 8) & 1) != 0);
    });
  });
}

void amax(const void* x_, Dtype dtype, int64_t count, int64_t block, float* partial, float* out) {
  const int64_t segments = segments_of(block);
  float* const found = segments == 1 ? out : partial;
  with_dtype(dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    at::parallel_for(0, count * segments, 4, [&](int64_t begin, int64_t end) {
      int64_t run = begin / segments, segment = begin % segments;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t start = segment * kSegment, length = std::min<int64_t>(kSegment, block - start);
        found[task] = float_of(largest_magnitude(x + run * block + start, length));
        if (++segment == segments) segment = 0, ++run;
      }
    });
  });
  if (segments == 1) return;
  for (int64_t run = 0; run < count; ++run)
    out[run] = float_of(largest_magnitude(partial + run * segments, segments));
}

void quantize_tokens(const void* x_, Dtype dtype, int64_t tokens, int64_t features, int grid, bool symmetric,
                     void* codes_, float* scale, int8_t* zero_point) {
  with_dtype(dtype, [&](auto zero) {
    with_token_grid(grid, symmetric, [&](auto grids) {
      const auto* x = static_cast<const decltype(zero)*>(x_);
      auto* codes = static_cast<typename decltype(grids)::Grid::Code*>(codes_);
      for_each_token(tokens, features, [&](int64_t token) {
        const auto* from = x + token * features;
        auto* to = codes + token * features;
        const auto t = token_of(grids, from, features);
        unrolled(features, [&](int64_t i) { to[i] = t.grid.quantized(load(from[i]) * t.inverse); });
        scale[token] = t.scale;
        zero_point[token] = zero_point_of(t.grid);
      });
    });
  });
}

void fake_quantize_tokens(const void* x_, Dtype dtype, int64_t tokens, int64_t features, int grid, bool symmetric,
                          void* out_) {
  with_dtype(dtype, [&](auto zero) {
    with_token_grid(grid, symmetric, [&](auto grids) {
      const auto* x = static_cast<const decltype(zero)*>(x_);
      auto* out = static_cast<decltype(zero)*>(out_);
      for_each_token(tokens, features, [&](int64_t token) {
        const auto* from = x + token * features;
        auto* to = out + token * features;
        const auto t = token_of(grids, from, features);
        unrolled(features, [&](int64_t i) { store(t.grid.round(load(from[i]) * t.inverse) * t.scale, to + i); });
      });
    });
  });
}

void fake_quantize_tokens_backward(const void* grad_, const void* x_, Dtype dtype, int64_t tokens, int64_t features,
                                   int grid, bool symmetric, void* grad_x_) {
  with_dtype(dtype, [&](auto zero) {
    with_token_grid(grid, symmetric, [&](auto grids) {
      using T = decltype(zero);
      const auto* x = static_cast<const T*>(x_);
      const auto* grad = static_cast<const T*>(grad_);
      auto* grad_x = static_cast<T*>(grad_x_);
      for_each_token(tokens, features, [&](int64_t token) {
        const auto *from = x + token * features, *dy = grad + token * features;
        auto* dx = grad_x + token * features;
        const auto t = token_of(grids, from, features);
        unrolled(features, [&](int64_t i) { dx[i] = kept(dy[i], t.grid.inside(load(from[i]) * t.inverse)); });
      });
    });
  });
}

}  // namespace deepqat::cpu
