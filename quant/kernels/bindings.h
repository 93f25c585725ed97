// Shared helpers of the operator bindings: checks of tensors, and calls by device.
//
// Free of CUDA headers: the stream comes from torch's device-independent interface, so the same files are compiled with
// and without the CUDA half.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "kernels.h"

namespace {

using at::Tensor;
using deepqat::Dtype;
using deepqat::Scales;
using deepqat::Stored;
using deepqat::Tokens;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(at::ScalarType type, const char* name) {
  switch (type) {
    case at::kFloat: return Dtype::kFloat32;
    case at::kBFloat16: return Dtype::kBFloat16;
    case at::kHalf: return Dtype::kHalf;
    default: TORCH_CHECK(false, name, " is ", type, ", expected float32, bfloat16 or float16");
  }
}

inline Stored stored_as(at::ScalarType type) {
  if (type == at::kFloat8_e8m0fnu) return Stored::kE8M0;
  if (type == at::kFloat8_e4m3fn) return Stored::kE4M3;
  switch (dtype_of(type, "scale_dtype")) {
    case Dtype::kFloat32: return Stored::kFloat32;
    case Dtype::kBFloat16: return Stored::kBFloat16;
    case Dtype::kHalf: return Stored::kHalf;
  }
  return Stored::kFloat32;
}

// Checked global scales for `count` scales in e4m3.
inline const float* checked_above(const OptionalTensor& above, Stored stored, int64_t count, const Tensor& x) {
  TORCH_CHECK(above.has_value() == (stored == Stored::kE4M3), "scales in e4m3, and no others, lie below a global one");
  if (!above.has_value()) return nullptr;
  TORCH_CHECK(above->scalar_type() == at::kFloat && above->is_contiguous() && above->device() == x.device(),
              "above must be float32, contiguous and on ", x.device());
  TORCH_CHECK(above->numel() > 0 && count % above->numel() == 0, above->numel(), " global scales do not divide ", count);
  return above->const_data_ptr<float>();
}

inline int checked_grid(int64_t bits) {
  TORCH_CHECK((bits >= 0 && bits <= 8) || (bits >= -8 && bits <= -2), "grid ", bits,
              " is neither 0 (e4m3), 1 (e2m1) nor 2 to 8 bits, or less than 0 the same of a narrow grid");
  return static_cast<int>(bits);
}

// Scales of a tensor of `numel` elements. s0, theta and zero must outlive the result.
inline Scales scales_of(int64_t numel, const Tensor& s0, const OptionalTensor& theta, at::ScalarType scale_dtype,
                 const Tensor& x, const OptionalTensor& zero = std::nullopt, int grid = 8,
                 const OptionalTensor& above = std::nullopt) {
  TORCH_CHECK(s0.scalar_type() == at::kFloat, "s0 is ", s0.scalar_type(), ", expected float32");
  TORCH_CHECK(s0.numel() > 0 && numel % s0.numel() == 0, s0.numel(), " scales do not divide ", numel, " elements");
  TORCH_CHECK(s0.is_contiguous() && s0.device() == x.device(), "s0 must be contiguous and on ", x.device());
  Scales scales{s0.const_data_ptr<float>(), nullptr, Dtype::kFloat32, stored_as(scale_dtype), s0.numel(), numel / s0.numel()};
  scales.above = checked_above(above, scales.stored_as, s0.numel(), x);
  if (scales.above != nullptr) scales.per_above = s0.numel() / above->numel();
  if (theta.has_value()) {
    TORCH_CHECK(theta->numel() == s0.numel(), "theta has ", theta->numel(), " elements, s0 has ", s0.numel());
    TORCH_CHECK(theta->is_contiguous() && theta->device() == x.device(), "theta must be contiguous and on ", x.device());
    scales.theta = theta->const_data_ptr();
    scales.theta_dtype = dtype_of(theta->scalar_type(), "theta");
  }
  if (zero.has_value()) {
    TORCH_CHECK(grid != deepqat::kE4M3Grid && grid != deepqat::kE2M1Grid, "only integers have zero points");
    TORCH_CHECK(grid >= 0, "a narrow grid has no zero points");
    TORCH_CHECK(zero->scalar_type() == at::kFloat, "zero is ", zero->scalar_type(), ", expected float32");
    TORCH_CHECK(zero->numel() == s0.numel(), "zero has ", zero->numel(), " elements, s0 has ", s0.numel());
    TORCH_CHECK(zero->is_contiguous() && zero->device() == x.device(), "zero must be contiguous and on ", x.device());
    scales.zero = zero->const_data_ptr<float>();
  }
  return scales;
}

inline at::ScalarType code_dtype(int grid) {
  if (grid == deepqat::kE4M3Grid) return at::kFloat8_e4m3fn;
  return grid == deepqat::kE2M1Grid ? at::kByte : at::kChar;
}

// Grid of codes of this dtype; for integers, any grid decodes them.
inline int grid_of_codes(at::ScalarType dtype) {
  if (dtype == at::kFloat8_e4m3fn) return deepqat::kE4M3Grid;
  if (dtype == at::kByte) return deepqat::kE2M1Grid;
  TORCH_CHECK(dtype == at::kChar, "codes are ", dtype, ", expected float8_e4m3fn, uint8 (e2m1) or int8");
  return 8;
}

// Call a kernel on the tensor's device: CPU, or CUDA on the current stream.
#if defined(DEEPQAT_CUDA)
#define DEEPQAT_CALL(kernel, tensor, ...)                                                                      \
  do {                                                                                                         \
    if ((tensor).is_cuda()) {                                                                                  \
      const c10::DeviceGuard guard((tensor).device());                                                         \
      const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);                                         \
      deepqat::cuda::kernel(__VA_ARGS__, device.getStreamNativeHandle(device.getStream((tensor).device())));   \
    } else {                                                                                                   \
      deepqat::cpu::kernel(__VA_ARGS__);                                                                       \
    }                                                                                                          \
  } while (false)
#else
#define DEEPQAT_CALL(kernel, tensor, ...) deepqat::cpu::kernel(__VA_ARGS__)
#endif

inline void check_mask(const Tensor& grad, const Tensor& mask) {
  TORCH_CHECK(mask.scalar_type() == at::kByte && mask.is_contiguous() && mask.numel() == (grad.numel() + 7) / 8,
              "a mask of ", mask.numel(), " bytes (", mask.scalar_type(), ") does not belong to ", grad.numel(), " elements");
  TORCH_CHECK(mask.device() == grad.device(), "grad is on ", grad.device(), ", its mask on ", mask.device());
}

}  // namespace
