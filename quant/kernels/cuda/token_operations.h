// Operations of the CUDA kernels on tokens, whose grids come from Grids::token; interface as in cuda/operations.h.

#pragma once

#include "operations.h"
#include "../token_grids.h"

namespace deepqat::cuda {

template <typename T, typename Grids>
struct QuantizeTokens {
  using In = Vector<T>;
  using OfToken = Token<typename Grids::Grid>;
  static constexpr bool kShort = Grids::kShort, kCentred = Grids::kCentred;
  const T* x;
  typename Grids::Grid::Code* codes;
  float* scale;
  int8_t* zero_point;
  Grids grids;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return load_vector<kWide>(x + i, n);
  }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, const OfToken& token) const {
    float v[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= token.inverse; });
    store_vector<kWide>(encoded([&](int) { return token.grid; }, v), codes + i, n);
  }

  DEEPQAT_DEVICE void finish(int64_t i, const OfToken& token) const {
    scale[i] = token.scale;
    zero_point[i] = zero_point_of(token.grid);
  }
};

// Compute values, packed codes, mask and scale of each token in one pass.
template <typename T, typename Grids>
struct KeepTokens {
  using In = Vector<T>;
  using Grid = typename Grids::Grid;
  using OfToken = Token<Grid>;
  static constexpr bool kShort = Grids::kShort, kCentred = Grids::kCentred;
  const T* x;
  T* values;
  uint8_t *codes, *mask;
  void* scales;
  Tokens tokens;
  Grids grids;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return load_vector<kWide>(x + i, n);
  }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, const OfToken& token) const {
    float v[kVector], rounded[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= token.inverse; });
    const auto grid_of = [&](int) { return token.grid; };
    round_to_grid(grid_of, v, rounded);
    unrolled<kVector>([&](int j) { rounded[j] *= token.scale; });
    store_vector<kWide>(stored<T>(rounded), values + i, n);
    const auto its_codes = encoded(grid_of, v);
    if constexpr (Grid::kBits == 8) {
      store_vector<kWide>(its_codes, codes + i, n);
    } else {
      unrolled<kVector / 2>([&](int j) {
        if (2 * j < n) codes[i / 2 + j] = pair_of(its_codes.at[2 * j], its_codes.at[2 * j + 1]);
      });
    }
    if (mask != nullptr && n > 0) mask[i / kVector] = bits_where([&](int j) { return j < n && token.grid.inside(v[j]); });
  }

  DEEPQAT_DEVICE void finish(int64_t i, const OfToken& token) const { store_scale(token.scale, tokens, i, scales); }
};

template <typename T, typename Grids>
struct FakeQuantizeTokens {
  using In = Vector<T>;
  using OfToken = Token<typename Grids::Grid>;
  static constexpr bool kShort = Grids::kShort, kCentred = Grids::kCentred;
  const T* x;
  T *out, *grad;  // either may be null
  Grids grids;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return load_vector<kWide>(x + i, n);
  }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, const OfToken& token) const {
    float v[kVector], rounded[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= token.inverse; });
    if (out != nullptr) {
      round_to_grid([&](int) { return token.grid; }, v, rounded);
      unrolled<kVector>([&](int j) { rounded[j] *= token.scale; });
      store_vector<kWide>(stored<T>(rounded), out + i, n);
    }
    if (grad == nullptr) return;
    const uint32_t bits = bits_where([&](int j) { return token.grid.inside(v[j]); });
    if (bits == kAllOfThem) return;
    const auto bit = [&](int j) { return (bits >> j & 1u) != 0; };
    store_vector<kWide>(kept(load_vector<kWide>(grad + i, n), bit), grad + i, n);
  }

  DEEPQAT_DEVICE void finish(int64_t, const OfToken&) const {}
};

template <typename T, typename Grids>
struct TokensBackward {
  using In = GradAndX<T>;
  using OfToken = Token<typename Grids::Grid>;
  static constexpr bool kShort = Grids::kShort, kCentred = Grids::kCentred;
  const T *grad, *x;
  T* grad_x;
  Grids grids;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return {load_vector<kWide>(grad + i, n), load_vector<kWide>(x + i, n)};
  }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, const OfToken& token) const {
    float v[kVector];
    values_of(in.x, v);
    const auto inside = [&](int j) { return token.grid.inside(v[j] * token.inverse); };
    store_vector<kWide>(kept(in.grad, inside), grad_x + i, n);
  }

  DEEPQAT_DEVICE void finish(int64_t, const OfToken&) const {}
};

}  // namespace deepqat::cuda
