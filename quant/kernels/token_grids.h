// Dynamic grids, of one token each or of a group of its features, shared by the CPU and CUDA kernels.

#pragma once

#include "arithmetic.h"
#include "kernels.h"

namespace deepqat {

// Scale and grid of one token. With a NaN or an infinity, its scale and all its fake-quantized values are NaN.
template <typename G>
struct Token {
  G grid;
  float scale, inverse;
};

DEEPQAT_INLINE float token_scale(float range, float steps) {
  const float scale = range / steps;
  const float usable = scale < 1.17549435e-38f ? 1.0f : scale;  // all zeros
  return usable - usable == 0.0f ? usable : float_of(0x7fc00000u);
}

DEEPQAT_INLINE float largest_of(float lowest, float highest) { return -lowest > highest ? -lowest : highest; }

// Smallest power of two with absmax / scale <= largest; 1 if that is below 2^-126.
DEEPQAT_INLINE float smallest_power_of_two(float absmax, float largest) {
  const uint32_t a = bits_of(absmax), l = bits_of(largest);
  const int32_t above = (a & 0x007fffffu) > (l & 0x007fffffu) ? 1 : 0;
  const int32_t exponent = static_cast<int32_t>(a >> 23) - static_cast<int32_t>(l >> 23) + 127 + above;
  const uint32_t usable = exponent < 1 ? 127u << 23 : static_cast<uint32_t>(exponent) << 23;
  return float_of(a >= 0x7f800000u ? 0x7fc00000u : usable);
}

// Scale of NVFP4 inputs with largest magnitude absmax: an e4m3 number, 1/8 for 0, below a global scale.
DEEPQAT_INLINE float below_global_of(float absmax, float above) {
  const float code = E4M3{}.round(absmax / 6.0f * above);
  return (code == 0.0f ? 0.125f : code) / above;
}

// Factories of the tokens' grids; token(lowest, highest) is the grid of a token whose values span this range, extended
// to 0. kShort: groups of at most kShortToken features.
template <typename G>
struct FloatTokens {
  using Grid = G;
  static constexpr bool kShort = G::kBits == 4, kCentred = true;
  Stored stored_as;
  const float* above;

  DEEPQAT_INLINE Token<Grid> token(float lowest, float highest) const {
    const float absmax = largest_of(lowest, highest);
    float scale = token_scale(absmax, Grid::kMax);
    if (stored_as == Stored::kE8M0) scale = smallest_power_of_two(absmax, Grid::kMax);
    if (stored_as == Stored::kE4M3) scale = below_global_of(absmax, *above);
    return {Grid{}, scale, 1.0f / scale};
  }
};

struct IntegerTokens {
  using Grid = ShiftedInteger;
  static constexpr bool kShort = false, kCentred = false;
  Integer codes;
  bool symmetric;

  DEEPQAT_INLINE Token<Grid> token(float lowest, float highest) const {
    const float steps = codes.qmax - codes.qmin;
    if (symmetric) return of_scale(token_scale(largest_of(lowest, highest), 0.5f * steps), 0.0f);
    const float scale = token_scale(highest - lowest, steps);
    const float zero_point = codes.round(codes.qmin - rintf(lowest * (1.0f / scale)));
    return of_scale(scale, scale == scale ? zero_point : 0.0f);
  }

  DEEPQAT_INLINE Token<Grid> of_scale(float scale, float zero_point) const {
    return {{codes, zero_point}, scale, 1.0f / scale};
  }
};

// Two codes of four bits in a byte, the first in the low bits.
DEEPQAT_INLINE uint8_t pair_of(uint32_t first, uint32_t second) { return static_cast<uint8_t>(first | second << 4); }

// Store a token's scale: as fp32, as the exponent of a power of two, or for NVFP4 as the e4m3 code of scale times global
// scale.
DEEPQAT_INLINE void store_scale(float scale, const Tokens& tokens, int64_t token, void* scales) {
  auto* bytes = static_cast<uint8_t*>(scales);
  if (tokens.stored_as == Stored::kE8M0) {
    bytes[token] = static_cast<uint8_t>(scale != scale ? 0xffu : bits_of(scale) >> 23);
  } else if (tokens.stored_as == Stored::kE4M3) {
    bytes[token] = E4M3{}.quantized(scale * *tokens.above);
  } else {
    static_cast<float*>(scales)[token] = scale;
  }
}

}  // namespace deepqat
