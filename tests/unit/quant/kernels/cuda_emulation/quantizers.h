// The quantizers, their backward and the sums on both backends.

#pragma once

#include "random_tensors.h"

namespace {

void test_effective_scale() {
  ScaledCase c("effective_scale", chance(0.8));
  Result out(c.count, 4, below(3));
  ON_BOTH(effective_scale, c.scales, at(out));
  out.compare("scale", Dtype::kFloat32);
}

void test_quantize() {
  ScaledCase c("quantize", chance(0.5));
  const bool masked = chance(0.6), valued = chance(0.5), scaled = chance(0.5);
  what += std::string(masked ? " with mask" : "") + (valued ? " with values" : "");
  Result codes(c.numel, 1, any_offset()), mask((c.numel + 7) / 8, 1, below(3)), effective(c.count, 4, below(3));
  Result values(c.numel, size_of(c.dtype), any_offset()), grad(c.numel, size_of(c.dtype), any_offset());
  ON_BOTH(quantize, c.x.data(), c.dtype, c.scales, c.grid, at(codes), at(mask, masked), at(values, valued),
          at(effective, scaled));
  codes.compare("codes");
  if (scaled) effective.compare("scales beside codes", Dtype::kFloat32);
  if (valued) values.compare("values", c.dtype);
  if (!masked) return;
  mask.compare("mask");
  grad.start(c.grad);
  ON_BOTH(masked, at(grad), at(mask), c.dtype, c.numel);
  grad.compare("masked");
  grad.start(c.grad);
  ON_BOTH(dequantize, at(codes), c.scales, c.grid, c.dtype, at(values), nullptr, at(grad), at(mask));
  values.compare("dequantized while masking", c.dtype);
  grad.compare("masked while dequantizing");
}

void test_dequantize() {
  ScaledCase c("dequantize", chance(0.5));
  Buffer codes(c.numel, 1, any_offset(), 0);
  for (int64_t i = 0; i < c.numel; ++i) static_cast<uint8_t*>(codes.data())[i] = static_cast<uint8_t>(below(256));
  Result out(c.numel, size_of(c.dtype), any_offset()), zeros(c.count, size_of(c.theta_dtype), below(3));
  const bool zeroed = c.scales.theta != nullptr && chance(0.5);
  ON_BOTH(dequantize, codes.data(), c.scales, c.grid, c.dtype, at(out), at(zeros, zeroed), nullptr, nullptr);
  out.compare("dequantized", c.dtype);
  if (!zeroed) return;
  zeros.compare("zeros");
  for (int64_t i = 0; i < c.count; ++i)
    if (bits_of(get(zeros.cpu, c.theta_dtype, i)) != 0) fail("a zero is none");
}

void test_fake_quantize() {
  ScaledCase c("fake_quantize", chance(0.5));
  Result out(c.numel, size_of(c.dtype), any_offset());
  ON_BOTH(fake_quantize, c.x.data(), c.dtype, c.scales, c.grid, at(out));
  out.compare("fake-quantized", c.dtype);
}

void test_backward() {
  const bool learned = chance(0.8), of_weight = chance(0.5);
  ScaledCase c("fake_quantize_backward", learned);
  Result grad(c.numel, size_of(c.dtype), any_offset()), grad_theta(c.count, size_of(c.theta_dtype), below(3));
  Result partial(c.count * segments_of(c.block), 4, below(3));
  grad.start(c.grad);
  Reduction reduction;
  ON_BOTH(fake_quantize_backward, at(grad), c.x.data(), c.dtype, c.scales, c.grid, 0.37f, of_weight, at(partial),
          at(grad_theta, learned));
  if (learned) reduction.check(c);
  grad.compare("gradient", c.dtype);
  if (learned) grad_theta.compare("grad_theta", c.theta_dtype);
}

// The factors have no s0.
void test_runs() {
  ScaledCase c("runs", true);
  const Scales factors{nullptr, c.scales.theta, c.theta_dtype, Stored::kFloat32, c.count, c.block};
  const Scales sums{nullptr, nullptr, c.theta_dtype, Stored::kFloat32, c.count, c.block};
  Result products(c.numel, size_of(c.dtype), any_offset()), out(c.count, size_of(c.theta_dtype), below(3));
  Result partial(c.count * segments_of(c.block), 4, below(3));
  ON_BOTH(multiply_runs, c.x.data(), c.dtype, factors, at(products));
  products.compare("products", c.dtype);
  Reduction reduction;
  ON_BOTH(sum_products, c.x.data(), c.grad.data(), c.dtype, sums, 0.37f, at(partial), at(out));
  reduction.check(c);
  out.compare("sums of products", c.theta_dtype);
}

void test_amax() {
  Case c("amax");
  Result out(c.count, 4, below(3)), partial(c.count * segments_of(c.block), 4, below(3));
  Reduction reduction;
  ON_BOTH(amax, c.x.data(), c.dtype, c.count, c.block, at(partial), at(out));
  reduction.check(c);
  out.compare("amax", Dtype::kFloat32);
}

// A case whose runs are tokens, with scales that are computed.
struct TokenCase : Case {
  int grid = block <= kShortToken && chance(0.5) ? 1 : one_of({0, 0, 4, 8, 8});
  bool symmetric = grid <= 1 || chance(0.5);
  float above = static_cast<float>(500.0 * std::exp(2.0 * normal()));
  Tokens tokens{count, block, grid, symmetric};

  TokenCase() : Case("tokens") {
    if (grid <= 1 && chance(0.5)) tokens.stored_as = Stored::kE8M0;
    if (grid == 1 && tokens.stored_as != Stored::kE8M0) tokens.stored_as = Stored::kE4M3, tokens.above = &above;
    what += " grid " + std::to_string(grid) + (symmetric ? " symmetric" : "");
    what += " stored " + std::to_string(static_cast<int>(tokens.stored_as));
    if (chance(0.1))
      for (int64_t i = 0; i < block; ++i) put(x, dtype, i, one_of({0.0, -0.0}));
  }
};

void test_tokens() {
  TokenCase c;
  const bool kept = c.grid <= 1 && c.block % 8 == 0 && chance(0.7), masked = kept && chance(0.5);
  const bool valued = kept || chance(0.7), graded = chance(0.5);
  const int64_t bytes = c.grid == 1 ? c.numel / 2 : c.numel, size = c.tokens.stored_as == Stored::kFloat32 ? 4 : 1;
  Result values(c.numel, size_of(c.dtype), any_offset()), grad(c.numel, size_of(c.dtype), any_offset());
  Result codes(bytes, 1, any_offset()), mask(c.numel / 8, 1, below(3)), scales(c.count, size, below(3));
  grad.start(c.grad);
  ON_BOTH(fake_quantize_tokens, c.x.data(), c.dtype, c.tokens, at(values, valued), at(grad, graded), at(codes, kept),
          at(mask, masked), at(scales, kept));
  if (valued) values.compare("values", c.dtype);
  if (graded) grad.compare("gradient", c.dtype);
  if (!kept) return;
  codes.compare("codes");
  scales.compare("scales");
  if (masked) mask.compare("mask");
}

void test_sum_rows() {
  Case c("sum_rows");
  const int64_t sums = below(20), per_sum = below(9);
  what += " into " + std::to_string(sums) + " x " + std::to_string(per_sum);
  Buffer places(sums * per_sum, 8, below(3), 0);
  for (int64_t i = 0; i < sums * per_sum; ++i) static_cast<int64_t*>(places.data())[i] = below(c.count);
  Result out(sums * c.block, size_of(c.dtype), any_offset());
  ON_BOTH(sum_rows, c.x.data(), Pointer{places.data()}, c.dtype, sums, per_sum, c.block, at(out));
  out.compare("sums", c.dtype);
}

}  // namespace
