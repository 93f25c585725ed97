// Gradients as fp8 codes, and codes of a transposed matrix: what the fp8 GEMMs of backward multiply.

#include "bindings.h"

namespace {

// [columns, whole_row(rows)] of a matrix [rows, columns], without values.
Tensor transposed_like(const Tensor& x, at::ScalarType dtype) {
  return at::empty({x.size(1), deepqat::whole_row(x.size(0))}, x.options().dtype(dtype));
}

Tensor transposed_like(const Tensor& codes) { return transposed_like(codes, codes.scalar_type()); }

std::tuple<Tensor, Tensor, Tensor> quantize_gradient(const Tensor& grad_, at::ScalarType format) {
  TORCH_CHECK(grad_.dim() == 2, "a gradient has two dimensions here, got ", grad_.sizes());
  const bool wide_range = format == at::kFloat8_e5m2;
  TORCH_CHECK(wide_range || format == at::kFloat8_e4m3fn, "format ", format, " is neither float8_e4m3fn nor float8_e5m2");
  const Tensor grad = grad_.contiguous();
  const auto fp32 = grad.options().dtype(at::kFloat);
  Tensor codes = at::empty(grad.sizes(), grad.options().dtype(format)), transposed = transposed_like(codes);
  if (grad.numel() == 0) return {codes, transposed, at::ones({1}, fp32)};
  const auto dtype = dtype_of(grad.scalar_type(), "grad");
  Tensor scale = at::empty({1}, fp32), largest = at::empty({1}, fp32);
  Tensor partial = at::empty({deepqat::segments_of(grad.numel())}, fp32);
  DEEPQAT_CALL(amax, grad, grad.const_data_ptr(), dtype, 1, grad.numel(), partial.mutable_data_ptr<float>(),
               largest.mutable_data_ptr<float>());
  DEEPQAT_CALL(quantize_gradient, grad, grad.const_data_ptr(), dtype,
               wide_range ? deepqat::kE5M2Grid : deepqat::kE4M3Grid, grad.size(0), grad.size(1),
               largest.const_data_ptr<float>(), codes.mutable_data_ptr(), transposed.mutable_data_ptr(),
               scale.mutable_data_ptr<float>());
  return {codes, transposed, scale};
}

std::tuple<Tensor, Tensor> quantize_transposed(const Tensor& x_, const Tensor& s0, const OptionalTensor& theta,
                                               const OptionalTensor& /*after*/) {
  TORCH_CHECK(x_.dim() == 2, "what is turned over has two dimensions, got ", x_.sizes());
  TORCH_CHECK(s0.numel() == 1, "there is one scale, got ", s0.numel());
  const Tensor x = x_.contiguous();
  Tensor transposed = transposed_like(x, at::kFloat8_e4m3fn);
  Tensor scale = at::empty({1}, s0.options());
  const Scales scales = scales_of(x.numel(), s0, theta, at::kFloat, x);
  if (x.numel() == 0) {
    DEEPQAT_CALL(effective_scale, s0, scales, scale.mutable_data_ptr<float>());
    return {transposed, scale};
  }
  DEEPQAT_CALL(quantize_transposed, x, x.const_data_ptr(), dtype_of(x.scalar_type(), "x"), scales, x.size(0),
               x.size(1), transposed.mutable_data_ptr(), scale.mutable_data_ptr<float>());
  return {transposed, scale};
}

Tensor transpose_codes(const Tensor& codes_) {
  TORCH_CHECK(codes_.dim() == 2 && codes_.element_size() == 1, "codes are a matrix of bytes, got ", codes_.sizes(), " ",
              codes_.scalar_type());
  const Tensor codes = codes_.contiguous();
  Tensor transposed = transposed_like(codes);
  if (codes.numel() == 0) return transposed;
  DEEPQAT_CALL(transpose_codes, codes, codes.const_data_ptr(), codes.size(0), codes.size(1),
               transposed.mutable_data_ptr());
  return transposed;
}

void implement(torch::Library& library) {
  library.impl("quantize_gradient", TORCH_FN(quantize_gradient));
  library.impl("quantize_transposed", TORCH_FN(quantize_transposed));
  library.impl("transpose_codes", TORCH_FN(transpose_codes));
}

}  // namespace

TORCH_LIBRARY_IMPL(deepqat, CPU, library) { implement(library); }

#if defined(DEEPQAT_CUDA)
TORCH_LIBRARY_IMPL(deepqat, CUDA, library) { implement(library); }
#endif
