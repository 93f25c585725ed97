// Kernels of fused.h on the CPU.

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "thread_loops.h"
#include "../dispatch.h"
#include "../fused.h"

namespace deepqat::cpu {
namespace {

// Call body(begin, end) for ranges of rows on all threads, some 65,536 elements at a time.
template <typename Body>
void for_rows(int64_t count, int64_t features, Body body) {
  at::parallel_for(0, count, 1 + 4 * kSegment / (features + 1), body);
}

// n gradients from element i on, a multiple of eight, as fp32: 0 where the mask bit is 0.
template <typename T>
DEEPQAT_INLINE void masked_gradients(const T* grad, const uint8_t* mask, int64_t i, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = load(kept(grad[i + j], (mask[(i + j) / 8] >> ((i + j) % 8) & 1) != 0));
}

}  // namespace

void rms_norm_quantize(const void* x_, const void* weight_, Dtype dtype, int64_t count, int64_t features, float eps,
                       const Scales& scales, int grid, void* codes, uint8_t* mask, void* values, float* rstd) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    using T = decltype(zero);
    const auto* x = static_cast<const T*>(x_);
    const auto* weight = static_cast<const T*>(weight_);
    const auto out = writer<T>(the_grid, codes, mask, values);
    const Scale scale = scale_of(scales, 0);
    for_rows(count, features, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = x + row * features;
        const float sum = sum_in_order(features, [&](int64_t i) {
          const float value = load(from[i]);
          return value * value;
        });
        const float r = rstd[row] = inverse_root(sum, features, eps);
        for (int64_t i = 0; i < features; i += kChunk) {
          const int64_t n = std::min(kChunk, features - i);
          float y[kChunk];
          unrolled(n, [&](int64_t j) { y[j] = normed<T>(load(from[i + j]), r, load(weight[i + j])); });
          out.write(y, row * features + i, n, scale);
        }
      }
    });
  });
}

void rms_norm_backward(const void* grad_, const void* x_, const void* weight_, const float* rstd, const uint8_t* mask,
                       Dtype dtype, int64_t count, int64_t features, void* grad_x_, float* partial,
                       void* grad_weight_) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto *grad = static_cast<const T*>(grad_), *x = static_cast<const T*>(x_);
    const auto* weight = static_cast<const T*>(weight_);
    auto *grad_x = static_cast<T*>(grad_x_), *grad_weight = static_cast<T*>(grad_weight_);
    const int64_t sums = sums_of_rows(count);
    for_rows(sums, features * kRowsPerSum, [&](int64_t begin, int64_t end) {
      const auto dy = std::make_unique<float[]>(features);
      for (int64_t row = begin * kRowsPerSum; row < std::min(end * kRowsPerSum, count); ++row) {
        float* sum = partial == nullptr ? nullptr : partial + row / kRowsPerSum * features;
        if (sum != nullptr && row % kRowsPerSum == 0) std::fill(sum, sum + features, 0.0f);
        const T* from = x + row * features;
        T* to = grad_x + row * features;
        const float r = rstd[row];
        float* const given = dy.get();
        masked_gradients(grad, mask, row * features, features, given);
        const float inner = sum_in_order(features, [&](int64_t i) {
          return (given[i] * load(weight[i])) * (load(from[i]) * r);
        });
        const float mean = inner / static_cast<float>(features);
        unrolled(features, [&](int64_t i) {
          store((given[i] * load(weight[i]) - (load(from[i]) * r) * mean) * r, to + i);
        });
        if (sum == nullptr) continue;
        unrolled(features, [&](int64_t i) { sum[i] += given[i] * rounded_to<T>(load(from[i]) * r); });
      }
    });
    if (grad_weight == nullptr) return;
    at::parallel_for(0, features, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float total = 0.0f;
        for (int64_t one = 0; one < sums; ++one) total += partial[one * features + i];
        store(total, grad_weight + i);
      }
    });
  });
}

void silu_mul_quantize(const void* gate_, const void* up_, Dtype dtype, const Scales& scales, int grid, void* codes,
                       uint8_t* mask, void* values) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto the_grid) {
    using T = decltype(zero);
    const auto *gate = static_cast<const T*>(gate_), *up = static_cast<const T*>(up_);
    const auto out = writer<T>(the_grid, codes, mask, values);
    const Scale scale = scale_of(scales, 0);
    const int64_t numel = scales.numel(), chunks = (numel + kChunk - 1) / kChunk;
    for_rows(chunks, kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * kChunk; i < std::min(end * kChunk, numel); i += kChunk) {
        const int64_t n = std::min(kChunk, numel - i);
        float y[kChunk];
        unrolled(n, [&](int64_t j) {
          y[j] = rounded_to<T>(rounded_to<T>(silu(load(gate[i + j]))) * load(up[i + j]));
        });
        out.write(y, i, n, scale);
      }
    });
  });
}

void silu_mul_backward(const void* grad_, const void* gate_, const void* up_, const uint8_t* mask, Dtype dtype,
                       int64_t numel, void* grad_gate_, void* grad_up_) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* grad = static_cast<const T*>(grad_);
    const auto *gate = static_cast<const T*>(gate_), *up = static_cast<const T*>(up_);
    auto *grad_gate = static_cast<T*>(grad_gate_), *grad_up = static_cast<T*>(grad_up_);
    for_rows((numel + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * kChunk; i < std::min(end * kChunk, numel); i += kChunk) {
        const int64_t n = std::min(kChunk, numel - i);
        float dy[kChunk];
        masked_gradients(grad, mask, i, n, dy);
        unrolled(n, [&](int64_t j) {
          const float g = load(gate[i + j]), u = load(up[i + j]);
          store(silu_gradient(rounded_to<T>(dy[j] * u), g), grad_gate + i + j);
          store(dy[j] * rounded_to<T>(silu(g)), grad_up + i + j);
        });
      }
    });
  });
}

}  // namespace deepqat::cpu
