// What the clipped elements of a weight take from the gradients of its adapter, on the CPU alone.
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
#include <vector>

#include "dispatch.h"

namespace {

using at::Tensor;
using deepqat::load;

constexpr int64_t kAtOnce = 64;  // terms of a sum, each with an accumulator of its own

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

// A matrix [rows, columns] with its columns behind one another: column c begins at data[c * stride], and zeros stand behind
// its rows up to `length`. The stride is not the length, or columns could lie a power of two apart, where a cache holds only
// a few of them; for the same reason a tile is copied before it is turned over.
template <typename T>
struct Columns {
  int64_t length, stride;
  std::unique_ptr<T[]> data;

  Columns(const T* in, int64_t rows, int64_t columns)
      : length((rows + kAtOnce - 1) / kAtOnce * kAtOnce), stride(length + kAtOnce), data(new T[columns * stride]) {
    at::parallel_for(0, (columns + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile)
        for (int64_t row = 0; row < length; row += kTile) turn_over(in, rows, columns, tile * kTile, row);
    });
  }

  const T* column(int64_t i) const { return data.get() + i * stride; }

 private:
  static constexpr int64_t kTile = 64 / sizeof(T);  // a line of the cache

  void turn_over(const T* in, int64_t rows, int64_t columns, int64_t column, int64_t row) {
    T tile[kTile][kTile];
    const int64_t width = std::min(kTile, columns - column), height = std::min(kTile, rows - row);
    if (width < kTile || height < kTile) memset(tile, 0, sizeof tile);
    for (int64_t r = 0; r < height; ++r) memcpy(tile[r], in + (row + r) * columns + column, width * sizeof(T));
    for (int64_t c = 0; c < width; ++c) {
      T* const to = data.get() + (column + c) * stride + row;
      for (int64_t r = 0; r < kTile; ++r) to[r] = tile[r][c];
    }
  }
};

// The sum of a[i] * b[i] over n elements, a multiple of kAtOnce, in fp32 and in an order that depends on n alone.
template <typename T>
float product_of(const T* a, const T* b, int64_t n) {
  float sums[kAtOnce] = {};
  for (int64_t i = 0; i < n; i += kAtOnce)
#pragma GCC ivdep
    for (int64_t j = 0; j < kAtOnce; ++j) sums[j] += load(a[i + j]) * load(b[i + j]);
  for (int64_t half = kAtOnce / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
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

// Adds to of_a [in, rank] and of_b [out, rank]; grad [rows, out] and x [rows, in]. Each row of the weight is one thread's,
// and what its elements add to of_a is added in their order, so that no sum depends on the number of threads.
template <typename T>
void add_products(const Weight& w, const T* grad, const T* x, int64_t rows, float* of_a, float* of_b) {
  const Columns<T> of_grad(grad, rows, w.out), of_x(x, rows, w.in);
  std::vector<int64_t> ends(w.out + 1, 0);
  for (int64_t row = 0; row < w.out; ++row) {
    ends[row + 1] = ends[row];
    w.for_each_clipped_of(row, [&](int64_t) { ++ends[row + 1]; });
  }
  std::vector<float> found(ends[w.out]);
  at::parallel_for(0, w.out, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float *to = found.data() + ends[row], *sums = of_b + row * w.rank;
      w.for_each_clipped_of(row, [&](int64_t column) {
        const float g = product_of(of_grad.column(row), of_x.column(column), of_x.length);
        *to++ = g;
        for (int64_t k = 0; k < w.rank; ++k) sums[k] += g * w.a[column * w.rank + k];
      });
    }
  });
  const float* from = found.data();
  for (int64_t row = 0; row < w.out; ++row)
    w.for_each_clipped_of(row, [&](int64_t column) {
      const float g = *from++;
      for (int64_t k = 0; k < w.rank; ++k) of_a[column * w.rank + k] += g * w.b[row * w.rank + k];
    });
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
  const auto dtype = x.scalar_type() == at::kFloat      ? deepqat::Dtype::kFloat32
                     : x.scalar_type() == at::kBFloat16 ? deepqat::Dtype::kBFloat16
                                                        : deepqat::Dtype::kHalf;
  TORCH_CHECK(dtype != deepqat::Dtype::kHalf || x.scalar_type() == at::kHalf, "x is ", x.scalar_type());
  deepqat::with_dtype(dtype, [&](auto zero) {
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

}  // namespace

TORCH_LIBRARY_IMPL(deepqat, CPU, library) {
  library.impl("count_clipped", TORCH_FN(count_clipped));
  library.impl("clipped_products", TORCH_FN(clipped_products));
}
