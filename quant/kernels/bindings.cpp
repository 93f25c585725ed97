// Implement the operators declared in quant/kernels/registration.py with the kernels, for CPU and CUDA tensors.

#include "bindings.h"

namespace {

Tensor effective_scale(const Tensor& s0, const OptionalTensor& theta, at::ScalarType scale_dtype,
                       const OptionalTensor& /*after*/, const OptionalTensor& above) {
  const Scales scales = scales_of(s0.numel(), s0, theta, scale_dtype, s0, std::nullopt, 8, above);
  Tensor out = at::empty(s0.sizes(), s0.options());
  DEEPQAT_CALL(effective_scale, s0, scales, out.mutable_data_ptr<float>());
  return out;
}

std::tuple<Tensor, Tensor, Tensor> quantize_all(const Tensor& x_, const Tensor& s0, const OptionalTensor& theta,
                                                int64_t bits, at::ScalarType scale_dtype, bool with_mask,
                                                bool with_values, const OptionalTensor& zero,
                                                const OptionalTensor& above, float* effective = nullptr) {
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = scales_of(x.numel(), s0, theta, scale_dtype, x, zero, grid, above);
  Tensor codes = at::empty(x.sizes(), x.options().dtype(code_dtype(grid)));
  Tensor mask = at::empty({with_mask ? (x.numel() + 7) / 8 : 0}, x.options().dtype(at::kByte));
  Tensor values = with_values ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(quantize, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), scales, grid,
                 codes.mutable_data_ptr(), with_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr,
                 with_values ? values.mutable_data_ptr() : nullptr, effective);
  }
  return {codes, mask, values};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& s0, const OptionalTensor& theta, int64_t bits,
                                    at::ScalarType scale_dtype, bool with_mask, const OptionalTensor& zero,
                                    const OptionalTensor& above) {
  const auto [codes, mask, values] = quantize_all(x, s0, theta, bits, scale_dtype, with_mask, false, zero, above);
  return {codes, mask};
}

std::tuple<Tensor, Tensor, Tensor> quantize_with_values(const Tensor& x, const Tensor& s0, const OptionalTensor& theta,
                                                        int64_t bits, at::ScalarType scale_dtype, bool with_mask,
                                                        const OptionalTensor& zero, const OptionalTensor& above) {
  return quantize_all(x, s0, theta, bits, scale_dtype, with_mask, true, zero, above);
}

std::tuple<Tensor, Tensor> quantize_with_scale(const Tensor& x, const Tensor& s0, const OptionalTensor& theta,
                                               int64_t bits, at::ScalarType scale_dtype, const OptionalTensor& zero,
                                               const OptionalTensor& above) {
  if (x.numel() == 0) {
    const auto [codes, mask] = quantize(x, s0, theta, bits, scale_dtype, false, zero, above);
    return {codes, effective_scale(s0, theta, scale_dtype, std::nullopt, above)};
  }
  Tensor scale = at::empty(s0.sizes(), s0.options());
  TORCH_CHECK(scale.scalar_type() == at::kFloat, "s0 is ", s0.scalar_type(), ", expected float32");
  const auto [codes, mask, values] = quantize_all(x, s0, theta, bits, scale_dtype, false, false, zero, above,
                                                  scale.mutable_data_ptr<float>());
  return {codes, scale};
}

Tensor dequantized(const Tensor& codes_, const Tensor& s0, const OptionalTensor& theta, at::ScalarType scale_dtype,
                   at::ScalarType dtype, const OptionalTensor& zero, const OptionalTensor& above, void* zeros) {
  const Tensor codes = codes_.contiguous();
  const int grid = grid_of_codes(codes.scalar_type());
  const Scales scales = scales_of(codes.numel(), s0, theta, scale_dtype, codes, zero, grid, above);
  Tensor out = at::empty(codes.sizes(), codes.options().dtype(dtype));
  if (codes.numel() > 0) {
    DEEPQAT_CALL(dequantize, codes, codes.const_data_ptr(), scales, grid, dtype_of(dtype, "dtype"),
                 out.mutable_data_ptr(), zeros);
  }
  return out;
}

Tensor dequantize(const Tensor& codes, const Tensor& s0, const OptionalTensor& theta, at::ScalarType scale_dtype,
                  at::ScalarType dtype, const OptionalTensor& /*after*/, const OptionalTensor& zero,
                  const OptionalTensor& above) {
  return dequantized(codes, s0, theta, scale_dtype, dtype, zero, above, nullptr);
}

std::tuple<Tensor, Tensor> dequantize_with_zeros(const Tensor& codes, const Tensor& s0, const Tensor& theta,
                                                 at::ScalarType scale_dtype, at::ScalarType dtype,
                                                 const OptionalTensor& /*after*/, const OptionalTensor& zero,
                                                 const OptionalTensor& above) {
  Tensor zeros = at::empty(theta.sizes(), theta.options());
  Tensor out = dequantized(codes, s0, theta, scale_dtype, dtype, zero, above, zeros.mutable_data_ptr());
  return {out, codes.numel() == 0 ? zeros.zero_() : zeros};
}

Tensor fake_quantize(const Tensor& x_, const Tensor& s0, const OptionalTensor& theta, int64_t bits,
                     at::ScalarType scale_dtype, const OptionalTensor& /*after*/, const OptionalTensor& zero,
                     const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = scales_of(x.numel(), s0, theta, scale_dtype, x, zero, grid, above);
  Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), scales, grid,
                 out.mutable_data_ptr());
  }
  return out;
}

// Write grad_x, which may be grad itself, and return theta's gradient.
Tensor backward_into(Tensor& grad_x, const Tensor& grad, const Tensor& x_, const Tensor& s0, const OptionalTensor& theta,
                     int64_t bits, at::ScalarType scale_dtype, double factor, bool theta_gradient,
                     const OptionalTensor& zero, const OptionalTensor& above, bool of_weight) {
  TORCH_CHECK(grad.sizes() == x_.sizes() && grad.scalar_type() == x_.scalar_type(), "grad is ", grad.sizes(), " ",
              grad.scalar_type(), ", x is ", x_.sizes(), " ", x_.scalar_type());
  TORCH_CHECK(grad.device() == x_.device(), "grad is on ", grad.device(), ", x on ", x_.device());
  TORCH_CHECK(!theta_gradient || theta.has_value(), "there is no theta to have a gradient");
  const Tensor x = x_.contiguous();
  const int grid = checked_grid(bits);
  const Scales scales = scales_of(x.numel(), s0, theta, scale_dtype, x, zero, grid, above);
  Tensor grad_theta = theta_gradient ? at::empty(theta->sizes(), theta->options()) : at::empty({0}, x.options());
  if (x.numel() == 0) return grad_theta.zero_();
  const int64_t sums = theta_gradient ? scales.count * deepqat::segments_of(scales.block) : 0;
  Tensor partial_sums = at::empty({sums}, s0.options());
  DEEPQAT_CALL(fake_quantize_backward, x, grad.const_data_ptr(), x.const_data_ptr(), dtype_of(x.scalar_type(), "x"),
               scales, grid, static_cast<float>(factor), of_weight, grad_x.mutable_data_ptr(),
               partial_sums.mutable_data_ptr<float>(), theta_gradient ? grad_theta.mutable_data_ptr() : nullptr);
  return grad_theta;
}

std::tuple<Tensor, Tensor> fake_quantize_backward(const Tensor& grad, const Tensor& x, const Tensor& s0,
                                                  const OptionalTensor& theta, int64_t bits, at::ScalarType scale_dtype,
                                                  double factor, bool theta_gradient, const OptionalTensor& zero,
                                                  const OptionalTensor& above, bool of_weight) {
  Tensor grad_x = at::empty(grad.sizes(), grad.options());
  const Tensor dense = grad.contiguous();
  Tensor grad_theta = backward_into(grad_x, dense, x, s0, theta, bits, scale_dtype, factor, theta_gradient, zero, above,
                                    of_weight);
  return {grad_x, grad_theta};
}

Tensor fake_quantize_backward_(Tensor& grad, const Tensor& x, const Tensor& s0, const OptionalTensor& theta,
                               int64_t bits, at::ScalarType scale_dtype, double factor, bool theta_gradient,
                               const OptionalTensor& zero, const OptionalTensor& above, bool of_weight) {
  TORCH_CHECK(grad.is_contiguous(), "what is overwritten must be contiguous, grad has strides ", grad.strides());
  return backward_into(grad, grad, x, s0, theta, bits, scale_dtype, factor, theta_gradient, zero, above, of_weight);
}

void masked_into(Tensor& out, const Tensor& grad, const Tensor& mask) {
  check_mask(grad, mask);
  if (grad.numel() == 0) return;
  DEEPQAT_CALL(masked, grad, grad.const_data_ptr(), mask.const_data_ptr<uint8_t>(),
               dtype_of(grad.scalar_type(), "grad"), grad.numel(), out.mutable_data_ptr());
}

Tensor masked(const Tensor& grad, const Tensor& mask) {
  Tensor out = at::empty(grad.sizes(), grad.options());
  masked_into(out, grad.contiguous(), mask);
  return out;
}

void masked_(Tensor& grad, const Tensor& mask) {
  TORCH_CHECK(grad.is_contiguous(), "what is overwritten must be contiguous, grad has strides ", grad.strides());
  masked_into(grad, grad, mask);
}

Tensor dequantize_and_mask_(Tensor& grad, const Tensor& mask, const Tensor& codes_, const Tensor& s0,
                            const OptionalTensor& theta, at::ScalarType scale_dtype, const OptionalTensor& zero,
                            const OptionalTensor& above) {
  check_mask(grad, mask);
  TORCH_CHECK(grad.is_contiguous(), "what is overwritten must be contiguous, grad has strides ", grad.strides());
  TORCH_CHECK(grad.sizes() == codes_.sizes() && grad.device() == codes_.device(), "grad is ", grad.sizes(), " on ",
              grad.device(), ", codes are ", codes_.sizes(), " on ", codes_.device());
  const Tensor codes = codes_.contiguous();
  const int grid = grid_of_codes(codes.scalar_type());
  const Scales scales = scales_of(codes.numel(), s0, theta, scale_dtype, codes, zero, grid, above);
  Tensor out = at::empty(codes.sizes(), grad.options());
  if (codes.numel() > 0) {
    DEEPQAT_CALL(dequantize_and_mask, codes, codes.const_data_ptr(), scales, grid, dtype_of(grad.scalar_type(), "grad"),
                 out.mutable_data_ptr(), grad.mutable_data_ptr(), mask.const_data_ptr<uint8_t>());
  }
  return out;
}

Tensor amax(const Tensor& x_, int64_t count) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(count > 0 && x.numel() % count == 0, count, " parts do not divide ", x.numel(), " elements");
  const int64_t block = x.numel() / count;
  Tensor out = at::empty({count}, x.options().dtype(at::kFloat));
  if (x.numel() == 0) return out.zero_();
  Tensor partial = at::empty({count * deepqat::segments_of(block)}, out.options());
  DEEPQAT_CALL(amax, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), count, block,
               partial.mutable_data_ptr<float>(), out.mutable_data_ptr<float>());
  return out;
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
              "scales of tokens are float32, of floats powers of two, of e2m1 also e4m3; got ", bits);
  TORCH_CHECK(!four || features <= deepqat::kShortToken, "e2m1 has groups of at most 32 features, got ", features);
  TORCH_CHECK(!above.has_value() || above->numel() == 1, "tokens have one global scale, got ", above->numel());
  return {features == 0 ? 0 : x.numel() / features, features, static_cast<int>(bits), symmetric, stored,
          checked_above(above, stored, 1, x)};
}

std::tuple<Tensor, Tensor, Tensor> quantize_tokens(const Tensor& x_, int64_t bits, bool symmetric,
                                                   std::optional<at::ScalarType> scale_dtype,
                                                   const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, symmetric, scale_dtype, above);
  auto shape = x.sizes().vec();
  shape.back() = 1;
  Tensor codes = at::empty(x.sizes(), x.options().dtype(code_dtype(tokens.grid)));
  Tensor scale = at::ones(shape, x.options().dtype(at::kFloat));
  Tensor zero_point = at::zeros(shape, x.options().dtype(at::kChar));
  if (x.numel() > 0) {
    DEEPQAT_CALL(quantize_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens,
                 codes.mutable_data_ptr(), scale.mutable_data_ptr<float>(), zero_point.mutable_data_ptr<int8_t>());
  }
  return {codes, scale, zero_point};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> keep_tokens(
    const Tensor& x_, int64_t bits, bool with_mask, std::optional<at::ScalarType> scale_dtype, const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, /*symmetric=*/true, scale_dtype, above);
  const bool four = bits == deepqat::kE2M1Grid, whole = !(four || with_mask) || tokens.features % 8 == 0;
  TORCH_CHECK(bits <= 1 && whole, "floats are kept, e2m1 and masks in eights; got grid ", bits, " of ", tokens.features);
  auto shape = x.sizes().vec();
  shape.back() = four ? tokens.features / 2 : tokens.features;
  Tensor values = at::empty(x.sizes(), x.options()), codes = at::empty(shape, x.options().dtype(code_dtype(tokens.grid)));
  shape.back() = 1;
  Tensor scales = at::empty(shape, x.options().dtype(scale_dtype.value_or(at::kFloat)));
  Tensor mask = at::empty({with_mask ? x.numel() / 8 : 0}, x.options().dtype(at::kByte));
  if (x.numel() > 0) {
    DEEPQAT_CALL(keep_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens, values.mutable_data_ptr(),
                 static_cast<uint8_t*>(codes.mutable_data_ptr()), with_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr,
                 scales.mutable_data_ptr());
  } else {
    scales.fill_(1);
  }
  return {values, codes, mask, scales};
}

Tensor fake_quantize_tokens(const Tensor& x_, int64_t bits, bool symmetric, const OptionalTensor& /*after*/,
                            std::optional<at::ScalarType> scale_dtype, const OptionalTensor& above) {
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, symmetric, scale_dtype, above);
  Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens,
                 out.mutable_data_ptr(), nullptr);
  }
  return out;
}

Tensor fake_quantize_tokens_and_mask_(Tensor& grad, const Tensor& x_, int64_t bits, bool symmetric, bool with_values,
                                      std::optional<at::ScalarType> scale_dtype, const OptionalTensor& above) {
  TORCH_CHECK(grad.sizes() == x_.sizes() && grad.scalar_type() == x_.scalar_type() && grad.device() == x_.device(),
              "grad is ", grad.sizes(), " ", grad.scalar_type(), " on ", grad.device(), ", x is ", x_.sizes(), " ",
              x_.scalar_type(), " on ", x_.device());
  TORCH_CHECK(grad.is_contiguous(), "what is overwritten must be contiguous, grad has strides ", grad.strides());
  const Tensor x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, symmetric, scale_dtype, above);
  Tensor out = with_values ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize_tokens, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), tokens,
                 with_values ? out.mutable_data_ptr() : nullptr, grad.mutable_data_ptr());
  }
  return out;
}

Tensor fake_quantize_tokens_backward(const Tensor& grad_, const Tensor& x_, int64_t bits, bool symmetric,
                                     std::optional<at::ScalarType> scale_dtype, const OptionalTensor& above) {
  TORCH_CHECK(grad_.sizes() == x_.sizes() && grad_.scalar_type() == x_.scalar_type(), "grad is ", grad_.sizes(), " ",
              grad_.scalar_type(), ", x is ", x_.sizes(), " ", x_.scalar_type());
  TORCH_CHECK(grad_.device() == x_.device(), "grad is on ", grad_.device(), ", x on ", x_.device());
  const Tensor grad = grad_.contiguous(), x = x_.contiguous();
  const Tokens tokens = tokens_of(x, bits, symmetric, scale_dtype, above);
  Tensor grad_x = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    DEEPQAT_CALL(fake_quantize_tokens_backward, x, grad.const_data_ptr(), x.const_data_ptr(),
                 dtype_of(x.scalar_type(), "x"), tokens, grad_x.mutable_data_ptr());
  }
  return grad_x;
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

void implement(torch::Library& library) {
  library.impl("effective_scale", TORCH_FN(effective_scale));
  library.impl("quantize", TORCH_FN(quantize));
  library.impl("quantize_with_values", TORCH_FN(quantize_with_values));
  library.impl("quantize_with_scale", TORCH_FN(quantize_with_scale));
  library.impl("dequantize", TORCH_FN(dequantize));
  library.impl("dequantize_with_zeros", TORCH_FN(dequantize_with_zeros));
  library.impl("fake_quantize", TORCH_FN(fake_quantize));
  library.impl("fake_quantized", TORCH_FN(fake_quantize));
  library.impl("fake_quantize_backward", TORCH_FN(fake_quantize_backward));
  library.impl("fake_quantize_backward_", TORCH_FN(fake_quantize_backward_));
  library.impl("masked", TORCH_FN(masked));
  library.impl("masked_", TORCH_FN(masked_));
  library.impl("dequantize_and_mask_", TORCH_FN(dequantize_and_mask_));
  library.impl("amax", TORCH_FN(amax));
  library.impl("quantize_tokens", TORCH_FN(quantize_tokens));
  library.impl("keep_tokens", TORCH_FN(keep_tokens));
  library.impl("fake_quantize_tokens", TORCH_FN(fake_quantize_tokens));
  library.impl("fake_quantized_tokens", TORCH_FN(fake_quantize_tokens));
  library.impl("fake_quantize_tokens_and_mask_", TORCH_FN(fake_quantize_tokens_and_mask_));
  library.impl("fake_quantize_tokens_backward", TORCH_FN(fake_quantize_tokens_backward));
  library.impl("sum_rows", TORCH_FN(sum_rows));
}

}  // namespace

TORCH_LIBRARY_IMPL(deepqat, CPU, library) { implement(library); }

#if defined(DEEPQAT_CUDA)
TORCH_LIBRARY_IMPL(deepqat, CUDA, library) { implement(library); }
#endif
