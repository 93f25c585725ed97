// Operations of the CUDA kernels on elements, apart from the loops. An operation is a struct with
//
//     In                             eight neighboring elements of the input, as loaded
//     load<kWide>(i, n)              load n elements at i, i + 1, ...
//     apply<kWide>(in, i, n, ...)    compute and store the results
//     take_run(run, scales)          optional: store a result per run

#pragma once

#include "scales.h"

namespace deepqat::cuda {

// ---- operations on elements

// Base of operations that read x alone.
template <typename T>
struct ReadsX {
  using In = Vector<T>;
  const T* x;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return load_vector<kWide>(x + i, n);
  }
};

// Bit mask of the condition for eight elements: element j at bit j.
template <typename Condition>
DEEPQAT_DEVICE uint32_t bits_where(const Condition& condition) {
  uint32_t bits = 0;
  unrolled<kVector>([&](int j) { bits |= condition(j) ? 1u << j : 0u; });
  return bits;
}

constexpr uint32_t kAllOfThem = (1u << kVector) - 1;

// Zero the elements of a gradient whose bit is 0, in place: eight gradients without a 0 are neither read nor written.
template <bool kWide, typename T>
DEEPQAT_DEVICE void keep_where(uint32_t bits, T* grad, int n) {
  if (bits == kAllOfThem) return;
  store_vector<kWide>(kept(load_vector<kWide>(grad, n), [&](int j) { return (bits >> j & 1u) != 0; }), grad, n);
}

template <typename T, typename G>
struct Quantize : ReadsX<T> {
  static constexpr bool kScaled = true, kShifted = G::kShifted;
  typename G::Code* codes;
  uint8_t* mask;
  T* values;
  G grid;
  float* effective;

  DEEPQAT_DEVICE void take_run(int64_t run, const DeviceScales& scales) const {
    if (effective != nullptr) effective[run] = scales.of_run<false>(run).value;
  }

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const Vector<T>& in, int64_t i, int n, ScaleOf scale) const {
    float v[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= scale(j).inverse; });
    const auto grid_of = [&](int j) { return grid.at(scale(j).zero); };
    store_vector<kWide>(encoded(grid_of, v), codes + i, n);
    if (values != nullptr) {
      float rounded[kVector];
      round_to_grid(grid_of, v, rounded);
      unrolled<kVector>([&](int j) { rounded[j] *= scale(j).value; });
      store_vector<kWide>(stored<T>(rounded), values + i, n);
    }
    if (mask == nullptr || n <= 0) return;
    mask[i / kVector] = bits_where([&](int j) { return j < n && grid_of(j).inside(v[j]); });
  }
};

// Dequantize codes; unless null, also write zeros like theta, and mask a gradient of as many elements.
template <typename T, typename G>
struct Dequantize {
  struct In {
    Vector<typename G::Code> codes;
    uint32_t mask;
  };
  static constexpr bool kScaled = true, kShifted = G::kShifted;
  const typename G::Code* codes;
  T* out;
  G grid;
  void* zeros;
  T* grad;
  const uint8_t* mask;

  DEEPQAT_DEVICE void take_run(int64_t run, const DeviceScales& scales) const {
    if (zeros != nullptr) scales.store_gradient(run, 0.0f, zeros);
  }

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return {load_vector<kWide>(codes + i, n), n > 0 && mask != nullptr ? mask[i / kVector] : kAllOfThem};
  }

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, ScaleOf scale) const {
    float values[kVector];
    decode([&](int j) { return grid.at(scale(j).zero); }, in.codes, values);
    unrolled<kVector>([&](int j) { values[j] *= scale(j).value; });
    store_vector<kWide>(stored<T>(values), out + i, n);
    keep_where<kWide>(in.mask, grad + i, n);
  }
};

template <typename T, typename G>
struct FakeQuantize : ReadsX<T> {
  static constexpr bool kScaled = true, kShifted = G::kShifted;
  T* out;
  G grid;

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const Vector<T>& in, int64_t i, int n, ScaleOf scale) const {
    float v[kVector], rounded[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= scale(j).inverse; });
    round_to_grid([&](int j) { return grid.at(scale(j).zero); }, v, rounded);
    unrolled<kVector>([&](int j) { rounded[j] *= scale(j).value; });
    store_vector<kWide>(stored<T>(rounded), out + i, n);
  }
};

template <typename T, typename G>
struct Backward : ReadsX<T> {
  static constexpr bool kScaled = true, kShifted = G::kShifted;
  T* grad;
  G grid;
  bool of_weight;

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const Vector<T>& in, int64_t i, int n, ScaleOf scale) const {
    float v[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= scale(j).inverse; });
    const uint32_t bits = bits_where([&](int j) { return grid.at(scale(j).zero).inside(v[j]); });
    if (!of_weight) return keep_where<kWide>(bits, grad + i, n);
    if (bits == kAllOfThem) return;
    Vector<T> dx = kept(load_vector<kWide>(grad + i, n), [&](int j) { return (bits >> j & 1u) != 0; });
    // Non-finite elements are outside, too.
    unrolled<kVector>([&](int j) { dx.at[j] = nan_unless_finite(dx.at[j], v[j]); });
    store_vector<kWide>(dx, grad + i, n);
  }
};

template <typename T>
struct MultiplyRuns : ReadsX<T> {
  static constexpr bool kScaled = true, kShifted = false;
  T* out;

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const Vector<T>& in, int64_t i, int n, ScaleOf scale) const {
    float v[kVector];
    values_of(in, v);
    unrolled<kVector>([&](int j) { v[j] *= scale(j).value; });
    store_vector<kWide>(stored<T>(v), out + i, n);
  }
};

template <typename T>
struct Masked {
  using In = uint32_t;  // of the mask
  static constexpr bool kScaled = false, kShifted = false;
  T* grad;
  const uint8_t* mask;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return n > 0 ? mask[i / kVector] : kAllOfThem;
  }

  template <bool kWide, typename ScaleOf>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, ScaleOf) const {
    keep_where<kWide>(in, grad + i, n);
  }
};

// ---- operations that reduce runs: apply() adds the elements' terms to accumulators, finish() stores the run's result

// Base of operations that add up terms.
struct Sums {
  using Value = float;
  float* partial;
  void* gradients;
  float factor;

  static DEEPQAT_DEVICE float combine(float a, float b) { return a + b; }
  static DEEPQAT_DEVICE float of_partial(float partial) { return partial; }
  static DEEPQAT_DEVICE float to_partial(float sum) { return sum; }
};

template <typename T, typename G>
struct BackwardSums : Backward<T, G>, Sums {
  struct In {
    Vector<T> grad, x;
  };

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return {load_vector<kWide>(this->grad + i, n), load_vector<kWide>(this->x + i, n)};
  }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t i, int n, const Scale& scale, float (&sums)[kVector]) const {
    float v[kVector], rounded[kVector], grad[kVector];
    values_of(in.x, v);
    values_of(in.grad, grad);
    unrolled<kVector>([&](int j) { v[j] *= scale.inverse; });
    const auto its_grid = this->grid.at(scale.zero);
    round_to_grid([&](int) { return its_grid; }, v, rounded);
    // Also written if nothing was clipped: a check costs registers that sm_100 does not have here.
    const auto inside = [&](int j) { return its_grid.inside(v[j]); };
    store_vector<kWide>(kept(in.grad, inside), this->grad + i, n);
    // Beyond the end both are zero, and so is the term for any scale.
    unrolled<kVector>([&](int j) {
      sums[j] += grad[j] * its_grid.scale_term(v[j], rounded[j]);
      sums[j] += deepqat::kept(v[j] - v[j], this->of_weight);  // adds 0, or NaN
    });
  }

  DEEPQAT_DEVICE void finish(int64_t run, float sum, const DeviceScales& scales, const Scale& scale) const {
    scales.store_gradient(run, sum * scale.learned * factor, gradients);
  }
};

template <typename T>
struct SumProducts : Sums {
  struct In {
    Vector<T> x, y;
  };
  static constexpr bool kScaled = false, kShifted = false;
  const T *x, *y;

  template <bool kWide>
  DEEPQAT_DEVICE In load(int64_t i, int n) const {
    return {load_vector<kWide>(x + i, n), load_vector<kWide>(y + i, n)};
  }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const In& in, int64_t, int, const Scale&, float (&sums)[kVector]) const {
    float left[kVector], right[kVector];
    values_of(in.x, left);
    values_of(in.y, right);
    unrolled<kVector>([&](int j) { sums[j] += left[j] * right[j]; });
  }

  DEEPQAT_DEVICE void finish(int64_t run, float sum, const DeviceScales& scales, const Scale&) const {
    scales.store_gradient(run, sum * factor, gradients);
  }
};

// As integers, the bits of magnitudes have the order of their values, with NaNs at the end.
template <typename T>
struct Amax : ReadsX<T> {
  using Value = uint32_t;
  static constexpr bool kScaled = false, kShifted = false;
  float *partial, *out;

  static DEEPQAT_DEVICE uint32_t combine(uint32_t a, uint32_t b) { return max(a, b); }
  static DEEPQAT_DEVICE uint32_t of_partial(float partial) { return bits_of(partial); }
  static DEEPQAT_DEVICE float to_partial(uint32_t largest) { return float_of(largest); }

  template <bool kWide>
  DEEPQAT_DEVICE void apply(const Vector<T>& in, int64_t, int, const Scale&, uint32_t (&largest)[kVector]) const {
    float values[kVector];
    values_of(in, values);
    unrolled<kVector>([&](int j) { largest[j] = max(largest[j], bits_of(magnitude(values[j]))); });
  }

  DEEPQAT_DEVICE void finish(int64_t run, uint32_t largest, const DeviceScales&, const Scale&) const {
    out[run] = float_of(largest);
  }
};

}  // namespace deepqat::cuda
