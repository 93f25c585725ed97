// Operators implemented with the kernels of fused.h, for CPU and CUDA tensors.

#include "bindings.h"
#include "fused.h"

namespace {

void check_like(const Tensor& one, const Tensor& x, const char* name) {
  TORCH_CHECK(one.sizes() == x.sizes() && one.scalar_type() == x.scalar_type() && one.device() == x.device(), name,
              " is ", one.sizes(), " ", one.scalar_type(), " on ", one.device(), ", expected ", x.sizes(), " ",
              x.scalar_type(), " on ", x.device());
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

Scales one_scale(const Tensor& x, const Tensor& s0, at::ScalarType scale_dtype, int grid) {
  TORCH_CHECK(s0.numel() == 1, "there is one scale, got ", s0.numel());
  return scales_of(x.numel(), s0, std::nullopt, scale_dtype, x, std::nullopt, grid);
}

// Codes, mask and values of a tensor like x; the last two are empty if not requested.
struct Written {
  Tensor codes, mask, values;

  Written(const Tensor& x, int grid, bool with_mask, bool with_values)
      : codes(at::empty(x.sizes(), x.options().dtype(code_dtype(grid)))),
        mask(at::empty({with_mask ? (x.numel() + 7) / 8 : 0}, x.options().dtype(at::kByte))),
        values(with_values ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options())) {}

  uint8_t* mask_or_null() { return mask.numel() > 0 ? mask.mutable_data_ptr<uint8_t>() : nullptr; }
  void* values_or_null() { return values.numel() > 0 ? values.mutable_data_ptr() : nullptr; }
};

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
                 out.mask_or_null(), out.values_or_null(), rstd.mutable_data_ptr<float>());
  }
  return {out.codes, out.mask, out.values, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_, const Tensor& x_, const Tensor& weight,
                                             const Tensor& rstd, const Tensor& mask, bool weight_gradient) {
  const int64_t features = checked_features(x_, weight), count = x_.numel() / features;
  check_like(grad_, x_, "grad");
  check_mask(x_, mask);
  TORCH_CHECK(rstd.numel() == count && rstd.scalar_type() == at::kFloat && rstd.is_contiguous() &&
                  rstd.device() == x_.device(), "rstd must be float32, contiguous and one per row, got ", rstd.sizes());
  const Tensor grad = grad_.contiguous(), x = x_.contiguous();
  Tensor grad_x = at::empty(x.sizes(), x.options());
  Tensor grad_weight = at::empty({weight_gradient ? features : 0}, weight.options());
  if (x.numel() == 0) return {grad_x, grad_weight.zero_()};
  const int64_t sums = weight_gradient ? deepqat::sums_of_rows(count) : 0;
  Tensor partial = at::empty({sums, features}, rstd.options());
  DEEPQAT_CALL(rms_norm_backward, x, grad.const_data_ptr(), x.const_data_ptr(), weight.const_data_ptr(),
               rstd.const_data_ptr<float>(), mask.const_data_ptr<uint8_t>(), dtype_of(x.scalar_type(), "x"), count,
               features, grad_x.mutable_data_ptr(), weight_gradient ? partial.mutable_data_ptr<float>() : nullptr,
               weight_gradient ? grad_weight.mutable_data_ptr() : nullptr);
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
                 dtype_of(gate.scalar_type(), "gate"), scales, grid, out.codes.mutable_data_ptr(), out.mask_or_null(),
                 out.values_or_null());
  }
  return {out.codes, out.mask, out.values};
}

std::tuple<Tensor, Tensor> silu_mul_backward(const Tensor& grad_, const Tensor& gate_, const Tensor& up_,
                                             const Tensor& mask) {
  check_like(up_, gate_, "up");
  check_like(grad_, gate_, "grad");
  check_mask(gate_, mask);
  const Tensor grad = grad_.contiguous(), gate = gate_.contiguous(), up = up_.contiguous();
  Tensor grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(gate.sizes(), gate.options());
  if (gate.numel() > 0) {
    DEEPQAT_CALL(silu_mul_backward, gate, grad.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(),
                 mask.const_data_ptr<uint8_t>(), dtype_of(gate.scalar_type(), "gate"), gate.numel(),
                 grad_gate.mutable_data_ptr(), grad_up.mutable_data_ptr());
  }
  return {grad_gate, grad_up};
}

void implement(torch::Library& library) {
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
