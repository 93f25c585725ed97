// Operation of the CUDA kernels on tokens, whose grids come from Grids::token.

#pragma once

#include "operations.h"
#include "../token_grids.h"

namespace deepqat::cuda {

// Compute the fake-quantized values, mask the gradient in place, and compute packed codes, mask and scale of each token;
// each unless its pointer is null.
template <typename T, typename Grids>
struct FakeQuantizeTokens {
  using In = Vector<T>;
  using Grid = typename Grids::Grid;
  static constexpr bool kShort = Grids::kShort, kCentred = Grids::kCentred;
  const T* x;
  T *out, *grad;
  uint8_t *codes, *mask;
  void* scales;
  Tokens tokens;
  Grids grids;

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, const Token<Grid>& token) const {
    float v[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= token.inverse; });
    const auto grid_of = [&](int) { return token.grid; };
    if (out != nullptr) {
      float rounded[kVector];
      round_to_grid(grid_of, v, rounded);
      unrolled<kVector>([&](int j) { rounded[j] *= token.scale; });
      store_vector<kWide>(stored<T>(rounded), out + i, n);
    }
    if (grad != nullptr) keep_where<kWide>(bits_where([&](int j) { return token.grid.inside(v[j]); }), grad + i, n);
    if constexpr (requires { Grid::kBits; }) {
      if (codes != nullptr) keep<kWide>(encoded(grid_of, v), i, n);
    }
    if (mask != nullptr && n > 0) mask[i / kVector] = bits_where([&](int j) { return j < n && token.grid.inside(v[j]); });
  }

  // Store codes of floats, two of e2m1 in a byte.
  template <bool kWide>
  DEEPQAT_DEVICE void keep(const Vector<uint8_t>& its_codes, int64_t i, int n) const {
    if constexpr (Grid::kBits == 8) {
      store_vector<kWide>(its_codes, codes + i, n);
    } else {
      unrolled<kVector / 2>([&](int j) {
        if (2 * j < n) codes[i / 2 + j] = pair_of(its_codes.at[2 * j], its_codes.at[2 * j + 1]);
      });
    }
  }

  DEEPQAT_DEVICE void finish(int64_t token, float scale) const {
    if (scales != nullptr) store_scale(scale, tokens, token, scales);
  }
};

}  // namespace deepqat::cuda
