// RMSNorm and SwiGLU, each with the quantization of its result: arithmetic of one value, and the interface of both
// backends. quant/reference.py is the reference.
//
// Tensors are dense and row-major, [count, features] or flat; all but codes, masks, rstd and `partial` have one dtype.
// There is a single scale. features is a multiple of kVector and at most kSegment, so that a row is one segment of
// kernels.h and its sums have that order.

#pragma once

#include <cmath>

#include "arithmetic.h"
#include "kernels.h"

namespace deepqat {

// Gradients of the weight are summed over this many consecutive tokens, one by one; then these sums likewise.
constexpr int64_t kRowsPerSum = 32;

constexpr int64_t sums_of_rows(int64_t count) { return (count + kRowsPerSum - 1) / kRowsPerSum; }

DEEPQAT_INLINE float inverse_root(float sum_of_squares, int64_t features, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(features) + eps);
}

// Output of a norm, rounded twice: before and after the multiplication by the weight.
template <typename T>
DEEPQAT_INLINE float normed(float x, float rstd, float weight) {
  return rounded_to<T>(weight * rounded_to<T>(x * rstd));
}

// e^x in fp32, in operations that are identical on every backend; within 2 ulp. x = k ln2 + r with |r| <= ln2 / 2, ln2
// in two parts, and the polynomial of Cephes' expf (netlib.org/cephes, single/expf.c). 2^k is applied in two factors,
// for a k of 128 and for subnormal results; beyond +-104 the result is infinite or 0 anyway.
DEEPQAT_INLINE float exponential32(float x) {
  x = x > 104.0f ? 104.0f : x;  // these comparisons keep a NaN
  x = x < -104.0f ? -104.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const float shifted = x * 1.44269504088896341f + magic;
  const float k = shifted - magic;
  const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = (sum * (r * r) + r) + 1.0f;
  const int32_t power = static_cast<int32_t>(bits_of(shifted) - bits_of(magic)), half = power >> 1;
  const uint32_t first = static_cast<uint32_t>(half + 127), second = static_cast<uint32_t>(power - half + 127);
  return (sum * float_of(first << 23)) * float_of(second << 23);
}

DEEPQAT_INLINE float silu(float x) { return x / (1.0f + exponential32(-x)); }

// grad times d silu / d x
DEEPQAT_INLINE float silu_gradient(float grad, float x) {
  const float sigmoid = 1.0f / (1.0f + exponential32(-x));
  return (grad * sigmoid) * (1.0f + x * (1.0f - sigmoid));
}

#define DEEPQAT_DECLARE_FUSED(STREAM)                                                                                  \
  void rms_norm_quantize(const void* x, const void* weight, Dtype dtype, int64_t count, int64_t features, float eps,   \
                         const Scales& scales, int grid, void* codes, uint8_t* mask, void* values, float* rstd STREAM); \
  void rms_norm_backward(const void* grad, const void* x, const void* weight, const float* rstd, const uint8_t* mask,  \
                         Dtype dtype, int64_t count, int64_t features, void* grad_x, float* partial,                   \
                         void* grad_weight STREAM);                                                                    \
  void silu_mul_quantize(const void* gate, const void* up, Dtype dtype, const Scales& scales, int grid, void* codes,   \
                         uint8_t* mask, void* values STREAM);                                                          \
  void silu_mul_backward(const void* grad, const void* gate, const void* up, const uint8_t* mask, Dtype dtype,         \
                         int64_t numel, void* grad_gate, void* grad_up STREAM);

namespace cpu {
DEEPQAT_DECLARE_FUSED()
}

namespace cuda {
#define DEEPQAT_STREAM , void* stream
DEEPQAT_DECLARE_FUSED(DEEPQAT_STREAM)
#undef DEEPQAT_STREAM
}  // namespace cuda

#undef DEEPQAT_DECLARE_FUSED

// Arguments, beyond those of kernels.h:
//   mask, values   may be null as outputs; as an input, a mask bit of 0 zeroes grad
//   rstd           one per row: 1 / sqrt(mean of squares + eps)
//   partial        scratch [sums_of_rows(count), features]; like grad_weight, null if the weight has no gradient

}  // namespace deepqat
