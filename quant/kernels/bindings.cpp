// Implement the operators declared in quant/kernels/operators.py with the kernels, for CPU and CUDA tensors.
//
// Free of CUDA headers: the stream comes from torch's device-independent interface, so the same file is compiled with
// and without the CUDA half.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "fused.h"
#include "kernels.h"

namespace {

using at::Tensor;
using deepqat::Dtype;
using deepqat::Scales;
using deepqat::Stored;
using deepqat::Tokens;
using OptionalTensor = std::optional<Tensor>;

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

// ---- checks of arguments

Dtype dtype_of(at::ScalarType type, const char* name) {
  switch (type) {
    case at::kFloat: return Dtype::kFloat32;
    case at::kBFloat16: return Dtype::kBFloat16;
    case at::kHalf: return Dtype::kHalf;
    default: TORCH_CHECK(false, name, " is ", type, ", expected float32, bfloat16 or float16");
  }
}

Stored stored_as(at::ScalarType type) {
  if (type == at::kFloat8_e8m0fnu) return Stored::kE8M0;
  if (type == at::kFloat8_e4m3fn) return Stored::kE4M3;
  switch (dtype_of(type, "scale_dtype")) {
    case Dtype::kFloat32: return Stored::kFloat32;
    case Dtype::kBFloat16: return Stored::kBFloat16;
    case Dtype::kHalf: return Stored::kHalf;
  }
  return Stored::kFloat32;
}

at::ScalarType code_dtype(int grid) {
  if (grid == deepqat::kE4M3Grid) return at::kFloat8_e4m3fn;
  return grid == deepqat::kE2M1Grid ? at::kByte : at::kChar;
}

// Grid of codes of this dtype; for integers, any grid decodes them.
int grid_of_codes(at::ScalarType dtype) {
  if (dtype == at::kFloat8_e4m3fn) return deepqat::kE4M3Grid;
  if (dtype == at::kByte) return deepqat::kE2M1Grid;
  TORCH_CHECK(dtype == at::kChar, "codes are ", dtype, ", expected float8_e4m3fn, uint8 (e2m1) or int8");
  return 8;
}

int checked_grid(int64_t bits) {
  TORCH_CHECK((bits >= 0 && bits <= 8) || (bits >= -8 && bits <= -2), "grid ", bits,
              " is neither 0 (e4m3), 1 (e2m1) nor 2 to 8 bits, nor -2 to -8 for a narrow grid");
  return static_cast<int>(bits);
}

// fp32 numbers beside x, such as scales.
const float* checked_floats(const Tensor& floats, const Tensor& x, const char* name) {
  TORCH_CHECK(floats.scalar_type() == at::kFloat, name, " is ", floats.scalar_type(), ", expected float32");
  TORCH_CHECK(floats.is_contiguous() && floats.device() == x.device(), name, " must be contiguous and on ", x.device());
  return floats.const_data_ptr<float>();
}

// Global scales for `count` scales in e4m3.
const float* checked_above(const OptionalTensor& above, Stored stored, int64_t count, const Tensor& x) {
  TORCH_CHECK(above.has_value() == (stored == Stored::kE4M3), "scales in e4m3, and only these, need a global scale");
  if (!above.has_value()) return nullptr;
  TORCH_CHECK(above->numel() > 0 && count % above->numel() == 0, count, " scales are not divisible by ",
              above->numel(), " global scales");
  return checked_floats(*above, x, "above");
}

// Runs of x, as many as theta has elements, with the factors exp(theta). theta must outlive the result.
Scales factors_of(const Tensor& x, const Tensor& theta) {
  const int64_t numel = x.numel(), count = theta.numel();
  TORCH_CHECK(count > 0 && numel % count == 0, numel, " elements are not divisible by ", count, " scales");
  TORCH_CHECK(theta.is_contiguous() && theta.device() == x.device(), "theta must be contiguous and on ", x.device());
  return {nullptr, theta.const_data_ptr(), dtype_of(theta.scalar_type(), "theta"), Stored::kFloat32, count,
          numel / count};
}

// Scales of x. s0, theta, zero and above must outlive the result.
Scales scales_of(const Tensor& x, const Tensor& s0, const OptionalTensor& theta, at::ScalarType scale_dtype, int grid,
                 const OptionalTensor& zero, const OptionalTensor& above) {
  const int64_t numel = x.numel(), count = s0.numel();
  TORCH_CHECK(count > 0 && numel % count == 0, numel, " elements are not divisible by ", count, " scales");
  Scales scales{checked_floats(s0, x, "s0"), nullptr, Dtype::kFloat32, stored_as(scale_dtype), count, numel / count};
  scales.above = checked_above(above, scales.stored_as, count, x);
  if (scales.above != nullptr) scales.per_above = count / above->numel();
  if (theta.has_value()) {
    TORCH_CHECK(theta->numel() == count, "theta has ", theta->numel(), " elements, s0 has ", count);
    const Scales factors = factors_of(x, *theta);
    scales.theta = factors.theta;
    scales.theta_dtype = factors.theta_dtype;
  }
  if (zero.has_value()) {
    TORCH_CHECK(grid != deepqat::kE4M3Grid && grid != deepqat::kE2M1Grid, "only integers have zero points");
    TORCH_CHECK(grid >= 0, "a narrow grid has no zero points");
    TORCH_CHECK(zero->numel() == count, "zero has ", zero->numel(), " elements, s0 has ", count);
    scales.zero = checked_floats(*zero, x, "zero");
  }
  return scales;
}

// Tokens [..., features] of x. `above` must outlive the result.
Tokens tokens_of(const Tensor& x, int64_t bits, bool symmetric, std::optional<at::ScalarType> scale_dtype,
                 const OptionalTensor& above) {
  TORCH_CHECK(x.dim() > 0, "a token has at least one dimension");
  const int64_t features = x.size(-1);
  const Stored stored = stored_as(scale_dtype.value_or(at::kFloat));
  const bool four = bits == deepqat::kE2M1Grid, plain = stored == Stored::kFloat32;
  TORCH_CHECK(bits == deepqat::kE4M3Grid || four || (bits >= 2 && bits <= 8), "grid ", bits,
              " of tokens is neither 0 (e4m3), 1 (e2m1) nor 2 to 8 bits");
  TORCH_CHECK(symmetric || bits >= 2, "codes of tokens that are floats are symmetric");
  TORCH_CHECK(four ? !plain : plain || (stored == Stored::kE8M0 && bits == deepqat::kE4M3Grid),
              "scales of tokens are float32, of floats powers of two, of e2m1 also e4m3; got grid ", bits);
  TORCH_CHECK(!four || features <= deepqat::kShortToken, "e2m1 has groups of at most 32 features, got ", features);
  TORCH_CHECK(!above.has_value() || above->numel() == 1, "tokens have one global scale, got ", above->numel());
  return {features == 0 ? 0 : x.numel() / features, features, static_cast<int>(bits), symmetric, stored,
          checked_above(above, stored, 1, x)};
}

void check_like(const Tensor& one, const Tensor& x, const char* name) {
  TORCH_CHECK(one.sizes() == x.sizes() && one.scalar_type() == x.scalar_type() && one.device() == x.device(), name,
              " is ", one.sizes(), " ", one.scalar_type(), " on ", one.device(), ", expected ", x.sizes(), " ",
              x.scalar_type(), " on ", x.device());
}

void check_overwritten(const Tensor& grad) {
  TORCH_CHECK(grad.is_contiguous(), "grad is overwritten and must be contiguous, its strides are ", grad.strides());
}

const uint8_t* checked_mask(const Tensor& mask, const Tensor& x) {
  TORCH_CHECK(mask.scalar_type() == at::kByte && mask.is_contiguous() && mask.numel() == (x.numel() + 7) / 8 &&
                  mask.device() == x.device(),
              "a mask of ", mask.numel(), " bytes (", mask.scalar_type(), ") on ", mask.device(), " does not belong to ",
              x.numel(), " elements on ", x.device());
  return mask.const_data_ptr<uint8_t>();
}

// Number of features of a row of x, each with a weight.
int64_t checked_features(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) % deepqat::kVector == 0 && x.size(-1) > 0 && x.size(-1) <= deepqat::kSegment,
              "rows have a multiple of 8 and at most 16,384 features, got ", x.sizes());
  TORCH_CHECK(weight.sizes() == x.sizes().slice(x.dim() - 1) && weight.scalar_type() == x.scalar_type() &&
                  weight.device() == x.device() && weight.is_contiguous(),
              "weight is ", weight.sizes(), " ", weight.scalar_type(), " on ", weight.device(), ", expected [",
              x.size(-1), "] ", x.scalar_type(), " on ", x.device(), ", contiguous");
  return x.size(-1);
}

// ---- results

// Empty tensor like x in another dtype.
Tensor like(const Tensor& x, at::ScalarType dtype) { return at::empty(x.sizes(), x.options().dtype(dtype)); }

Tensor like(const Tensor& x) { return like(x, x.scalar_type()); }

// Mask of x, without elements unless wanted.
Tensor mask_of(const Tensor& x, bool wanted) {
  return at::empty({wanted ? (x.numel() + 7) / 8 : 0}, x.options().dtype(at::kByte));
}

template <typename T = void>
T* data_or_null(Tensor& x) {
  return x.numel() > 0 ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

// Codes, mask and values of a tensor like x; the last two are empty if not requested.
struct Written {
  Tensor codes, mask, values;

  Written(const Tensor& x, int grid, bool with_mask, bool with_values)
      : codes(like(x, code_dtype(grid))),
        mask(mask_of(x, with_mask)),
        values(with_values ? like(x) : at::empty({0}, x.options())) {}
};

// ---- quantizers

Tensor effective_scale(const Tensor& s0, const OptionalTensor& theta, at::ScalarType scale_dtype,
                       const OptionalTensor& /*after*/, const OptionalTensor& above) {
  const Scales scales = scales_of(s0, s0, theta, scale_dtype, 8, std::nullopt, above);
  Tensor out = like(s0);
  DEEPQAT_CALL(effective_scale, s0, scales, out.mutable_data_ptr<float>());
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize(const Tensor& x_, const Tensor& s0, const OptionalTensor& theta,
                                                    int64_t bits, at::ScalarType scale_dtype, bool with_mask,
                                                    bool with_values, bool with_scale, const OptionalTensor& zero,
                                                    const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = scales_of(x, s0, theta, scale_dtype, grid, zero, above);
  Written out(x, grid, with_mask, with_values);
  Tensor effective = with_scale ? like(s0) : at::empty({0}, s0.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(quantize, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), scales, grid,
                 out.codes.mutable_data_ptr(), data_or_null<uint8_t>(out.mask), data_or_null(out.values),
                 data_or_null<float>(effective));
  } else if (with_scale) {
    effective = effective_scale(s0, theta, scale_dtype, std::nullopt, above);
  }
  return {out.codes, out.mask, out.values, effective};
}

std::tuple<Tensor, Tensor> dequantize(const Tensor& codes_, const Tensor& s0, const OptionalTensor& theta,
                                      at::ScalarType scale_dtype, at::ScalarType dtype, bool with_zeros,
                                      const OptionalTensor& /*after*/, const OptionalTensor& zero,
                                      const OptionalTensor& above) {
  const Tensor codes = codes_.contiguous();
  const int grid = grid_of_codes(codes.scalar_type());
  const Scales scales = scales_of(codes, s0, theta, scale_dtype, grid, zero, above);
  TORCH_CHECK(!with_zeros || theta.has_value(), "there is no theta to have zeros");
  Tensor out = like(codes, dtype), zeros = with_zeros ? like(*theta) : at::empty({0}, codes.options().dtype(dtype));
  if (codes.numel() > 0) {
    DEEPQAT_CALL(dequantize, codes, codes.const_data_ptr(), scales, grid, dtype_of(dtype, "dtype"),
                 out.mutable_data_ptr(), data_or_null(zeros), nullptr, nullptr);
  } else {
    zeros.zero_();
  }
  return {out, zeros};
}

Tensor dequantize_and_mask_(Tensor& grad, const Tensor& mask, const Tensor& codes_, const Tensor& s0,
                            const OptionalTensor& theta, at::ScalarType scale_dtype, const OptionalTensor& zero,
                            const OptionalTensor& above) {
  check_overwritten(grad);
  const auto* bits = checked_mask(mask, grad);
  TORCH_CHECK(grad.sizes() == codes_.sizes() && grad.device() == codes_.device(), "grad is ", grad.sizes(), " on ",
              grad.device(), ", codes are ", codes_.sizes(), " on ", codes_.device());
  const Tensor codes = codes_.contiguous();
  const int grid = grid_of_codes(codes.scalar_type());
  const Scales scales = scales_of(codes, s0, theta, scale_dtype, grid, zero, above);
  Tensor out = like(grad);
  if (codes.numel() > 0) {
    DEEPQAT_CALL(dequantize, codes, codes.const_data_ptr(), scales, grid, dtype_of(grad.scalar_type(), "grad"),
                 out.mutable_data_ptr(), nullptr, grad.mutable_data_ptr(), bits);
  }
  return out;
}

Tensor fake_quantize(const Tensor& x_, const Tensor& s0, const OptionalTensor& theta, int64_t bits,
                     at::ScalarType scale_dtype, const OptionalTensor& /*after*/, const OptionalTensor& zero,
                     const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = scales_of(x, s0, theta, scale_dtype, grid, zero, above);
  Tensor out = like(x);
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), scales, grid,
                 out.mutable_data_ptr());
  }
  return out;
}

Tensor fake_quantize_backward_(Tensor& grad, const Tensor& x_, const Tensor& s0, const OptionalTensor& theta,
                               int64_t bits, at::ScalarType scale_dtype, double factor, bool theta_gradient,
                               const OptionalTensor& zero, const OptionalTensor& above, bool of_weight) {
  check_overwritten(grad);
  check_like(grad, x_, "grad");
  TORCH_CHECK(!theta_gradient || theta.has_value(), "there is no theta to have a gradient");
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = scales_of(x, s0, theta, scale_dtype, grid, zero, above);
  Tensor grad_theta = theta_gradient ? like(*theta) : at::empty({0}, x.options());
  if (x.numel() == 0) return grad_theta.zero_();
  const int64_t sums = theta_gradient ? scales.count * deepqat::segments_of(scales.block) : 0;
  Tensor partial_sums = at::empty({sums}, s0.options());
  DEEPQAT_CALL(fake_quantize_backward, x, grad.mutable_data_ptr(), x.const_data_ptr(), dtype_of(x.scalar_type(), "x"),
               scales, grid, static_cast<float>(factor), of_weight, data_or_null<float>(partial_sums),
               data_or_null(grad_theta));
  return grad_theta;
}

Tensor multiply_runs(const Tensor& x_, const Tensor& theta) {
  const Tensor x = x_.contiguous();
  const Scales factors = factors_of(x, theta);
  Tensor out = like(x);
  if (x.numel() > 0) {
    DEEPQAT_CALL(multiply_runs, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), factors, out.mutable_data_ptr());
  }
  return out;
}

Tensor sum_products(const Tensor& x_, const Tensor& y_, const Tensor& theta, double factor) {
  check_like(y_, x_, "y");
  const Tensor x = x_.contiguous(), y = y_.contiguous();
  Scales runs = factors_of(x, theta);
  runs.theta = nullptr;
  Tensor out = like(theta);
  if (x.numel() == 0) return out.zero_();
  Tensor partial_sums = at::empty({runs.count * deepqat::segments_of(runs.block)}, x.options().dtype(at::kFloat));
  DEEPQAT_CALL(sum_products, x, x.const_data_ptr(), y.const_data_ptr(), dtype_of(x.scalar_type(), "x"), runs,
               static_cast<float>(factor), partial_sums.mutable_data_ptr<float>(), out.mutable_data_ptr());
  return out;
}

void masked_(Tensor& grad, const Tensor& mask) {
  check_overwritten(grad);
  const auto* bits = checked_mask(mask, grad);
  if (grad.numel() == 0) return;
  DEEPQAT_CALL(masked, grad, grad.mutable_data_ptr(), bits, dtype_of(grad.scalar_type(), "grad"), grad.numel());
}

Tensor amax(const Tensor& x_, int64_t count) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(count > 0 && x.numel() % count == 0, x.numel(), " elements are not divisible by ", count, " parts");
  const int64_t block = x.numel() / count;
  Tensor out = at::empty({count}, x.options().dtype(at::kFloat));
  if (x.numel() == 0) return out.zero_();
  Tensor partial = at::empty({count * deepqat::segments_of(block)}, out.options());
  DEEPQAT_CALL(amax, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), count, block,
               partial.mutable_data_ptr<float>(), out.mutable_data_ptr<float>());
  return out;
}

// ---- tokens

std::tuple<Tensor, Tensor, Tensor, Tensor> keep_tokens(const Tensor& x_, int64_t bits, bool with_mask,
                                                       std::optional<at::ScalarType> scale_dtype,
                                                       const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, /*symmetric=*/true, scale_dtype, above);
  const bool four = bits == deepqat::kE2M1Grid, whole = !(four || with_mask) || tokens.features % 8 == 0;
  TORCH_CHECK(bits <= 1 && whole, "floats are kept, e2m1 and masks in eights; got grid ", bits, " of ", tokens.features);
  auto shape = x.sizes().vec();
  shape.back() = four ? tokens.features / 2 : tokens.features;
  Tensor values = like(x), codes = at::empty(shape, x.options().dtype(code_dtype(tokens.grid)));
  shape.back() = 1;
  Tensor scales = at::empty(shape, x.options().dtype(scale_dtype.value_or(at::kFloat)));
  Tensor mask = mask_of(x, with_mask);
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens,
                 values.mutable_data_ptr(), nullptr, static_cast<uint8_t*>(codes.mutable_data_ptr()),
                 data_or_null<uint8_t>(mask), scales.mutable_data_ptr());
  } else {
    scales.fill_(1);
  }
  return {values, codes, mask, scales};
}

Tensor fake_quantize_tokens(const Tensor& x_, int64_t bits, bool symmetric, const OptionalTensor& /*after*/,
                            std::optional<at::ScalarType> scale_dtype, const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, symmetric, scale_dtype, above);
  Tensor out = like(x);
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens,
                 out.mutable_data_ptr(), nullptr, nullptr, nullptr, nullptr);
  }
  return out;
}

Tensor fake_quantize_tokens_and_mask_(Tensor& grad, const Tensor& x_, int64_t bits, bool symmetric, bool with_values,
                                      std::optional<at::ScalarType> scale_dtype, const OptionalTensor& above) {
  check_overwritten(grad);
  check_like(grad, x_, "grad");
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, symmetric, scale_dtype, above);
  Tensor out = with_values ? like(x) : at::empty({0}, x.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens,
                 data_or_null(out), grad.mutable_data_ptr(), nullptr, nullptr, nullptr);
  }
  return out;
}

Tensor sum_rows(const Tensor& rows_, const Tensor& places_) {
  TORCH_CHECK(rows_.dim() == 2 && places_.dim() == 2, "rows ", rows_.sizes(), " and places ", places_.sizes(),
              " must have two dimensions");
  TORCH_CHECK(places_.scalar_type() == at::kLong && places_.device() == rows_.device(), "places are ",
              places_.scalar_type(), " on ", places_.device(), ", expected int64 on ", rows_.device());
  const Tensor rows = rows_.contiguous(), places = places_.contiguous();
  Tensor out = at::empty({places.size(0), rows.size(1)}, rows.options());
  if (out.numel() > 0) {
    DEEPQAT_CALL(sum_rows, rows, rows.const_data_ptr(), places.const_data_ptr<int64_t>(),
                 dtype_of(rows.scalar_type(), "rows"), places.size(0), places.size(1), rows.size(1),
                 out.mutable_data_ptr());
  }
  return out;
}

// ---- norms and SwiGLU

Scales one_scale(const Tensor& x, const Tensor& s0, at::ScalarType scale_dtype, int grid) {
  TORCH_CHECK(s0.numel() == 1, "there is one scale, got ", s0.numel());
  return scales_of(x, s0, std::nullopt, scale_dtype, grid, std::nullopt, std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_quantize(const Tensor& x_, const Tensor& weight, double eps,
                                                             const Tensor& s0, int64_t bits, at::ScalarType scale_dtype,
                                                             bool with_mask, bool with_values) {
  const int64_t features = checked_features(x_, weight);
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = one_scale(x, s0, scale_dtype, grid);
  Written out(x, grid, with_mask, with_values);
  Tensor rstd = at::empty({x.numel() / features}, x.options().dtype(at::kFloat));
  if (x.numel() > 0) {
    DEEPQAT_CALL(rms_norm_quantize, x, x.const_data_ptr(), weight.const_data_ptr(), dtype_of(x.scalar_type(), "x"),
                 rstd.numel(), features, static_cast<float>(eps), scales, grid, out.codes.mutable_data_ptr(),
                 data_or_null<uint8_t>(out.mask), data_or_null(out.values), rstd.mutable_data_ptr<float>());
  }
  return {out.codes, out.mask, out.values, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_, const Tensor& x_, const Tensor& weight,
                                             const Tensor& rstd, const Tensor& mask, bool weight_gradient) {
  const int64_t features = checked_features(x_, weight), count = x_.numel() / features;
  check_like(grad_, x_, "grad");
  const auto* bits = checked_mask(mask, x_);
  TORCH_CHECK(rstd.numel() == count, "rstd must have one number per row, got ", rstd.sizes());
  const auto* its_rstd = checked_floats(rstd, x_, "rstd");
  const Tensor grad = grad_.contiguous(), x = x_.contiguous();
  Tensor grad_x = like(x), grad_weight = at::empty({weight_gradient ? features : 0}, weight.options());
  if (x.numel() == 0) return {grad_x, grad_weight.zero_()};
  Tensor partial = at::empty({weight_gradient ? deepqat::sums_of_rows(count) : 0, features}, rstd.options());
  DEEPQAT_CALL(rms_norm_backward, x, grad.const_data_ptr(), x.const_data_ptr(), weight.const_data_ptr(), its_rstd, bits,
               dtype_of(x.scalar_type(), "x"), count, features, grad_x.mutable_data_ptr(), data_or_null<float>(partial),
               data_or_null(grad_weight));
  return {grad_x, grad_weight};
}

std::tuple<Tensor, Tensor, Tensor> silu_mul_quantize(const Tensor& gate_, const Tensor& up_, const Tensor& s0,
                                                     int64_t bits, at::ScalarType scale_dtype, bool with_mask,
                                                     bool with_values) {
  check_like(up_, gate_, "up");
  const Tensor gate = gate_.contiguous(), up = up_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = one_scale(gate, s0, scale_dtype, grid);
  Written out(gate, grid, with_mask, with_values);
  if (gate.numel() > 0) {
    DEEPQAT_CALL(silu_mul_quantize, gate, gate.const_data_ptr(), up.const_data_ptr(),
                 dtype_of(gate.scalar_type(), "gate"), scales, grid, out.codes.mutable_data_ptr(),
                 data_or_null<uint8_t>(out.mask), data_or_null(out.values));
  }
  return {out.codes, out.mask, out.values};
}

std::tuple<Tensor, Tensor> silu_mul_backward(const Tensor& grad_, const Tensor& gate_, const Tensor& up_,
                                             const Tensor& mask) {
  check_like(up_, gate_, "up");
  check_like(grad_, gate_, "grad");
  const auto* bits = checked_mask(mask, gate_);
  const Tensor grad = grad_.contiguous(), gate = gate_.contiguous(), up = up_.contiguous();
  Tensor grad_gate = like(gate), grad_up = like(gate);
  if (gate.numel() > 0) {
    DEEPQAT_CALL(silu_mul_backward, gate, grad.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(), bits,
                 dtype_of(gate.scalar_type(), "gate"), gate.numel(), grad_gate.mutable_data_ptr(),
                 grad_up.mutable_data_ptr());
  }
  return {grad_gate, grad_up};
}

void implement(torch::Library& library) {
  library.impl("effective_scale", TORCH_FN(effective_scale));
  library.impl("quantize", TORCH_FN(quantize));
  library.impl("dequantize", TORCH_FN(dequantize));
  library.impl("dequantize_and_mask_", TORCH_FN(dequantize_and_mask_));
  library.impl("fake_quantize", TORCH_FN(fake_quantize));
  library.impl("fake_quantize_backward_", TORCH_FN(fake_quantize_backward_));
  library.impl("multiply_runs", TORCH_FN(multiply_runs));
  library.impl("sum_products", TORCH_FN(sum_products));
  library.impl("masked_", TORCH_FN(masked_));
  library.impl("amax", TORCH_FN(amax));
  library.impl("keep_tokens", TORCH_FN(keep_tokens));
  library.impl("fake_quantize_tokens", TORCH_FN(fake_quantize_tokens));
  library.impl("fake_quantize_tokens_and_mask_", TORCH_FN(fake_quantize_tokens_and_mask_));
  library.impl("sum_rows", TORCH_FN(sum_rows));
  library.impl("rms_norm_quantize", TORCH_FN(rms_norm_quantize));
  library.impl("rms_norm_backward", TORCH_FN(rms_norm_backward));
  library.impl("silu_mul_quantize", TORCH_FN(silu_mul_quantize));
  library.impl("silu_mul_backward", TORCH_FN(silu_mul_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(deepqat, CPU, library) { implement(library); }

#if defined(DEEPQAT_CUDA)
TORCH_LIBRARY_IMPL(deepqat, CUDA, library) { implement(library); }
#endif
