// Arithmetic of fake quantization, one value at a time, shared by the CPU and CUDA kernels.
//
// Equals quant/reference.py bit for bit (for exp(theta) see `exponential`). Both compilers must be told not to contract
// a*b+c into one rounding (-ffp-contract=off, --fmad=false), or the two backends differ in the last bit.
//
//     v = x * (1/s)                          fp32
//     e4m3   Q(v) = nearest e4m3 value, ties to even, saturated at +-448;   inside: |v| <= 464
//     e2m1   Q(v) = nearest e2m1 value, ties to even, saturated at +-6;     inside: |v| < 7
//     int    Q(v) = clamp(round(v), qmin, qmax), ties to even;              inside: qmin <= round(v) <= qmax
//     int with a zero point z   Q(v) = clamp(round(v) + z, qmin, qmax) - z; inside: qmin <= round(v) + z <= qmax
//
// NaN stays NaN and is outside; infinities clip.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define DEEPQAT_INLINE __host__ __device__ __forceinline__
#else
#define DEEPQAT_INLINE inline __attribute__((always_inline))
#endif

namespace deepqat {

DEEPQAT_INLINE uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

DEEPQAT_INLINE float float_of(uint32_t b) {
  float x;
  memcpy(&x, &b, sizeof x);
  return x;
}

DEEPQAT_INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

DEEPQAT_INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

DEEPQAT_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

DEEPQAT_INLINE float with_sign_of(float size, float x) { return float_of(bits_of(size) | (bits_of(x) & 0x80000000u)); }

// ---- storage types: elements in memory, and their conversion to fp32 and back (nearest, ties to even)

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

DEEPQAT_INLINE float load(float x) { return x; }

DEEPQAT_INLINE float load(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

DEEPQAT_INLINE float load(Half x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  _Float16 half;
  memcpy(&half, &x.bits, sizeof half);
  return static_cast<float>(half);
#endif
}

DEEPQAT_INLINE void store(float x, float* out) { *out = x; }

DEEPQAT_INLINE void store(float x, BFloat16* out) {
  const uint32_t b = bits_of(x);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  // For a NaN the addition could carry into the sign, or result in an infinity.
  out->bits = static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

DEEPQAT_INLINE void store(float x, Half* out) {
#if defined(__CUDA_ARCH__)
  out->bits = __half_as_ushort(__float2half_rn(x));
#else
  const _Float16 half = static_cast<_Float16>(x);
  memcpy(&out->bits, &half, sizeof out->bits);
#endif
}

// x rounded to T.
template <typename T>
DEEPQAT_INLINE float rounded_to(float x) {
  T stored;
  store(x, &stored);
  return load(stored);
}

// A scale rounded to T. For Half its magnitude is first clamped to 2^-24 to 65504, or NaN if not finite: a stored scale
// must not be 0 or infinite.
template <typename T>
DEEPQAT_INLINE float stored_scale(float x) {
  if constexpr (std::is_same_v<T, Half>) {
    const uint32_t size = bits_of(x) & 0x7fffffffu;
    if (size >= 0x7f800000u) return float_of(0x7fc00000u);
    x = with_sign_of(float_of(smaller(larger(size, 0x33800000u), 0x477fe000u)), x);
  }
  return rounded_to<T>(x);
}

// Power of two nearest to a scale by its logarithm, from 2^-127 (a subnormal number) to 2^127. sqrt(2) is between
// 0x3fb504f3 and the next number, sqrt(2) * 2^-127 just below 0x5a827a.
DEEPQAT_INLINE float power_of_two(float s) {
  const uint32_t b = bits_of(s), size = b & 0x7fffffffu;
  const uint32_t normal = smaller((size + (0x00800000u - 0x003504f4u)) & 0x7f800000u, 0x7f000000u);
  const uint32_t power = size < 0x00800000u ? (size < 0x005a827au ? 0x00400000u : 0x00800000u) : normal;
  return float_of(size >= 0x7f800000u || (b != size && size != 0u) ? 0x7fc00000u : power);
}

// x if `inside`, else 0, without a branch.
DEEPQAT_INLINE float kept(float x, bool inside) { return float_of(bits_of(x) & (inside ? 0xffffffffu : 0u)); }

DEEPQAT_INLINE BFloat16 kept(BFloat16 x, bool inside) {
  return BFloat16{static_cast<uint16_t>(x.bits & (inside ? 0xffffu : 0u))};
}

DEEPQAT_INLINE Half kept(Half x, bool inside) {
  return Half{static_cast<uint16_t>(x.bits & (inside ? 0xffffu : 0u))};
}

// dx, but NaN if v is NaN or an infinity.
template <typename T>
DEEPQAT_INLINE T nan_unless_finite(T dx, float v) {
  T nan;
  store(float_of(0x7fc00000u), &nan);
  return (bits_of(v) & 0x7f800000u) == 0x7f800000u ? nan : dx;
}

// ---- scales

// e^x in double, to about 1 ulp: x = k ln2 + r, |r| <= ln2 / 2, and the Taylor series of e^r up to r^13 (remainder
// below 5e-18). Not libm's, as the last bit differs between libraries; rounded to fp32, all of them agree with it
// except for one in some 2^28 arguments. Beyond +-200 an fp32 result is 0 or infinite anyway.
DEEPQAT_INLINE double exponential(double x) {
  x = x > 200.0 ? 200.0 : x;  // these comparisons keep a NaN
  x = x < -200.0 ? -200.0 : x;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
  const double shifted = x * 1.4426950408889634 + magic;
  const double k = shifted - magic;
  const double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;  // ln2, in two parts
  double sum = 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  uint64_t low;
  memcpy(&low, &shifted, sizeof low);
  const uint64_t power = (low + 1023u) << 52;  // the exponent bits of 2^k; higher bits are shifted out
  double two_to_k;
  memcpy(&two_to_k, &power, sizeof two_to_k);
  return sum * two_to_k;
}

DEEPQAT_INLINE float learned_factor(float theta) { return static_cast<float>(exponential(static_cast<double>(theta))); }

// ---- grids

// Floating-point grid with a sign bit, kMantissa bits of mantissa and 2^kSmallest as its smallest normal number; up to
// twice that number its spacing is 2^(kSmallest - kMantissa). kInside: bits of the largest magnitude that, on a grid
// without an end, rounds to at most kLargest. A code has kBits bits, stored in a byte. Every member is a function of
// v = x / s alone. at(z) is the grid of a run with the zero point z, used by integers only (kShifted).
template <int kWidth, int kMantissa, int kSmallest, int kLargest, uint32_t kInside, int kNaN>
struct MiniFloat {
  using Code = uint8_t;
  static constexpr int kBits = kWidth;
  static constexpr bool kShifted = false;
  static constexpr float kMax = static_cast<float>(kLargest);
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr int kHidden = 23 - kMantissa;  // bits of an fp32 mantissa beyond the grid's
  // Bits of the smallest normal number, of the spacing below it, and of the power of two with this spacing.
  static constexpr uint32_t kNormal = static_cast<uint32_t>(127 + kSmallest) << 23;
  static constexpr uint32_t kSpacing = static_cast<uint32_t>(127 + kSmallest - kMantissa) << 23;
  static constexpr uint32_t kRounder = static_cast<uint32_t>(127 + kSmallest + kHidden) << 23;

  DEEPQAT_INLINE MiniFloat at(float) const { return *this; }

  // Magnitudes are compared by their bits: as integers these have the same order, with NaNs at the end, and a minimum
  // of integers is one instruction everywhere.

  // Bits of the magnitude of v, at most those of kLargest (also for a NaN).
  DEEPQAT_INLINE uint32_t saturated(float v) const {
    return smaller(bits_of(v) & 0x7fffffffu, bits_of(static_cast<float>(kLargest)));
  }

  // Bits of the power of two whose fp32 spacing is the grid's at the magnitude `a`: adding it rounds `a` to the grid.
  DEEPQAT_INLINE uint32_t rounder(uint32_t a) const {
    return larger((a & 0x7f800000u) + (static_cast<uint32_t>(kHidden) << 23), kRounder);
  }

  DEEPQAT_INLINE float round(float v) const {
    const uint32_t a = saturated(v);
    const float c = float_of(rounder(a));
    const float rounded = with_sign_of((float_of(a) + c) - c, v);
    return v != v ? v : rounded;
  }

  DEEPQAT_INLINE bool inside(float v) const { return (bits_of(v) & 0x7fffffffu) <= kInside; }

  // d fq / d s with `rounded` = round(v). quant/reference.py explains the 0 for normal numbers inside the range.
  DEEPQAT_INLINE float scale_term(float v, float rounded) const {
    const float a = magnitude(v);
    const float below = a < float_of(kNormal) ? rounded - v : 0.0f;
    return a > static_cast<float>(kLargest) ? rounded : below;  // false for a NaN
  }

  // The code of round(v): relative to the rounder, the bits of the sum count steps of the grid; the rounder itself adds
  // 2^kMantissa codes per power of two.
  DEEPQAT_INLINE Code quantized(float v) const {
    const uint32_t a = saturated(v), c = rounder(a);
    uint32_t code = bits_of(float_of(a) + float_of(c)) - c + ((c - kRounder) >> kHidden);
    code |= (bits_of(v) >> (32 - kBits)) & kSign;
    return static_cast<Code>(v != v ? static_cast<uint32_t>(kNaN) : code);
  }

  DEEPQAT_INLINE float decode(Code code) const {
    const uint32_t a = code & (kSign - 1u);
    const float normal = float_of((a << kHidden) + kNormal - (1u << 23));
    const float subnormal = static_cast<float>(static_cast<int32_t>(a)) * float_of(kSpacing);
    float value = a < (1u << kMantissa) ? subnormal : normal;
    if constexpr (kNaN != 0) value = a == static_cast<uint32_t>(kNaN) ? float_of(0x7fc00000u) : value;
    return with_sign_of(value, float_of(static_cast<uint32_t>(code & kSign) << (32 - kBits)));
  }
};

// 0x43e80000 is 464, halfway to 480, whose code e4m3 uses for NaN; the tie goes to the even 448.
using E4M3 = MiniFloat<8, 3, -6, 448, 0x43e80000u, 0x7f>;
// 0x40dfffff is the number below 7, halfway to 8, to which the tie goes. Without a NaN: its code is 0.
using E2M1 = MiniFloat<4, 1, 0, 6, 0x40dfffffu, 0>;

// A scale rounded to a nonzero e4m3 number below a global scale.
DEEPQAT_INLINE float below_global(float s, float above) {
  float code = s * above;
  code = code < 0x1p-9f ? 0x1p-9f : code;  // this comparison keeps a NaN
  const float value = E4M3{}.round(code) / above;
  return s - s == 0.0f ? value : float_of(0x7fc00000u);
}

struct Integer {
  using Code = int8_t;
  static constexpr bool kShifted = false;
  float qmin, qmax;

  DEEPQAT_INLINE Integer at(float) const { return *this; }

  DEEPQAT_INLINE float round(float v) const {
    float rounded = rintf(v);
    rounded = rounded < qmin ? qmin : rounded;  // these comparisons keep a NaN
    return rounded > qmax ? qmax : rounded;
  }

  DEEPQAT_INLINE bool inside(float v) const { return rintf(v) == round(v); }  // a NaN equals nothing

  DEEPQAT_INLINE float scale_term(float v, float rounded) const {
    const float term = rintf(v) == rounded ? rounded - v : rounded;
    return rounded != rounded ? 0.0f : term;  // for a NaN
  }

  DEEPQAT_INLINE Code quantized(float v) const {
    const float rounded = round(v);
    return static_cast<Code>(static_cast<int32_t>(rounded != rounded ? 0.0f : rounded));
  }

  DEEPQAT_INLINE float decode(Code code) const { return static_cast<float>(code); }
};

// Integers with a zero point: code q decodes to q - zero_point.
struct ShiftedInteger {
  using Code = int8_t;
  Integer codes;
  float zero_point;

  DEEPQAT_INLINE float shifted(float v) const { return rintf(v) + zero_point; }

  DEEPQAT_INLINE float round(float v) const { return codes.round(shifted(v)) - zero_point; }

  DEEPQAT_INLINE bool inside(float v) const { return codes.inside(shifted(v)); }

  DEEPQAT_INLINE float scale_term(float v, float rounded) const { return codes.scale_term(v, rounded); }

  DEEPQAT_INLINE Code quantized(float v) const { return codes.quantized(shifted(v)); }

  DEEPQAT_INLINE float decode(Code code) const { return codes.decode(code) - zero_point; }
};

// Integers of weights, with a zero point per run.
struct ShiftedIntegers {
  using Code = int8_t;
  static constexpr bool kShifted = true;
  Integer codes;

  DEEPQAT_INLINE ShiftedInteger at(float zero_point) const { return {codes, zero_point}; }
};

}  // namespace deepqat
