// What adapters ask for on the CPU alone: the sum of a weight and its adapter (merge.h), and what the clipped elements of that
// sum take from the adapter's gradients.
//
// A merged weight's gradient G = grad.t() @ x is 0 where the sum is clipped. Of an adapter, B = lora_b [out, rank] and
// A = lora_a [rank, in], without a full-size G:
//
//   of B: (M o G) A.t() = grad.t() (x A.t()) - (C o G) A.t()      M: what is inside, C: what is clipped
//   of A: B.t() (M o G) = (grad B).t() x     - B.t() (C o G)
//
// The last terms need single elements of G, each a product of two columns over the rows. Here both operands are turned
// over once, so that these are sums over neighbours in memory: at a few clipped elements in a hundred, a fraction of the
// time of G. A GPU multiplies whole matrices on its tensor cores some fifty times as fast as it could do this.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "dispatch.h"
#include "merge.h"
#include "merge_bf16.h"

namespace {

using at::Tensor;
using deepqat::BFloat16;
using deepqat::load;

constexpr int64_t kAtOnce = 64;        // terms of a sum, each with an accumulator of its own
constexpr int64_t kRowsAtOnce = 256;  // of grad and x: turned over, they stay in the second cache

// Calls body(i) for the elements i of [begin, end) that the mask says are clipped, in order.
template <typename Body>
void for_each_clipped(const uint8_t* mask, int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  while (i < end) {
    if (i % 8 != 0 || i + 64 > end) {
      if ((mask[i / 8] >> (i % 8) & 1) == 0) body(i);
      ++i;
      continue;
    }
    uint64_t inside;
    memcpy(&inside, mask + i / 8, sizeof inside);
    if constexpr (std::endian::native == std::endian::big) inside = __builtin_bswap64(inside);
    for (uint64_t clipped = ~inside; clipped != 0; clipped &= clipped - 1) body(i + std::countr_zero(clipped));
    i += 64;
  }
}

// A line of a cache as numbers of some size, which the compiler takes apart where the processor has shorter registers.
using Halves = uint16_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));

// Of each 16 bytes of a and b the first half, or the second, with their numbers in turn.
#define DEEPQAT_HALVES(i) i, 32 + i, i + 1, 33 + i, i + 2, 34 + i, i + 3, 35 + i
#define DEEPQAT_WORDS(i) i, 16 + i, i + 1, 17 + i
template <int k>
Halves in_turn(Halves a, Halves b) {
  return __builtin_shufflevector(a, b, DEEPQAT_HALVES(4 * k), DEEPQAT_HALVES(8 + 4 * k), DEEPQAT_HALVES(16 + 4 * k),
                                 DEEPQAT_HALVES(24 + 4 * k));
}
template <int k>
Words in_turn(Words a, Words b) {
  return __builtin_shufflevector(a, b, DEEPQAT_WORDS(2 * k), DEEPQAT_WORDS(4 + 2 * k), DEEPQAT_WORDS(8 + 2 * k),
                                 DEEPQAT_WORDS(12 + 2 * k));
}
#undef DEEPQAT_HALVES
#undef DEEPQAT_WORDS

// Turns over the four square matrices that lie side by side in rows of 64 bytes: afterwards 16 bytes of rows[i] are column i
// of one of them. Each round takes the highest bit of an element's row and makes it the lowest of its column.
template <int kRows, typename Vector>
void turn_over_squares(Vector* rows) {
  for (int round = kRows; round > 1; round /= 2) {
    Vector next[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows / 2; ++i) {
      next[2 * i] = in_turn<0>(rows[i], rows[i + kRows / 2]);
      next[2 * i + 1] = in_turn<1>(rows[i], rows[i + kRows / 2]);
    }
    memcpy(rows, next, sizeof next);
  }
}

// Some rows of a matrix [rows, columns], with its columns behind one another: column c begins at data[c * stride], and zeros
// stand behind its rows up to `length`. The stride is not a power of two, or columns would lie where a cache holds only a few
// of them; for the same reason a tile is copied before it is turned over.
template <typename T>
struct Columns {
  int64_t columns, stride, length = 0;
  std::unique_ptr<T[]> data;

  // Memory for so many rows at most.
  Columns(int64_t columns, int64_t most)
      : columns(columns), stride((most + kAtOnce - 1) / kAtOnce * kAtOnce + kAtOnce), data(new T[columns * stride]) {}

  // Makes these the rows in memory from `in` on.
  void take(const T* in, int64_t rows) {
    length = (rows + kAtOnce - 1) / kAtOnce * kAtOnce;
    at::parallel_for(0, (columns + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile)
        for (int64_t row = 0; row < length; row += kTile) turn_over(in, rows, tile * kTile, row);
    });
  }

  const T* column(int64_t i) const { return data.get() + i * stride; }

 private:
  static constexpr int64_t kTile = 64 / sizeof(T);  // a line of the cache
  static constexpr int kSide = 16 / sizeof(T);
  using Vector = std::conditional_t<sizeof(T) == 2, Halves, Words>;

  void turn_over(const T* in, int64_t rows, int64_t column, int64_t row) {
    alignas(64) T tile[kTile][kTile];
    const int64_t width = std::min(kTile, columns - column), height = std::min(kTile, rows - row);
    if (width < kTile || height < kTile) memset(tile, 0, sizeof tile);
    for (int64_t r = 0; r < height; ++r) memcpy(tile[r], in + (row + r) * columns + column, width * sizeof(T));
    for (int64_t r = 0; r < kTile; r += kSide) {
      Vector turned[kSide];
      memcpy(turned, tile[r], sizeof turned);
      turn_over_squares<kSide>(turned);
      const auto* from = reinterpret_cast<const char*>(turned);
      for (int64_t c = 0; c < width; ++c)  // 16 bytes of a column
        memcpy(data.get() + (column + c) * stride + row + r, from + (c % kSide * 4 + c / kSide) * 16, 16);
    }
  }
};

constexpr int kTogether = 4;  // products of one column with so many others

// The sums of a[i] * b[k][i] over n elements, a multiple of kAtOnce, for some k, in fp32 and in an order that depends on n
// alone.
template <typename T>
void products_of(const T* a, const T* const* b, int64_t n, float* out) {
  for (int k = 0; k < kTogether; ++k) {
    float sums[kAtOnce] = {};
    for (int64_t i = 0; i < n; i += kAtOnce)
#pragma GCC ivdep
      for (int64_t j = 0; j < kAtOnce; ++j) sums[j] += load(a[i + j]) * load(b[k][i + j]);
    for (int64_t half = kAtOnce / 2; half > 0; half /= 2)
      for (int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
    out[k] = sums[0];
  }
}

#if defined(__AVX512F__)
// The same where the processor multiplies bf16 itself, two products at a time into each of 16 sums, which are then added
// for all k at once.
__attribute__((target("avx512bf16"))) void products_of_bf16(const BFloat16* a, const BFloat16* const* b, int64_t n,
                                                            float* out) {
  __m512 sums[kTogether] = {};
  for (int64_t i = 0; i < n; i += 32) {
    const auto one = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a + i));
#pragma GCC unroll 4
    for (int k = 0; k < kTogether; ++k)
      sums[k] = _mm512_dpbf16_ps(sums[k], one, reinterpret_cast<__m512bh>(_mm512_loadu_si512(b[k] + i)));
  }
  const auto halves = [](__m512 x, __m512 y) { return _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)); };
  const __m512d left = _mm512_castps_pd(halves(sums[0], sums[1])), right = _mm512_castps_pd(halves(sums[2], sums[3]));
  const __m512 of_all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  const __m256 both = _mm256_add_ps(_mm512_castps512_ps256(of_all), _mm512_extractf32x8_ps(of_all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
}

bool multiplies_bf16() { return __builtin_cpu_supports("avx512bf16"); }
#endif

template <typename T>
auto fastest_products() {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, BFloat16>)
    if (multiplies_bf16()) return &products_of_bf16;
#endif
  return &products_of<T>;
}

// One weight [out, in], whose mask begins at the element `first` of a larger one.
struct Weight {
  const uint8_t* mask;
  int64_t first, out, in, rank;
  const float* a;  // [in, rank]
  const float* b;  // [out, rank]

  template <typename Body>
  void for_each_clipped_of(int64_t row, Body body) const {
    const int64_t begin = first + row * in;
    for_each_clipped(mask, begin, begin + in, [&](int64_t i) { body(i - begin); });
  }
};

// Adds to found[ends[row]...] the elements of G that are clipped, in the order of a row, from some rows of grad and x.
template <typename T>
void add_elements(const Weight& w, const Columns<T>& of_grad, const Columns<T>& of_x, const int64_t* ends, float* found) {
  const auto products = fastest_products<T>();
  at::parallel_for(0, w.out, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* columns[kTogether];
      float *to = found + ends[row], sums[kTogether];
      int waiting = 0;
      const auto add = [&] {
        for (int k = waiting; k < kTogether; ++k) columns[k] = columns[0];
        products(of_grad.column(row), columns, of_x.length, sums);
        for (int k = 0; k < waiting; ++k) *to++ += sums[k];
        waiting = 0;
      };
      w.for_each_clipped_of(row, [&](int64_t column) {
        columns[waiting++] = of_x.column(column);
        if (waiting == kTogether) add();
      });
      if (waiting > 0) add();
    }
  });
}

// Adds to of_a [in, rank] and of_b [out, rank]; grad [rows, out] and x [rows, in]. Each row of the weight is one thread's,
// and what its elements add to of_a is added in their order, so that no sum depends on the number of threads.
template <typename T>
void add_products(const Weight& w, const T* grad, const T* x, int64_t rows, float* of_a, float* of_b) {
  std::vector<int64_t> ends(w.out + 1, 0);
  for (int64_t row = 0; row < w.out; ++row) {
    ends[row + 1] = ends[row];
    w.for_each_clipped_of(row, [&](int64_t) { ++ends[row + 1]; });
  }
  std::vector<float> found(ends[w.out], 0.0f);
  Columns<T> of_grad(w.out, std::min(rows, kRowsAtOnce)), of_x(w.in, std::min(rows, kRowsAtOnce));
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    of_grad.take(grad + first * w.out, std::min(kRowsAtOnce, rows - first));
    of_x.take(x + first * w.in, std::min(kRowsAtOnce, rows - first));
    add_elements(w, of_grad, of_x, ends.data(), found.data());
  }
  const float* from = found.data();
  for (int64_t row = 0; row < w.out; ++row)
    w.for_each_clipped_of(row, [&](int64_t column) {
      const float g = *from++;
      for (int64_t k = 0; k < w.rank; ++k) of_b[row * w.rank + k] += g * w.a[column * w.rank + k];
      for (int64_t k = 0; k < w.rank; ++k) of_a[column * w.rank + k] += g * w.b[row * w.rank + k];
    });
}

deepqat::Dtype dtype_of(const Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf, name, " is ",
              x.scalar_type());
  return x.scalar_type() == at::kFloat      ? deepqat::Dtype::kFloat32
         : x.scalar_type() == at::kBFloat16 ? deepqat::Dtype::kBFloat16
                                            : deepqat::Dtype::kHalf;
}

Tensor count_clipped(const Tensor& mask, int64_t numel) {
  TORCH_CHECK(mask.scalar_type() == at::kByte && mask.is_contiguous() && mask.numel() == (numel + 7) / 8, "a mask of ",
              mask.numel(), " bytes does not belong to ", numel, " elements");
  const auto* bits = mask.const_data_ptr<uint8_t>();
  int64_t count = 0;
  for_each_clipped(bits, 0, numel, [&](int64_t) { ++count; });
  return at::scalar_tensor(count, at::kLong);
}

// Shapes as in quant/kernels/ops.py.
std::tuple<Tensor, Tensor> clipped_products(const Tensor& grad_, const Tensor& x_, const Tensor& mask,
                                            const Tensor& lora_a, const Tensor& lora_b,
                                            const std::optional<Tensor>& offsets) {
  const Tensor grad = grad_.contiguous(), x = x_.contiguous();
  const int64_t rank = lora_a.size(-2), in = lora_a.size(-1), out = lora_b.size(-2);
  const int64_t experts = offsets.has_value() ? offsets->numel() : 1, rows = x.size(0);
  TORCH_CHECK(grad.scalar_type() == x.scalar_type() && grad.sizes() == at::IntArrayRef({rows, out}) && x.size(1) == in,
              "grad is ", grad.sizes(), " ", grad.scalar_type(), ", x ", x.sizes(), " ", x.scalar_type());
  TORCH_CHECK(lora_a.numel() == experts * rank * in && lora_b.numel() == experts * out * rank, "lora_a is ",
              lora_a.sizes(), ", lora_b ", lora_b.sizes(), " of ", experts, " weights");
  TORCH_CHECK(mask.scalar_type() == at::kByte && mask.is_contiguous() && mask.numel() == (experts * out * in + 7) / 8,
              "a mask of ", mask.numel(), " bytes does not belong to ", experts, " x ", out, " x ", in, " elements");
  const Tensor ends = offsets.has_value() ? offsets->to(at::kLong).contiguous() : at::full({1}, rows, at::kLong);
  const Tensor a = lora_a.to(at::kFloat).transpose(-2, -1).contiguous(), b = lora_b.to(at::kFloat).contiguous();
  Tensor of_a = at::zeros_like(a), of_b = at::zeros_like(b);
  deepqat::with_dtype(dtype_of(x, "x"), [&](auto zero) {
    using T = decltype(zero);
    const auto *all_grad = static_cast<const T*>(grad.const_data_ptr()), *all_x = static_cast<const T*>(x.const_data_ptr());
    int64_t begin = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t end = ends.const_data_ptr<int64_t>()[e];
      TORCH_CHECK(begin <= end && end <= rows, "expert ", e, " ends at row ", end, " of ", rows);
      const Weight weight{mask.const_data_ptr<uint8_t>(), e * out * in, out, in, rank,
                          a.const_data_ptr<float>() + e * in * rank, b.const_data_ptr<float>() + e * out * rank};
      if (begin < end)
        add_products(weight, all_grad + begin * out, all_x + begin * in, end - begin,
                     of_a.mutable_data_ptr<float>() + e * in * rank, of_b.mutable_data_ptr<float>() + e * out * rank);
      begin = end;
    }
  });
  return {of_a.transpose(-2, -1).contiguous(), of_b};
}

// Whether the sum was formed in bf16's own products (merge_bf16.h), of contiguous tensors whose shapes fit.
bool merge_bf16(const Tensor& weight, const Tensor& lora_a, const Tensor& lora_b, double scaling, Tensor& merged) {
#if defined(__AVX512F__)
  for (const Tensor& one : {weight, lora_a, lora_b})
    if (one.scalar_type() != at::kBFloat16) return false;
  if (!multiplies_bf16()) return false;
  const int64_t rank = lora_a.size(-2), in = weight.size(-1), out = weight.size(-2);
  const int64_t experts = weight.dim() == 3 ? weight.size(0) : 1;
  const auto of = [](const Tensor& one, int64_t first) { return static_cast<const BFloat16*>(one.const_data_ptr()) + first; };
  for (int64_t e = 0; e < experts; ++e) {
    const BFloat16 *a = of(lora_a, e * rank * in), *b = of(lora_b, e * out * rank), *w = of(weight, e * out * in);
    auto* to = static_cast<BFloat16*>(merged.mutable_data_ptr()) + e * out * in;
    const deepqat::cpu::Pairs pairs(a, b, scaling, rank, in, out);
    if (!pairs.fits) return false;
    at::parallel_for(0, out, 64, [&](int64_t begin, int64_t end) {
      deepqat::cpu::merge_rows_bf16(pairs, w, a, b, scaling, rank, begin, end, to);
    });
  }
  return true;
#else
  return false;
#endif
}

// Shapes as in quant/kernels/ops.py.
Tensor merge(const Tensor& weight_, const Tensor& lora_a, const Tensor& lora_b, double scaling) {
  const Tensor weight = weight_.contiguous();
  TORCH_CHECK(weight.dim() == 2 || weight.dim() == 3, "a weight is ", weight.sizes());
  const int64_t rank = lora_a.size(-2), in = weight.size(-1), out = weight.size(-2);
  const int64_t experts = weight.dim() == 3 ? weight.size(0) : 1;
  const auto stack = weight.sizes().slice(0, weight.dim() - 2);
  const auto fits = [&](const Tensor& one, int64_t rows, int64_t columns) {
    return one.dim() == weight.dim() && one.sizes().slice(0, stack.size()) == stack && one.size(-2) == rows &&
           one.size(-1) == columns;
  };
  TORCH_CHECK(fits(lora_a, rank, in) && fits(lora_b, out, rank), "lora_a is ", lora_a.sizes(), ", lora_b ",
              lora_b.sizes(), " of a weight ", weight.sizes());
  Tensor merged = at::empty_like(weight, at::MemoryFormat::Contiguous);
  if (merge_bf16(weight, lora_a.contiguous(), lora_b.contiguous(), scaling, merged)) return merged;
  const Tensor a = lora_a.to(at::kDouble).contiguous(), b = lora_b.to(at::kDouble).contiguous() * scaling;
  deepqat::with_dtype(dtype_of(weight, "a weight"), [&](auto zero) {
    using T = decltype(zero);
    for (int64_t e = 0; e < experts; ++e) {
      const auto *w = static_cast<const T*>(weight.const_data_ptr()) + e * out * in;
      auto* to = static_cast<T*>(merged.mutable_data_ptr()) + e * out * in;
      const double *of_a = a.const_data_ptr<double>() + e * rank * in, *of_b = b.const_data_ptr<double>() + e * out * rank;
      at::parallel_for(0, out, 64, [&](int64_t begin, int64_t end) {
        deepqat::cpu::merge_rows(w, of_a, of_b, in, rank, begin, end, to);
      });
    }
  });
  return merged;
}

}  // namespace

TORCH_LIBRARY_IMPL(deepqat, CPU, library) {
  library.impl("count_clipped", TORCH_FN(count_clipped));
  library.impl("clipped_products", TORCH_FN(clipped_products));
  library.impl("merge", TORCH_FN(merge));
}
