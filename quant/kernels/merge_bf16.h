// The sum of merge.h where the processor multiplies bf16 itself: in fp32, and in fp64 only where fp32 does not say what to
// round to. The result is that of merge.h, bit for bit.
//
// bf16 has 8 bits, so that the error of a sum in fp32, of which a bound is known, hardly ever reaches from one side of a
// rounding to the other. Where r - error and r + error are rounded to the same number, this is what the exact sum is rounded
// to, and so what the sum in fp64 is.

#pragma once

#if defined(__AVX512F__)

#include <bit>
#include <cmath>
#include <vector>

#include "merge.h"

namespace deepqat::cpu {
namespace {

// One adapter, as vpdpbf16ps takes it: pairs of neighbours along the rank, which are filled up to an even number with zeros.
struct Pairs {
  int64_t pairs, in;
  std::vector<uint32_t> a;              // [pairs, in]
  std::vector<uint32_t> b;              // [out, pairs]
  std::vector<float> norm_a, norm_b;    // of each column of A, and of each row of B, times the factor
  float scaling, per_norm;
  bool fits = true;

  Pairs(const BFloat16* lora_a, const BFloat16* lora_b, double factor, int64_t rank, int64_t in, int64_t out)
      : pairs((rank + 1) / 2), in(in), a(pairs * in), b(out * pairs), norm_a(in), norm_b(out),
        scaling(static_cast<float>(factor)) {
    // A sum of n products that are rounded one by one is off by n halves of a last bit of the sum of their magnitudes, which
    // Cauchy and Schwarz bound by the norms; the factor, its product and this arithmetic add a few. Twice that, for
    // processors that round on the way.
    per_norm = std::ldexp(2.0f * static_cast<float>(rank) + 16.0f, -24);
    const auto half = [](BFloat16 x) { return static_cast<uint32_t>(x.bits); };
    std::vector<double> squares(in, 0.0);  // in fp64 none underflows
    for (int64_t k = 0; k < rank; ++k)
      for (int64_t j = 0; j < in; ++j) {
        a[k / 2 * in + j] |= half(lora_a[k * in + j]) << (k % 2 * 16);
        const double one = load(lora_a[k * in + j]);
        squares[j] += one * one;
      }
    for (int64_t j = 0; j < in; ++j) {
      norm_a[j] = static_cast<float>(std::sqrt(squares[j]));
      fits &= norm_a[j] <= kLargest;  // nor is it a NaN
    }
    for (int64_t i = 0; i < out; ++i) {
      double sum = 0.0;
      for (int64_t k = 0; k < rank; ++k) {
        b[i * pairs + k / 2] |= half(lora_b[i * rank + k]) << (k % 2 * 16);
        const double one = load(lora_b[i * rank + k]);
        sum += one * one;
      }
      norm_b[i] = static_cast<float>(std::sqrt(sum) * std::fabs(factor));
      if (sum > 0.0) norm_b[i] = std::max(norm_b[i], 0x1p-100f);  // 0 is of a row of zeros alone
      fits &= norm_b[i] <= kLargest;
    }
    fits &= std::fabs(scaling) <= kLargest && std::fabs(scaling) >= 1.0f / kLargest;
  }

 private:
  // Below it what the processor takes for 0, as numbers less than 2^-126, adds up to less than kTiny.
  static constexpr float kLargest = 0x1p20f;
};

constexpr float kTiny = 0x1p-70f;
constexpr int kNaNOrDenormal = 0x01 | 0x20 | 0x80;  // what is not rounded as elsewhere

// Columns [column, column + 32) of kRows rows of a weight; which of the rows, a bit each, are to be summed in fp64.
template <int kRows>
__attribute__((target("avx512bf16"))) unsigned merge_tile_bf16(const Pairs& of, int64_t column, int64_t row,
                                                               const BFloat16* w, BFloat16* out) {
  __m512 sums[kRows][2] = {};
  const uint32_t *a = of.a.data() + column, *b = of.b.data() + row * of.pairs;
  for (int64_t k = 0; k < of.pairs; ++k) {
    const auto left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a + k * of.in));
    const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a + k * of.in + 16));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(b[r * of.pairs + k])));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, left);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, right);
    }
  }
  unsigned unclear = 0;
  const __m512 scaling = _mm512_set1_ps(of.scaling), per_weight = _mm512_set1_ps(0x1p-22f);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float norm = of.norm_b[row + r];
    const __m512 per_column = _mm512_set1_ps(norm * of.per_norm), tiny = _mm512_set1_ps(norm == 0.0f ? 0.0f : kTiny);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const int64_t at = (row + r) * of.in + column + 16 * v;
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + at));
      const __m512 weight = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      const __m512 sum = _mm512_fmadd_ps(scaling, sums[r][v], weight);
      const __m512 norms = _mm512_loadu_ps(of.norm_a.data() + column + 16 * v);
      const __m512 size = _mm512_abs_ps(weight);
      const __m512 error = _mm512_fmadd_ps(size, per_weight, _mm512_fmadd_ps(norms, per_column, tiny));
      const auto low = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_sub_ps(sum, error)));
      const auto high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(sum, error)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), low);
      if ((_mm256_cmpneq_epi16_mask(low, high) | _mm512_fpclass_ps_mask(sum, kNaNOrDenormal)) != 0) unclear |= 1u << r;
    }
  }
  return unclear;
}

// Rows [begin, end) of one weight [out, in] with lora_a [rank, in] and lora_b [out, rank], which fit.
__attribute__((target("avx512bf16"))) void merge_rows_bf16(const Pairs& of, const BFloat16* w, const BFloat16* lora_a,
                                                           const BFloat16* lora_b, double factor, int64_t rank, int64_t begin,
                                                           int64_t end, BFloat16* out) {
  constexpr int kRows = 4;
  static_assert(kTile == 32);
  const int64_t in = of.in;
  std::vector<Numbers> tile(rank * kVectors);
  std::vector<double> b(rank);
  for (int64_t column = 0; column < in; column += kTile) {
    const int64_t width = std::min(kTile, in - column);
    bool known = false;
    const auto in_fp64 = [&](int64_t row) {
      if (!known) {
        std::fill(tile.begin(), tile.end(), Numbers{});
        auto* to = reinterpret_cast<double*>(tile.data());
        for (int64_t k = 0; k < rank; ++k)
          for (int64_t j = 0; j < width; ++j) to[k * kTile + j] = load(lora_a[k * in + column + j]);
        known = true;
      }
      for (int64_t k = 0; k < rank; ++k) b[k] = load(lora_b[row * rank + k]) * factor;
      merge_tile<1>(tile.data(), b.data(), rank, w + row * in + column, out + row * in + column, in, width);
    };
    int64_t row = begin;
    for (; width == kTile && row + kRows <= end; row += kRows)
      for (unsigned unclear = merge_tile_bf16<kRows>(of, column, row, w, out); unclear != 0; unclear &= unclear - 1)
        in_fp64(row + std::countr_zero(unclear));
    for (; row < end; ++row) in_fp64(row);
  }
}

}  // namespace
}  // namespace deepqat::cpu

#endif
