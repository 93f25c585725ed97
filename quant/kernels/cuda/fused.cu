// Kernels of fused.h on an NVIDIA GPU; results equal the CPU's bit for bit, as in cuda/quantizers.cu.

#include "launch.h"
#include "operations.h"
#include "../dispatch.h"
#include "../fused.h"

namespace deepqat::cuda {
namespace {

// Sum of a row, finished and returned in all threads of the block, each with its part `mine`. Calls of a block
// alternate between two `shared`, as over_block requires.
struct Shared {
  float lanes[kLanes], result;
};

template <typename Finish>
DEEPQAT_DEVICE float of_row(const float (&mine)[kVector], Shared& shared, Finish finish) {
  const float sum = over_block<Sums>(mine, shared.lanes);
  if (threadIdx.x == 0) shared.result = finish(sum);
  __syncthreads();
  return shared.result;
}

// Norms of rows, one block per row: first the sum of squares, then the elements, read again.
template <typename T, typename G>
struct Norm {
  Quantize<T, G> out;  // only for writing
  const T *x, *weight;
  float* rstd;
  int64_t features;
  float eps;

  struct In {
    Vector<T> x, weight;
  };

  template <bool kWide>
  DEEPQAT_DEVICE void row(int64_t row, const Scale& scale, Shared& shared) const {
    const int64_t offset = row * features;
    float mine[kVector] = {};
    for_vectors<kWide>(
        features, threadIdx.x, kLanes, [&](int64_t i, int n) { return load_vector<kWide>(x + offset + i, n); },
        [&](const Vector<T>& in, int64_t, int) {
          float values[kVector];
          values_of(in, values);
          unrolled<kVector>([&](int j) { mine[j] += values[j] * values[j]; });
        });
    const float r = of_row(mine, shared, [&](float sum) { return rstd[row] = inverse_root(sum, features, eps); });
    for_vectors<kWide>(
        features, threadIdx.x, kLanes,
        [&](int64_t i, int n) { return In{load_vector<kWide>(x + offset + i, n), load_vector<kWide>(weight + i, n)}; },
        [&](const In& in, int64_t i, int n) {
          float values[kVector], weights[kVector];
          values_of(in.x, values);
          values_of(in.weight, weights);
          unrolled<kVector>([&](int j) { values[j] = normed<T>(values[j], r, weights[j]); });
          out.template apply<kWide>(stored<T>(values), offset + i, n, [&](int) { return scale; });
        });
  }
};

template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) norms(Op op, DeviceScales scales, int64_t count, bool wide) {
  __shared__ Shared shared[2];
  const Scale scale = scales.of_run<false>(0);
  int64_t row = blockIdx.x;
  for (int turn = 0; row < count; ++turn, row += gridDim.x) {
    if (wide) {
      op.template row<true>(row, scale, shared[turn % 2]);
    } else {
      op.template row<false>(row, scale, shared[turn % 2]);
    }
  }
}

// Gradients of kRowsPerSum rows, one block for all: row by row first the mean that all elements need, then the
// elements, read again. A thread keeps the sums of the weight's gradient for its kSteps vectors in registers, so a row
// has at most kSteps * kPositions features.
template <typename T, int kSteps>
struct NormBackward {
  const T *grad, *x, *weight;
  const float* rstd;
  const uint8_t* mask;
  T* grad_x;
  float* partial;
  int64_t count, features;

  struct In {
    float grad[kVector], x[kVector], weight[kVector];
  };

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t offset, int64_t i) const {
    In in;
    const uint32_t bits = mask[(offset + i) / kVector];
    const auto inside = [&](int j) { return (bits >> j & 1u) != 0; };
    values_of(kept(load_vector<kWide>(grad + offset + i, kVector), inside), in.grad);
    values_of(load_vector<kWide>(x + offset + i, kVector), in.x);
    values_of(load_vector<kWide>(weight + i, kVector), in.weight);
    return in;
  }

  template <bool kWide>
  DEEPQAT_DEVICE void rows(int64_t first, Shared (&shared)[2]) const {
    const int64_t at = static_cast<int64_t>(threadIdx.x) * kVector;
    float sums[kSteps][kVector] = {};
    const int64_t last = min(first + kRowsPerSum, count);
#pragma unroll 1
    for (int64_t row = first; row < last; ++row) {
      const int64_t offset = row * features;
      const float r = rstd[row];
      float mine[kVector] = {};
      unrolled<kSteps>([&](int u) {
        if (at + u * kPositions >= features) return;
        const In in = load<kWide>(offset, at + u * kPositions);
        unrolled<kVector>([&](int j) { mine[j] += (in.grad[j] * in.weight[j]) * (in.x[j] * r); });
      });
      // Calls of rows() begin with an even row and all but the last end with an odd row, so the two arrays alternate.
      const float mean =
          of_row(mine, shared[row % 2], [&](float sum) { return sum / static_cast<float>(features); });
      unrolled<kSteps>([&](int u) {
        if (at + u * kPositions >= features) return;
        const In in = load<kWide>(offset, at + u * kPositions);
        float out[kVector];
        unrolled<kVector>([&](int j) {
          const float h = in.x[j] * r;
          out[j] = (in.grad[j] * in.weight[j] - h * mean) * r;
          sums[u][j] += in.grad[j] * rounded_to<T>(h);
        });
        store_vector<kWide>(stored<T>(out), grad_x + offset + at + u * kPositions, kVector);
      });
    }
    if (partial == nullptr) return;
    float* to = partial + first / kRowsPerSum * features + at;
    unrolled<kSteps>([&](int u) {
      if (at + u * kPositions >= features) return;
      unrolled<kVector>([&](int j) { to[u * kPositions + j] = sums[u][j]; });
    });
  }
};

template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) norms_backward(Op op, bool wide) {
  __shared__ Shared shared[2];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRowsPerSum;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsPerSum; first < op.count; first += stride) {
    if (wide) {
      op.template rows<true>(first, shared);
    } else {
      op.template rows<false>(first, shared);
    }
  }
}

// A thread sums one feature, in the order of the partial sums.
template <typename T>
__global__ void __launch_bounds__(kLanes, 2) column_sums(const float* partial, int64_t sums, int64_t features, T* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kLanes;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x; i < features; i += stride) {
    float total = 0.0f;
    for (int64_t one = 0; one < sums; ++one) total += partial[one * features + i];
    store(total, out + i);
  }
}

template <typename T, typename G>
struct SiluMul {
  struct In {
    Vector<T> gate, up;
  };
  static constexpr bool kScaled = true, kShifted = false;
  Quantize<T, G> out;  // only for writing
  const T *gate, *up;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return {load_vector<kWide>(gate + i, n), load_vector<kWide>(up + i, n)};
  }

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, ScaleOf scale) const {
    float values[kVector], factors[kVector];
    values_of(in.gate, values);
    values_of(in.up, factors);
    unrolled<kVector>([&](int j) { values[j] = rounded_to<T>(silu(values[j])) * factors[j]; });
    out.template apply<kWide>(stored<T>(values), i, n, scale);
  }
};

template <typename T>
struct SiluMulBackward {
  struct In {
    Vector<T> grad, gate, up;
  };
  static constexpr bool kScaled = false, kShifted = false;
  const T *grad, *gate, *up;
  const uint8_t* mask;
  T *grad_gate, *grad_up;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    const uint32_t bits = n > 0 ? mask[i / kVector] : 0u;
    const auto inside = [&](int j) { return (bits >> j & 1u) != 0; };
    return {kept(load_vector<kWide>(grad + i, n), inside), load_vector<kWide>(gate + i, n),
            load_vector<kWide>(up + i, n)};
  }

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, ScaleOf) const {
    float dy[kVector], a[kVector], b[kVector], of_gate[kVector], of_up[kVector];
    values_of(in.grad, dy);
    values_of(in.gate, a);
    values_of(in.up, b);
    unrolled<kVector>([&](int j) {
      of_gate[j] = silu_gradient(rounded_to<T>(dy[j] * b[j]), a[j]);
      of_up[j] = dy[j] * rounded_to<T>(silu(a[j]));
    });
    store_vector<kWide>(stored<T>(of_gate), grad_gate + i, n);
    store_vector<kWide>(stored<T>(of_up), grad_up + i, n);
  }
};

template <int kSteps, typename T>
void launch_backward(NormBackward<T, kSteps> op, bool wide, void* stream) {
  launch<norms_backward<NormBackward<T, kSteps>>>("rms_norm_backward", stream, sums_of_rows(op.count), op, wide);
}

}  // namespace

void rms_norm_quantize(const void* x_, const void* weight_, Dtype dtype, int64_t count, int64_t features, float eps,
                       const Scales& scales, int grid, void* codes_, uint8_t* mask, void* values_, float* rstd,
                       void* stream) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto g) {
    using T = decltype(zero);
    using G = decltype(g);
    const auto *x = static_cast<const T*>(x_), *weight = static_cast<const T*>(weight_);
    auto* codes = static_cast<typename G::Code*>(codes_);
    auto* values = static_cast<T*>(values_);
    const Norm<T, G> op{{{nullptr}, codes, mask, values, g, nullptr}, x, weight, rstd, features, eps};
    launch<norms<Norm<T, G>>>("rms_norm_quantize", stream, count, op, DeviceScales(scales), count,
                              aligned(x, weight, codes, values));
  });
}

void rms_norm_backward(const void* grad_, const void* x_, const void* weight_, const float* rstd, const uint8_t* mask,
                       Dtype dtype, int64_t count, int64_t features, void* grad_x_, float* partial, void* grad_weight,
                       void* stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto *grad = static_cast<const T*>(grad_), *x = static_cast<const T*>(x_);
    const auto* weight = static_cast<const T*>(weight_);
    auto* grad_x = static_cast<T*>(grad_x_);
    const bool wide = aligned(grad, x, weight, grad_x);
    const auto run = [&](auto op) {
      launch_backward(decltype(op){grad, x, weight, rstd, mask, grad_x, partial, count, features}, wide, stream);
    };
    if (features <= kPositions) {
      run(NormBackward<T, 1>{});
    } else if (features <= 2 * kPositions) {
      run(NormBackward<T, 2>{});
    } else if (features <= 4 * kPositions) {
      run(NormBackward<T, 4>{});
    } else {
      run(NormBackward<T, 8>{});
    }
    if (grad_weight == nullptr) return;
    launch<column_sums<T>>("rms_norm_backward", stream, divided_up(features, kLanes), partial, sums_of_rows(count),
                           features, static_cast<T*>(grad_weight));
  });
}

void silu_mul_quantize(const void* gate_, const void* up_, Dtype dtype, const Scales& scales, int grid, void* codes_,
                       uint8_t* mask, void* values_, void* stream) {
  with_dtype_and_grid(dtype, grid, scales, [&](auto zero, auto g) {
    using T = decltype(zero);
    using G = decltype(g);
    const auto *gate = static_cast<const T*>(gate_), *up = static_cast<const T*>(up_);
    auto* codes = static_cast<typename G::Code*>(codes_);
    auto* values = static_cast<T*>(values_);
    const SiluMul<T, G> op{{{nullptr}, codes, mask, values, g, nullptr}, gate, up};
    launch_elementwise("silu_mul_quantize", op, scales, scales.numel(), aligned(gate, up, codes, values), stream);
  });
}

void silu_mul_backward(const void* grad_, const void* gate_, const void* up_, const uint8_t* mask, Dtype dtype,
                       int64_t numel, void* grad_gate_, void* grad_up_, void* stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto *grad = static_cast<const T*>(grad_), *gate = static_cast<const T*>(gate_);
    const auto* up = static_cast<const T*>(up_);
    auto *grad_gate = static_cast<T*>(grad_gate_), *grad_up = static_cast<T*>(grad_up_);
    const Scales none{nullptr, nullptr, Dtype::kFloat32, Stored::kFloat32, 1, numel};
    launch_elementwise("silu_mul_backward", SiluMulBackward<T>{grad, gate, up, mask, grad_gate, grad_up}, none, numel,
                       aligned(grad, gate, up, grad_gate, grad_up), stream);
  });
}

}  // namespace deepqat::cuda
