// Kernels on the CPU, with the same arithmetic as on the GPU.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "loops.h"
#include "tokens.h"
#include "../dispatch.h"

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

void quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* codes_, uint8_t* mask, void* values_,
              float* effective) {
  if (effective != nullptr) effective_scale(scales, effective);
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    using T = decltype(zero);
    const auto* x = static_cast<const T*>(x_);
    auto* codes = static_cast<typename decltype(the_grid)::Code*>(codes_);
    auto* values = static_cast<T*>(values_);
    // If bytes of the mask may belong to two runs, the mask is computed in a separate pass.
    const bool bytes_of_runs = scales.block % 8 == 0 || scales.count == 1;
    for_each_stretch<the_grid.kShifted>(scales, [&](int64_t offset, int64_t length, const auto& s) {
      const auto g = grid_at(the_grid, s);  // a copy, as a reference could alias the output
      for (int64_t i = 0; i < length; i += kChunk) {
        const int64_t n = std::min(kChunk, length - i);
        const auto* in = x + offset + i;
        float v[kChunk];
        unrolled(n, [&](int64_t j) { v[j] = load(in[j]) * s.inverse_at(j); });
        auto* out = codes + offset + i;
        unrolled(n, [&](int64_t j) { out[j] = g.quantized(v[j]); });
        if (values != nullptr) {
          auto* to = values + offset + i;
          unrolled(n, [&](int64_t j) { store(g.round(v[j]) * s.value_at(j), to + j); });
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
}

void dequantize(const void* codes_, const Scales& scales, int grid, Dtype dtype, void* out_, void* zeros) {
  if (zeros != nullptr) {
    with_dtype(scales.theta_dtype, [&](auto zero) {
      std::fill_n(static_cast<decltype(zero)*>(zeros), scales.count, decltype(zero){});
    });
  }
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    const auto* codes = static_cast<const typename decltype(the_grid)::Code*>(codes_);
    auto* out = static_cast<decltype(zero)*>(out_);
    for_each_stretch<the_grid.kShifted>(scales, [&](int64_t offset, int64_t length, const auto& s) {
      const auto g = grid_at(the_grid, s);  // a copy, as a reference could alias the output
      const auto* from = codes + offset;
      auto* to = out + offset;
      unrolled(length, [&](int64_t i) { store(g.decode(from[i]) * s.value_at(i), to + i); });
    });
  });
}

void dequantize_and_mask(const void* codes, const Scales& scales, int grid, Dtype dtype, void* out, void* grad,
                         const uint8_t* mask) {
  dequantize(codes, scales, grid, dtype, out, nullptr);
  masked(grad, mask, dtype, scales.numel(), grad);
}

void fake_quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* out_) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* out = static_cast<decltype(zero)*>(out_);
    for_each_stretch<the_grid.kShifted>(scales, [&](int64_t offset, int64_t length, const auto& s) {
      const auto g = grid_at(the_grid, s);  // a copy, as a reference could alias the output
      const auto* from = x + offset;
      auto* to = out + offset;
      through_grid(from, to, length, g, s);
    });
  });
}

namespace {

// Compute grad_x, and the sums over segments of grad_theta's terms if partial_sums is not null.
template <bool kWeight, typename T, typename Grid>
void backward_of(Grid the_grid, const T* grad, const T* x, const Scales& scales, T* grad_x, float* partial_sums) {
  if (partial_sums == nullptr)
    return for_each_stretch<the_grid.kShifted>(scales, [&](int64_t offset, int64_t length, const auto& s) {
      const auto g = grid_at(the_grid, s);  // a copy, as a reference could alias the output
      const auto *from = x + offset, *dy = grad + offset;
      auto* dx = grad_x + offset;
      unrolled(length, [&](int64_t i) {
        const float v = load(from[i]) * s.inverse_at(i);
        if constexpr (kWeight) dx[i] = nan_unless_finite(kept(dy[i], g.inside(v)), v);
        if constexpr (!kWeight) dx[i] = kept(dy[i], g.inside(v));
      });
    });
  const int64_t segments = segments_of(scales.block);
  for_each_segment(scales, [&](int64_t offset, int64_t length, Scale s, int64_t run, int64_t segment) {
    const auto g = the_grid.at(s.zero);
    const auto *from = x + offset, *dy = grad + offset;
    auto* dx = grad_x + offset;
    partial_sums[run * segments + segment] = sum_in_order(length, [&](int64_t i) {
      const float v = load(from[i]) * s.inverse;
      const T dy_i = dy[i];
      dx[i] = kept(dy_i, g.inside(v));
      const float term = load(dy_i) * g.scale_term(v, g.round(v));
      return kWeight ? term + (v - v) : term;  // adds 0, or NaN
    });
  });
}

}  // namespace

void fake_quantize_backward(const void* grad_, const void* x_, Dtype dtype, const Scales& scales, int grid,
                            float factor, bool of_weight, void* grad_x_, float* partial_sums, void* grad_theta) {
  const int64_t segments = segments_of(scales.block);
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    using T = decltype(zero);
    const auto *grad = static_cast<const T*>(grad_), *x = static_cast<const T*>(x_);
    auto* grad_x = static_cast<T*>(grad_x_);
    float* const sums = grad_theta == nullptr ? nullptr : partial_sums;
    of_weight ? backward_of<true>(the_grid, grad, x, scales, grad_x, sums)
              : backward_of<false>(the_grid, grad, x, scales, grad_x, sums);
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
        if (grad == out && mask[i / 8] == 0xff) continue;  // in place, nothing to do
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

void quantize_tokens(const void* x_, Dtype dtype, const Tokens& tokens, void* codes_, float* scale,
                     int8_t* zero_point) {
  with_dtype_and_token_grid(dtype, tokens, [&](auto zero, auto grids) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* codes = static_cast<typename decltype(grids)::Grid::Code*>(codes_);
    const auto known = [&](int64_t first, int64_t count, const float* its_scales, const auto& grid) {
      std::copy_n(its_scales, count, scale + first);
      std::fill_n(zero_point + first, count, zero_point_of(grid));
    };
    for_each_token(tokens, grids, x, known, [&](int64_t offset, int64_t length, auto g, const auto& s) {
      const auto* from = x + offset;
      auto* to = codes + offset;
      unrolled(length, [&](int64_t i) { to[i] = g.quantized(load(from[i]) * s.inverse_at(i)); });
    });
  });
}

void keep_tokens(const void* x_, Dtype dtype, const Tokens& tokens, void* values_, uint8_t* codes, uint8_t* mask,
                 void* scales) {
  with_dtype_and_float_token_grid(dtype, tokens, [&](auto zero, auto grids) {
    using Grid = typename decltype(grids)::Grid;
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* values = static_cast<decltype(zero)*>(values_);
    const auto known = [&](int64_t first, int64_t count, const float* its_scales, const auto&) {
      store_scales(its_scales, tokens, first, count, scales);
    };
    for_each_token(tokens, grids, x, known, [&](int64_t offset, int64_t length, auto g, const auto& s) {
      for (int64_t i = 0; i < length; i += kChunk) {
        const int64_t n = std::min(kChunk, length - i);
        const auto* from = x + offset + i;
        auto* to = values + offset + i;
        float v[kChunk];
        uint8_t code[kChunk];
        unrolled(n, [&](int64_t j) { v[j] = load(from[j]) * s.inverse_at(j); });
        unrolled(n, [&](int64_t j) { store(g.round(v[j]) * s.value_at(j), to + j); });
        auto* its_codes = codes + (offset + i) * Grid::kBits / 8;
        unrolled(n, [&](int64_t j) { (Grid::kBits == 8 ? its_codes : code)[j] = g.quantized(v[j]); });
        if (Grid::kBits == 4) pack_pairs(code, n, its_codes);
        if (mask != nullptr) pack_inside(g, v, n, mask + (offset + i) / 8);
      }
    });
  });
}

void fake_quantize_tokens(const void* x_, Dtype dtype, const Tokens& tokens, void* out_, void* grad_) {
  with_dtype_and_token_grid(dtype, tokens, [&](auto zero, auto grids) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto *out = static_cast<decltype(zero)*>(out_), *grad = static_cast<decltype(zero)*>(grad_);
    const auto known = [](int64_t, int64_t, const float*, const auto&) {};
    for_each_token(tokens, grids, x, known, [&](int64_t offset, int64_t length, auto g, const auto& s) {
      const auto* from = x + offset;
      if (out != nullptr) through_grid(from, out + offset, length, g, s);
      if (grad == nullptr) return;
      auto* dx = grad + offset;
      unrolled(length, [&](int64_t i) { dx[i] = kept(dx[i], g.inside(load(from[i]) * s.inverse_at(i))); });
    });
  });
}

void fake_quantize_tokens_backward(const void* grad_, const void* x_, Dtype dtype, const Tokens& tokens,
                                   void* grad_x_) {
  with_dtype_and_token_grid(dtype, tokens, [&](auto zero, auto grids) {
    using T = decltype(zero);
    const auto* x = static_cast<const T*>(x_);
    const auto* grad = static_cast<const T*>(grad_);
    auto* grad_x = static_cast<T*>(grad_x_);
    const auto known = [](int64_t, int64_t, const float*, const auto&) {};
    for_each_token(tokens, grids, x, known, [&](int64_t offset, int64_t length, auto g, const auto& s) {
      const auto *from = x + offset, *dy = grad + offset;
      auto* dx = grad_x + offset;
      unrolled(length, [&](int64_t i) { dx[i] = kept(dy[i], g.inside(load(from[i]) * s.inverse_at(i))); });
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
