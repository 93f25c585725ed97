// What is fused into layers, and what GEMMs of codes need, on both backends.

#pragma once

#include "random_tensors.h"

namespace {

// Rows of a multiple of eight, at most a segment, with one scale.
struct NormCase : ScaledCase {
  int64_t features = std::min<int64_t>(kSegment, (block + 7) / 8 * 8), rows = numel / features;
  Buffer weight{features, size_of(dtype), any_offset(), 0};

  explicit NormCase(const char* name) : ScaledCase(name, false) {
    what += " rows " + std::to_string(rows);
    scales = {scales.s0, nullptr, Dtype::kFloat32, Stored::kFloat32, 1, rows * features};
    for (int64_t i = 0; i < features; ++i) put(weight, dtype, i, 1.0 + 0.3 * normal());
  }
};

void test_norms() {
  NormCase c("norms");
  if (c.rows == 0) return;
  const int64_t numel = c.rows * c.features, size = size_of(c.dtype);
  const bool valued = chance(0.5), masked = chance(0.8);
  Result codes(numel, 1, any_offset()), mask(numel / 8, 1, below(3)), values(numel, size, any_offset());
  Result rstd(c.rows, 4, below(3));
  ON_BOTH(rms_norm_quantize, c.x.data(), c.weight.data(), c.dtype, c.rows, c.features, 1e-6f, c.scales, c.grid,
          at(codes), at(mask, masked), at(values, valued), at(rstd));
  rstd.compare("rstd", Dtype::kFloat32);
  codes.compare("codes");
  if (valued) values.compare("values", c.dtype);
  if (masked) mask.compare("mask");

  Buffer inside(numel / 8, 1, below(3), 0);
  for (int64_t i = 0; i < numel / 8; ++i) static_cast<uint8_t*>(inside.data())[i] = static_cast<uint8_t>(random_bits());
  const bool weighted = chance(0.8);
  Result grad_x(numel, size, any_offset()), partial(sums_of_rows(c.rows) * c.features, 4, below(3));
  Result grad_weight(c.features, size, any_offset());
  ON_BOTH(rms_norm_backward, c.grad.data(), c.x.data(), c.weight.data(), at(rstd), Pointer{inside.data()}, c.dtype,
          c.rows, c.features, at(grad_x), at(partial, weighted), at(grad_weight, weighted));
  grad_x.compare("grad_x", c.dtype);
  if (weighted) grad_weight.compare("grad_weight", c.dtype);
}

void test_swiglu() {
  ScaledCase c("swiglu", false);
  const int64_t size = size_of(c.dtype);
  c.scales = {c.scales.s0, nullptr, Dtype::kFloat32, Stored::kFloat32, 1, c.numel};
  const bool valued = chance(0.5);
  Result codes(c.numel, 1, any_offset()), mask((c.numel + 7) / 8, 1, below(3)), values(c.numel, size, any_offset());
  ON_BOTH(silu_mul_quantize, c.x.data(), c.grad.data(), c.dtype, c.scales, c.grid, at(codes), at(mask),
          at(values, valued));
  codes.compare("codes");
  mask.compare("mask");
  if (valued) values.compare("values", c.dtype);
  Result grad_gate(c.numel, size, any_offset()), grad_up(c.numel, size, any_offset());
  ON_BOTH(silu_mul_backward, c.grad.data(), c.x.data(), c.grad.data(), at(mask), c.dtype, c.numel, at(grad_gate),
          at(grad_up));
  grad_gate.compare("grad_gate", c.dtype);
  grad_up.compare("grad_up", c.dtype);
}

}  // namespace
