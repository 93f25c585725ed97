// Kernel interface of both backends, on raw pointers; quant/kernels/bindings.cpp binds the kernels as torch operators.
//
// All tensors are dense and row-major. Element i of x has the scale i / block; a run is the `block` consecutive
// elements of one scale. x, grad and their results have one dtype. No function waits for the device or allocates
// memory.

#pragma once

#include <cstdint>

namespace deepqat {

enum class Dtype { kFloat32, kBFloat16, kHalf };

// Format that a scale is rounded to: a dtype, a power of two (MX), or an e4m3 number below a global scale (NVFP4).
enum class Stored { kFloat32, kBFloat16, kHalf, kE8M0, kE4M3 };

// s = s0 * exp(theta), rounded to stored_as, one per run, and its zero point.
struct Scales {
  const float* s0;    // null: 1
  const void* theta;  // null: the scale is s0
  Dtype theta_dtype;
  Stored stored_as;
  int64_t count;
  int64_t block;
  const float* zero = nullptr;   // integers; null if all are 0
  const float* above = nullptr;  // the global scales of kE4M3
  int64_t per_above = 1;         // number of runs that share a global scale

  int64_t numel() const { return count * block; }
};

// Other grids: the number of bits of a signed integer; negative for the narrow range: -4 is -7 to 7.
constexpr int kE4M3Grid = 0, kE2M1Grid = 1;

// Tokens, or groups of their features, each with a scale computed from its values.
struct Tokens {
  int64_t count;
  int64_t features;
  int grid;  // not narrow; kE2M1Grid has groups of at most kShortToken features, stored as kE8M0 or kE4M3
  bool symmetric;
  Stored stored_as = Stored::kFloat32;  // kE4M3Grid: also kE8M0
  const float* above = nullptr;         // global scale for kE4M3
};

// Order of addition of a run's n terms, on both backends, so that they agree bit for bit and runs are reproducible:
//
//   1. a segment is kSegment consecutive terms of a run (the last one shorter, as if zeros followed);
//   2. accumulator p of kPositions takes the segment's terms p, p + kPositions, ... in this order;
//   3. the accumulators are added by halves: eight neighbors into one sum (a[j] += a[j + 4], then 2, then 1), then the
//      256 sums likewise (b[i] += b[i + 128], ..., 1);
//   4. the sums of the segments, if there are several, are added by steps 2 and 3 as one segment of any length.
//
// A CUDA thread holds eight neighboring positions, a block one segment; no atomics are needed.
constexpr int kVector = 8;
constexpr int kLanes = 256;
constexpr int kPositions = kVector * kLanes;
constexpr int kSegment = 8 * kPositions;

constexpr int64_t segments_of(int64_t block) { return (block + kSegment - 1) / kSegment; }

constexpr int kShortToken = 32;

#define DEEPQAT_DECLARE_KERNELS(STREAM)                                                                                \
  void effective_scale(const Scales& scales, float* out STREAM);                                                       \
  void quantize(const void* x, Dtype dtype, const Scales& scales, int grid, void* codes, uint8_t* mask,                \
                void* values, float* effective STREAM);                                                                \
  void dequantize(const void* codes, const Scales& scales, int grid, Dtype dtype, void* out, void* zeros, void* grad,  \
                  const uint8_t* mask STREAM);                                                                         \
  void fake_quantize(const void* x, Dtype dtype, const Scales& scales, int grid, void* out STREAM);                    \
  void fake_quantize_backward(void* grad, const void* x, Dtype dtype, const Scales& scales, int grid, float factor,    \
                              bool of_weight, float* partial_sums, void* grad_theta STREAM);                           \
  void masked(void* grad, const uint8_t* mask, Dtype dtype, int64_t numel STREAM);                                     \
  void multiply_runs(const void* x, Dtype dtype, const Scales& factors, void* out STREAM);                             \
  void sum_products(const void* x, const void* y, Dtype dtype, const Scales& runs, float factor, float* partial_sums,  \
                    void* out STREAM);                                                                                 \
  void amax(const void* x, Dtype dtype, int64_t count, int64_t block, float* partial, float* out STREAM);              \
  void fake_quantize_tokens(const void* x, Dtype dtype, const Tokens& tokens, void* out, void* grad, uint8_t* codes,   \
                            uint8_t* mask, void* scales STREAM);                                                       \
  void sum_rows(const void* rows, const int64_t* places, Dtype dtype, int64_t count, int64_t per_sum, int64_t width,   \
                void* out STREAM);

namespace cpu {
DEEPQAT_DECLARE_KERNELS()
}

namespace cuda {
#define DEEPQAT_STREAM , void* stream
DEEPQAT_DECLARE_KERNELS(DEEPQAT_STREAM)
#undef DEEPQAT_STREAM
}  // namespace cuda

#undef DEEPQAT_DECLARE_KERNELS

// Arguments; every output of quantize and fake_quantize_tokens but the codes of quantize may be null:
//   codes          uint8 (e4m3, or e2m1 in the low four bits) or int8
//   values         the result of fake_quantize
//   effective      the result of effective_scale
//   zeros          one per run, in theta's dtype; may be null
//   grad           overwritten with the gradient of x; in dequantize the gradient of as many elements, or null
//   mask           one bit per element, i at bit i % 8 of byte i / 8: 1 inside the range; as an input, 0 zeroes grad
//   factor         grad_theta = factor * s0 * exp(theta) * sum(grad * d fq / d s) per run, in theta's dtype
//   of_weight      NaN if x / s is not finite: in grad_theta of its run if present, else in grad
//   partial_sums   scratch, count * segments_of(block) floats, unused if grad_theta is null; likewise `partial` of amax
//   factors        the scales of runs that are multiplied by them
//   runs           without s0 and theta: out[run] = factor * sum(x * y), in theta_dtype
//   grad_theta     null if not requested
//   places         [count, per_sum]: indices of the rows [.., width] of each of the sums [count, width]
//   scales         one per token, as stored: float, its E8M0 byte, or the e4m3 byte of scale times global scale
//   codes          in fake_quantize_tokens (floats only) two codes of e2m1 in a byte, the first in the low four bits;
//                  tokens with a mask or e2m1 codes have a multiple of eight features

}  // namespace deepqat
