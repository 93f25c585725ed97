// Kernels on the CPU, with the same arithmetic as on the GPU.

#include <ATen/Parallel.h>

#include <algorithm>

#include "thread_loops.h"
#include "../dispatch.h"
#include "../token_grids.h"

namespace deepqat::cpu {

void effective_scale(const Scales& scales, float* out) {
  at::parallel_for(0, (scales.count + kScalesAtOnce - 1) / kScalesAtOnce, 4, [&](int64_t begin, int64_t end) {
    float inverse[kScalesAtOnce], learned[kScalesAtOnce];
    for (int64_t batch = begin; batch < end; ++batch) {
      const int64_t first = batch * kScalesAtOnce;
      effective_scales(scales, first, std::min(first + kScalesAtOnce, scales.count), out + first, inverse, learned);
    }
  });
}

void quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* codes, uint8_t* mask, void* values,
              float* effective) {
  if (effective != nullptr) effective_scale(scales, effective);
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    // If bytes of the mask may belong to two runs, the mask is computed in a separate pass.
    const bool bytes_of_runs = scales.block % 8 == 0 || scales.count == 1;
    const auto out = writer<decltype(zero)>(the_grid, codes, bytes_of_runs ? mask : nullptr, values);
    for_each_segment(scales, [&](int64_t offset, int64_t length, const Scale& s, auto...) {
      for (int64_t i = offset; i < offset + length; i += kChunk) {
        const int64_t n = std::min(kChunk, offset + length - i);
        float y[kChunk];
        unrolled(n, [&](int64_t j) { y[j] = load(x[i + j]); });
        out.write(y, i, n, s);
      }
    });
    if (mask == nullptr || bytes_of_runs) return;
    std::fill(mask, mask + (scales.numel() + 7) / 8, 0);
    for (int64_t run = 0; run < scales.count; ++run) {
      const Scale s = scale_of(scales, run);
      const auto g = the_grid.at(s.zero);
      for (int64_t i = run * scales.block; i < (run + 1) * scales.block; ++i)
        mask[i / 8] |= static_cast<uint8_t>((g.inside(load(x[i]) * s.inverse) ? 1 : 0) << (i % 8));
    }
  });
}

void dequantize(const void* codes_, const Scales& scales, int grid, Dtype dtype, void* out_, void* zeros, void* grad,
                const uint8_t* mask) {
  if (zeros != nullptr) {
    with_dtype(scales.theta_dtype, [&](auto zero) {
      std::fill_n(static_cast<decltype(zero)*>(zeros), scales.count, decltype(zero){});
    });
  }
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    const auto* codes = static_cast<const typename decltype(the_grid)::Code*>(codes_);
    auto* out = static_cast<decltype(zero)*>(out_);
    for_each_segment(scales, [&](int64_t offset, int64_t length, const Scale& s, auto...) {
      const auto g = the_grid.at(s.zero);
      const auto* from = codes + offset;
      auto* to = out + offset;
      unrolled(length, [&](int64_t i) { store(g.decode(from[i]) * s.value, to + i); });
    });
  });
  if (grad != nullptr) masked(grad, mask, dtype, scales.numel());
}

void fake_quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* out_) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* out = static_cast<decltype(zero)*>(out_);
    for_each_segment(scales, [&](int64_t offset, int64_t length, const Scale& s, auto...) {
      const auto g = the_grid.at(s.zero);
      const auto* from = x + offset;
      auto* to = out + offset;
      unrolled(length, [&](int64_t i) { store(g.round(load(from[i]) * s.inverse) * s.value, to + i); });
    });
  });
}

namespace {

// Compute grad in place, and the sums over segments of grad_theta's terms if partial_sums is not null.
template <bool kWeight, typename T, typename Grid>
void backward_of(Grid the_grid, T* grad, const T* x, const Scales& scales, float* partial_sums) {
  const int64_t segments = segments_of(scales.block);
  for_each_segment(scales, [&](int64_t offset, int64_t length, const Scale& s, int64_t run, int64_t segment) {
    const auto g = the_grid.at(s.zero);
    const float inverse = s.inverse;
    const auto* from = x + offset;
    auto* dx = grad + offset;
    if (partial_sums == nullptr) {
      unrolled(length, [&](int64_t i) {
        const float v = load(from[i]) * inverse;
        dx[i] = kWeight ? nan_unless_finite(kept(dx[i], g.inside(v)), v) : kept(dx[i], g.inside(v));
      });
      return;
    }
    partial_sums[run * segments + segment] = sum_in_order(length, [&](int64_t i) {
      const float v = load(from[i]) * inverse;
      const T dy = dx[i];
      dx[i] = kept(dy, g.inside(v));
      const float term = load(dy) * g.scale_term(v, g.round(v));
      return kWeight ? term + (v - v) : term;  // adds 0, or NaN
    });
  });
}

// Write the gradients of runs: the sums of their segments, added, times s0 * exp(theta) and factor.
void store_gradients(const Scales& scales, const float* partial_sums, float factor, void* gradients) {
  const int64_t segments = segments_of(scales.block);
  with_dtype(scales.theta_dtype, [&](auto zero) {
    auto* out = static_cast<decltype(zero)*>(gradients);
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

}  // namespace

void fake_quantize_backward(void* grad_, const void* x_, Dtype dtype, const Scales& scales, int grid, float factor,
                            bool of_weight, float* partial_sums, void* grad_theta) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    auto* grad = static_cast<decltype(zero)*>(grad_);
    const auto* x = static_cast<const decltype(zero)*>(x_);
    float* const sums = grad_theta == nullptr ? nullptr : partial_sums;
    of_weight ? backward_of<true>(the_grid, grad, x, scales, sums) : backward_of<false>(the_grid, grad, x, scales, sums);
  });
  if (grad_theta != nullptr) store_gradients(scales, partial_sums, factor, grad_theta);
}

void multiply_runs(const void* x_, Dtype dtype, const Scales& factors, void* out_) {
  with_dtype(dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* out = static_cast<decltype(zero)*>(out_);
    for_each_segment(factors, [&](int64_t offset, int64_t length, const Scale& s, auto...) {
      const auto* from = x + offset;
      auto* to = out + offset;
      unrolled(length, [&](int64_t i) { store(load(from[i]) * s.value, to + i); });
    });
  });
}

void sum_products(const void* x_, const void* y_, Dtype dtype, const Scales& runs, float factor, float* partial_sums,
                  void* out) {
  const int64_t segments = segments_of(runs.block);
  with_dtype(dtype, [&](auto zero) {
    const auto *x = static_cast<const decltype(zero)*>(x_), *y = static_cast<const decltype(zero)*>(y_);
    for_each_segment(runs, [&](int64_t offset, int64_t length, const Scale&, int64_t run, int64_t segment) {
      const auto *left = x + offset, *right = y + offset;
      partial_sums[run * segments + segment] =
          sum_in_order(length, [&](int64_t i) { return load(left[i]) * load(right[i]); });
    });
  });
  store_gradients(runs, partial_sums, factor, out);
}

void masked(void* grad_, const uint8_t* mask, Dtype dtype, int64_t numel) {
  with_dtype(dtype, [&](auto zero) {
    auto* grad = static_cast<decltype(zero)*>(grad_);
    at::parallel_for(0, (numel + 7) / 8, kSegment / 2, [&](int64_t begin, int64_t end) {
      for (int64_t byte = begin; byte < end; ++byte) {
        const uint32_t bits = mask[byte];
        if (bits == 0xff) continue;
        auto* eight = grad + byte * 8;
        const int64_t n = std::min<int64_t>(8, numel - byte * 8);
        const auto mask_one = [&](int64_t j) { eight[j] = kept(eight[j], (bits >> j & 1) != 0); };
        for (int64_t j = blocks_of<8>(0, n, mask_one); j < n; ++j) mask_one(j);
      }
    });
  });
}

void amax(const void* x_, Dtype dtype, int64_t count, int64_t block, float* partial, float* out) {
  const int64_t segments = segments_of(block);
  float* const found = segments == 1 ? out : partial;
  with_dtype(dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    at::parallel_for(0, count * segments, 4, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t run = task / segments, start = task % segments * kSegment;
        found[task] = largest_magnitude(x + run * block + start, std::min<int64_t>(kSegment, block - start));
      }
    });
  });
  if (segments == 1) return;
  for (int64_t run = 0; run < count; ++run) out[run] = largest_magnitude(partial + run * segments, segments);
}

namespace {

// Grid of one token from its range, extended to 0; grids centered on 0 need only the largest magnitude. NaNs are
// tracked separately: comparisons would drop them.
template <typename Grids, typename T>
auto token_of(const Grids& grids, const T* x, int64_t n) {
  if constexpr (Grids::kCentred) return grids.token(0.0f, largest_magnitude(x, n));
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

// Codes of one token of n features, in their packed form, and unless null its mask.
template <typename Grid, typename T>
void keep_codes(const T* x, int64_t n, const Token<Grid>& token, uint8_t* codes, uint8_t* mask) {
  const Grid g = token.grid;
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t length = std::min(kChunk, n - i);
    float v[kChunk];
    uint8_t code[kChunk];
    unrolled(length, [&](int64_t j) { v[j] = load(x[i + j]) * token.inverse; });
    unrolled(length, [&](int64_t j) { code[j] = g.quantized(v[j]); });
    if (mask != nullptr) pack_inside(g, v, length, mask + i / 8);
    if (Grid::kBits == 8) {
      std::copy_n(code, length, codes + i);
    } else {
      for (int64_t j = 0; j < length; j += 2) codes[(i + j) / 2] = pair_of(code[j], code[j + 1]);
    }
  }
}

}  // namespace

void fake_quantize_tokens(const void* x_, Dtype dtype, const Tokens& tokens, void* out_, void* grad_, uint8_t* codes,
                          uint8_t* mask, void* scales) {
  with_dtype_and_token_grid(dtype, tokens, [&](auto zero, auto grids) {
    using Grid = typename decltype(grids)::Grid;
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto *out = static_cast<decltype(zero)*>(out_), *grad = static_cast<decltype(zero)*>(grad_);
    const int64_t features = tokens.features;
    at::parallel_for(0, tokens.count, 1 + 4 * kSegment / (features + 1), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t offset = token * features;
        const auto* from = x + offset;
        const Token<Grid> its = token_of(grids, from, features);
        const Grid g = its.grid;
        const float scale = its.scale, inverse = its.inverse;
        if (out != nullptr) {
          auto* to = out + offset;
          unrolled(features, [&](int64_t i) { store(g.round(load(from[i]) * inverse) * scale, to + i); });
        }
        if (grad != nullptr) {
          auto* dx = grad + offset;
          unrolled(features, [&](int64_t i) { dx[i] = kept(dx[i], g.inside(load(from[i]) * inverse)); });
        }
        if constexpr (requires { Grid::kBits; }) {
          if (codes != nullptr)
            keep_codes(from, features, its, codes + offset * Grid::kBits / 8, mask == nullptr ? mask : mask + offset / 8);
        }
        if (scales != nullptr) store_scale(scale, tokens, token, scales);
      }
    });
  });
}

void sum_rows(const void* rows_, const int64_t* places, Dtype dtype, int64_t count, int64_t per_sum, int64_t width,
              void* out_) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* rows = static_cast<const T*>(rows_);
    auto* out = static_cast<T*>(out_);
    at::parallel_for(0, count, 1 + kSegment / (width * (per_sum + 1) + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        auto* sum = out + i * width;
        std::fill(sum, sum + width, T{});
        for (int64_t k = 0; k < per_sum; ++k) {
          const auto* row = rows + places[i * per_sum + k] * width;
          unrolled(width, [&](int64_t j) { store(load(sum[j]) + load(row[j]), sum + j); });
        }
      }
    });
  });
}

}  // namespace deepqat::cpu
