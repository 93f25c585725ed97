// Dispatch from a dtype and a grid at run time to the types that the kernels are compiled for.

#pragma once

#include "arithmetic.h"
#include "kernels.h"
#include "token_grids.h"

namespace deepqat {

// Call f with a value of the type `dtype`.
template <typename F>
void with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kFloat32: return f(float{});
    case Dtype::kBFloat16: return f(BFloat16{});
    case Dtype::kHalf: return f(Half{});
  }
}

// Call f with a value of the type `dtype` and the grid, with zero points if the scales have them.
template <typename F>
void with_dtype_and_grid(Dtype dtype, int grid, const Scales& scales, F f) {
  with_dtype(dtype, [&](auto zero) {
    if (grid == kE4M3Grid) return f(zero, E4M3{});
    if (grid == kE2M1Grid) return f(zero, E2M1{});
    const float half = static_cast<float>(1 << ((grid < 0 ? -grid : grid) - 1));
    const Integer codes{grid < 0 ? 1.0f - half : -half, half - 1.0f};
    if (scales.zero != nullptr) return f(zero, ShiftedIntegers{codes});
    f(zero, codes);
  });
}

// Call f with a value of the type `dtype` and the factory of the tokens' grids.
template <typename F>
void with_dtype_and_token_grid(Dtype dtype, const Tokens& tokens, F f) {
  with_dtype(dtype, [&](auto zero) {
    if (tokens.grid == kE4M3Grid) return f(zero, FloatTokens<E4M3>{tokens.stored_as, tokens.above});
    if (tokens.grid == kE2M1Grid) return f(zero, FloatTokens<E2M1>{tokens.stored_as, tokens.above});
    const float half = static_cast<float>(1 << (tokens.grid - 1));
    f(zero, IntegerTokens{{-half, half - 1.0f}, tokens.symmetric});
  });
}

}  // namespace deepqat
