// Kernels on an NVIDIA GPU. The results equal the CPU's bit for bit, except for the payload of a NaN in an fp32 or fp16
// result.

#include "launch.h"
#include "loops.h"
#include "reductions.h"
#include "token_operations.h"
#include "../dispatch.h"

namespace deepqat::cuda {
namespace {

// One thread per scale.
__global__ void __launch_bounds__(kLanes, 2) effective_scales(DeviceScales scales, float* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kLanes;
  for (int64_t run = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x; run < scales.count(); run += stride)
    out[run] = scales.of_run<false>(run).value;
}

// A thread sums eight neighboring elements over the rows of the sum, one after the other.
template <typename T>
__global__ void __launch_bounds__(kLanes, 2) summed_rows(const T* rows, const int64_t* places, Divisor per_row,
                                                         int64_t vectors, int64_t per_sum, int64_t width, T* out,
                                                         bool wide) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kLanes;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x; v < vectors; v += stride) {
    const int64_t sum_of = per_row.quotient(v), at = (v - sum_of * divided_up(width, kVector)) * kVector;
    const int n = elements_in(width - at);
    float sum[kVector] = {};
    for (int64_t k = 0; k < per_sum; ++k) {
      const T* row = rows + places[sum_of * per_sum + k] * width + at;
      float x[kVector];
      values_of(wide ? load_vector<true>(row, n) : load_vector<false>(row, n), x);
      unrolled<kVector>([&](int j) { sum[j] = rounded_to<T>(sum[j] + x[j]); });
    }
    T* to = out + sum_of * width + at;
    wide ? store_vector<true>(stored<T>(sum), to, n) : store_vector<false>(stored<T>(sum), to, n);
  }
}

template <typename Op>
void launch_tokens(const char* name, const Op& op, const Tokens& t, bool wide, void* stream) {
  const int64_t count = t.count, features = t.features;
  wide = wide && features % kVector == 0;
  if constexpr (Op::kCentred) {
    if (features <= kWarpStep) {
      int shift = 0;
      while (kVector << shift < features) ++shift;
      const int64_t per_block = kInFlight * (kLanes >> shift);
      return launch<short_tokens<Op>>(name, stream, divided_up(count, per_block), op, count, features, shift, wide);
    }
  }
  if constexpr (!Op::kShort) {
    if (features <= kTile) {
      launch<tokens<Op, kWarp>>(name, stream, divided_up(count, kWarpsPerBlock), op, count, features, wide);
    } else {
      launch<tokens<Op, kLanes>>(name, stream, count, op, count, features, wide);
    }
  }
}

}  // namespace

void effective_scale(const Scales& scales, float* out, void* stream) {
  launch<effective_scales>("effective_scale", stream, divided_up(scales.count, kLanes), DeviceScales(scales), out);
}

void quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* codes_, uint8_t* mask, void* values_,
              float* effective, void* stream) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto g) {
    using Op = Quantize<decltype(zero), decltype(g)>;
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* codes = static_cast<typename decltype(g)::Code*>(codes_);
    auto* values = static_cast<decltype(zero)*>(values_);
    const bool wide = aligned(x, codes, values);  // true for null
    launch_elementwise("quantize", Op{{x}, codes, mask, values, g, effective}, scales, scales.numel(), wide, stream);
  });
}

void dequantize(const void* codes_, const Scales& scales, int grid, Dtype dtype, void* out_, void* zeros, void* grad_,
                const uint8_t* mask, void* stream) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto g) {
    using Op = Dequantize<decltype(zero), decltype(g)>;
    const auto* codes = static_cast<const typename decltype(g)::Code*>(codes_);
    auto *out = static_cast<decltype(zero)*>(out_), *grad = static_cast<decltype(zero)*>(grad_);
    launch_elementwise("dequantize", Op{codes, out, g, zeros, grad, mask}, scales, scales.numel(),
                       aligned(codes, out, grad), stream);
  });
}

void fake_quantize(const void* x_, Dtype dtype, const Scales& scales, int grid, void* out_, void* stream) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto g) {
    using Op = FakeQuantize<decltype(zero), decltype(g)>;
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* out = static_cast<decltype(zero)*>(out_);
    launch_elementwise("fake_quantize", Op{{x}, out, g}, scales, scales.numel(), aligned(x, out), stream);
  });
}

void fake_quantize_backward(void* grad_, const void* x_, Dtype dtype, const Scales& scales, int grid, float factor,
                            bool of_weight, float* partial_sums, void* grad_theta, void* stream) {
  const char* name = "fake_quantize_backward";
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto g) {
    using T = decltype(zero);
    using G = decltype(g);
    auto* grad = static_cast<T*>(grad_);
    const auto* x = static_cast<const T*>(x_);
    const Backward<T, G> op{{x}, grad, g, of_weight};
    const bool wide = aligned(grad, x);
    if (grad_theta == nullptr) return launch_elementwise(name, op, scales, scales.numel(), wide, stream);
    launch_reduction(name, BackwardSums<T, G>{op, {partial_sums, grad_theta, factor}}, scales, wide, stream);
  });
}

void multiply_runs(const void* x_, Dtype dtype, const Scales& factors, void* out_, void* stream) {
  with_dtype(dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto* out = static_cast<decltype(zero)*>(out_);
    launch_elementwise("multiply_runs", MultiplyRuns<decltype(zero)>{{x}, out}, factors, factors.numel(),
                       aligned(x, out), stream);
  });
}

void sum_products(const void* x_, const void* y_, Dtype dtype, const Scales& runs, float factor, float* partial_sums,
                  void* out, void* stream) {
  with_dtype(dtype, [&](auto zero) {
    const auto *x = static_cast<const decltype(zero)*>(x_), *y = static_cast<const decltype(zero)*>(y_);
    const SumProducts<decltype(zero)> op{{partial_sums, out, factor}, x, y};
    launch_reduction("sum_products", op, runs, aligned(x, y), stream);
  });
}

void masked(void* grad_, const uint8_t* mask, Dtype dtype, int64_t numel, void* stream) {
  with_dtype(dtype, [&](auto zero) {
    auto* grad = static_cast<decltype(zero)*>(grad_);
    const Scales none{nullptr, nullptr, Dtype::kFloat32, Stored::kFloat32, 1, numel};
    launch_elementwise("masked", Masked<decltype(zero)>{grad, mask}, none, numel, aligned(grad), stream);
  });
}

void amax(const void* x_, Dtype dtype, int64_t count, int64_t block, float* partial, float* out, void* stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* x = static_cast<const T*>(x_);
    const Scales none{nullptr, nullptr, Dtype::kFloat32, Stored::kFloat32, count, block};
    launch_reduction("amax", Amax<T>{{x}, partial, out}, none, aligned(x), stream);
  });
}

void fake_quantize_tokens(const void* x_, Dtype dtype, const Tokens& tokens, void* out_, void* grad_, uint8_t* codes,
                          uint8_t* mask, void* scales, void* stream) {
  with_dtype_and_token_grid(dtype, tokens, [&](auto zero, auto grids) {
    using Op = FakeQuantizeTokens<decltype(zero), decltype(grids)>;
    const auto* x = static_cast<const decltype(zero)*>(x_);
    auto *out = static_cast<decltype(zero)*>(out_), *grad = static_cast<decltype(zero)*>(grad_);
    const Op op{x, out, grad, codes, mask, scales, tokens, grids};
    launch_tokens("fake_quantize_tokens", op, tokens, aligned(x, out, grad, codes), stream);
  });
}

void sum_rows(const void* rows_, const int64_t* places, Dtype dtype, int64_t count, int64_t per_sum, int64_t width,
              void* out_, void* stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* rows = static_cast<const T*>(rows_);
    auto* out = static_cast<T*>(out_);
    const int64_t per_row = divided_up(width, kVector), vectors = count * per_row;
    const bool wide = aligned(rows, out) && width % kVector == 0;
    launch<summed_rows<T>>("sum_rows", stream, divided_up(vectors, kLanes), rows, places, Divisor(per_row), vectors,
                           per_sum, width, out, wide);
  });
}

}  // namespace deepqat::cuda
