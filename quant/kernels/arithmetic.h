// The arithmetic of fake quantisation, one value at a time, for the CPU and CUDA kernels alike.
//
// quant/reference.py is the definition; these functions give its results bit for bit (see `exponential` for exp(theta)). Both compilers must be told not to
// contract a*b+c into one rounding (-ffp-contract=off, --fmad=false), or the two backends part ways in the last bit.
//
//     v = x * (1/s)                          fp32
//     e4m3   Q(v) = nearest e4m3 value, ties to even, saturated at +-448;   inside: |v| <= 464
//     int    Q(v) = clamp(round(v), qmin, qmax), ties to even;              inside: qmin <= round(v) <= qmax
//
// NaN stays NaN and is outside; infinities clip.

#pragma once

#include <cstdint>
#include <cstring>

#include <cmath>

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

DEEPQAT_INLINE float with_sign_of(float size, float x) { return float_of(bits_of(size) | (bits_of(x) & 0x80000000u)); }

// ---- storage types: what a tensor's elements are in memory, and how they become fp32 and back (nearest, ties to even)

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
  // The addition would carry a NaN into the sign, or leave it an infinity.
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

// The value that x has once it is stored as T.
template <typename T>
DEEPQAT_INLINE float rounded_to(float x) {
  T stored;
  store(x, &stored);
  return load(stored);
}

// x where `inside`, else 0, without a branch.
DEEPQAT_INLINE float kept(float x, bool inside) { return float_of(bits_of(x) & (inside ? 0xffffffffu : 0u)); }

DEEPQAT_INLINE BFloat16 kept(BFloat16 x, bool inside) {
  return BFloat16{static_cast<uint16_t>(x.bits & (inside ? 0xffffu : 0u))};
}

DEEPQAT_INLINE Half kept(Half x, bool inside) {
  return Half{static_cast<uint16_t>(x.bits & (inside ? 0xffffu : 0u))};
}

// ---- scales

// e^x in double, to about 1 ulp: x = k ln2 + r, |r| <= ln2 / 2, and the Taylor series of e^r up to r^13 (its rest is
// below 5e-18). Our own because every libm has its own last bit; rounded to fp32 it agrees with all of them except once
// in some 2^28 arguments. Beyond +-200 an fp32 result is 0 or infinite anyway.
DEEPQAT_INLINE double exponential(double x) {
  x = x > 200.0 ? 200.0 : x;  // comparisons that let a NaN pass
  x = x < -200.0 ? -200.0 : x;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, held in the low bits
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
  const uint64_t power = (low + 1023u) << 52;  // the exponent bits of 2^k; what is above them falls off
  double two_to_k;
  memcpy(&two_to_k, &power, sizeof two_to_k);
  return sum * two_to_k;
}

DEEPQAT_INLINE float learned_factor(float theta) { return static_cast<float>(exponential(static_cast<double>(theta))); }

// ---- grids

constexpr float kE4M3Max = 448.0f;
constexpr float kE4M3RoundsToMax = 464.0f;  // halfway to 480, whose code e4m3 gives up for NaN
constexpr float kE4M3SmallestNormal = 0.015625f;  // 2^-6; below it, and up to twice that, the spacing is 2^-9

// One grid. Every member is a function of v = x / s alone.
struct E4M3 {
  using Code = uint8_t;

  // The power of two whose spacing is e4m3's at `a` <= 448: adding it rounds `a` to the grid.
  DEEPQAT_INLINE float rounder(float a) const {
    const float normal = float_of((bits_of(a) & 0x7f800000u) + (20u << 23));
    return normal < 16384.0f ? 16384.0f : normal;  // 2^14 has a spacing of 2^-9, that of the subnormal numbers
  }

  DEEPQAT_INLINE float round(float v) const {
    float a = magnitude(v);
    a = a > kE4M3Max ? kE4M3Max : a;
    const float c = rounder(a);
    const float rounded = with_sign_of((a + c) - c, v);
    return v != v ? v : rounded;
  }

  DEEPQAT_INLINE bool inside(float v) const { return magnitude(v) <= kE4M3RoundsToMax; }

  // d fq / d s, where `rounded` is round(v). See quant/reference.py for why it is 0 for normal numbers.
  DEEPQAT_INLINE float scale_term(float v, float rounded) const {
    const float a = magnitude(v);
    const float below = a < kE4M3SmallestNormal ? rounded - v : 0.0f;
    return a > kE4M3RoundsToMax ? rounded : below;  // a NaN is neither
  }

  // The code of round(v): the sum counts in steps of the grid from the rounder on, which itself stands at 8 codes per
  // power of two.
  DEEPQAT_INLINE Code quantized(float v) const {
    float a = magnitude(v);
    a = a > kE4M3Max ? kE4M3Max : a;
    const uint32_t c = bits_of(rounder(a));
    uint32_t code = bits_of(a + float_of(c)) - c + (c >> 20) - (141u << 3);
    code = v != v ? 0x7fu : code | ((bits_of(v) >> 24) & 0x80u);
    return static_cast<Code>(code);
  }

  DEEPQAT_INLINE float decode(Code code) const {
    const uint32_t a = code & 0x7fu;
    const float normal = float_of((a << 20) + (120u << 23));
    const float subnormal = static_cast<float>(static_cast<int32_t>(a)) * 0.001953125f;
    float value = a < 8u ? subnormal : normal;
    value = a == 0x7fu ? float_of(0x7fc00000u) : value;
    return with_sign_of(value, float_of(static_cast<uint32_t>(code & 0x80u) << 24));
  }
};

struct Integer {
  using Code = int8_t;
  float qmin, qmax;

  DEEPQAT_INLINE float round(float v) const {
    float rounded = rintf(v);
    rounded = rounded < qmin ? qmin : rounded;  // comparisons that let a NaN pass
    return rounded > qmax ? qmax : rounded;
  }

  DEEPQAT_INLINE bool inside(float v) const { return rintf(v) == round(v); }  // a NaN equals nothing

  DEEPQAT_INLINE float scale_term(float v, float rounded) const {
    const float term = rintf(v) == rounded ? rounded - v : rounded;
    return v != v ? 0.0f : term;
  }

  DEEPQAT_INLINE Code quantized(float v) const {
    const float rounded = round(v);
    return static_cast<Code>(static_cast<int32_t>(rounded != rounded ? 0.0f : rounded));
  }

  DEEPQAT_INLINE float decode(Code code) const { return static_cast<float>(code); }
};

// ---- int8 per token, dynamic

// Scale and zero point of one token whose values span [lowest, highest], 0 included. A token that holds a NaN or an
// infinity has no scale: NaN, and so are all its fake-quantised values.
struct TokenGrid {
  float scale, inverse, zero_point;

  DEEPQAT_INLINE TokenGrid(float lowest, float highest, bool symmetric) {
    const float absmax = -lowest > highest ? -lowest : highest;
    const float range = symmetric ? absmax + absmax : highest - lowest;
    scale = range / 255.0f;
    scale = scale < 1.17549435e-38f ? 1.0f : scale;  // of nothing but zeros
    scale = scale - scale == 0.0f ? scale : float_of(0x7fc00000u);
    inverse = 1.0f / scale;
    const float unclamped = -128.0f - rintf(lowest * inverse);
    zero_point = unclamped < -128.0f ? -128.0f : unclamped > 127.0f ? 127.0f : unclamped;
    zero_point = symmetric || scale != scale ? 0.0f : zero_point;
  }

  DEEPQAT_INLINE float shifted(float x) const { return rintf(x * inverse) + zero_point; }

  DEEPQAT_INLINE bool inside(float x) const {
    const float q = shifted(x);
    return (q >= -128.0f) & (q <= 127.0f);  // without a branch
  }

  DEEPQAT_INLINE float quantized(float x) const {
    const float q = shifted(x);
    return q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q;
  }

  DEEPQAT_INLINE int8_t encode(float x) const {
    const float q = quantized(x);
    return static_cast<int8_t>(static_cast<int32_t>(q != q ? 0.0f : q));
  }

  DEEPQAT_INLINE float fake_quantized(float x) const { return (quantized(x) - zero_point) * scale; }
};

}  // namespace deepqat
