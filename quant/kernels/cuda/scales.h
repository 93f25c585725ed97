// Scales of many runs on a GPU, computed by the warps that use them.
//
// exp(theta) and 1/s are costly compared to the arithmetic of one element. So each lane of a warp computes the scale of
// another run, and shuffles distribute them to the lanes that need them.

#pragma once

#include "vectors.h"

namespace deepqat::cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kInFlight = 4;                  // vectors that a thread loads before using the first
constexpr int kWarpStep = kWarp * kVector;    // elements of one vector per lane
constexpr int kTile = kInFlight * kWarpStep;  // elements per warp and iteration

// `learned` is s0 * exp(theta), before rounding.
struct Scale {
  float value, inverse, learned, zero;
};

// The zero point is 0 unless kShifted, to save a shuffle for symmetric grids.
template <bool kShifted>
DEEPQAT_DEVICE Scale from_lane(const Scale& scale, int lane) {
  const float zero = kShifted ? __shfl_sync(kAllLanes, scale.zero, lane) : 0.0f;
  return {__shfl_sync(kAllLanes, scale.value, lane), __shfl_sync(kAllLanes, scale.inverse, lane),
          __shfl_sync(kAllLanes, scale.learned, lane), zero};
}

// n / divisor without the GPU's slow 64-bit division, for n below 2^53: the rounded product is off by at most one.
class Divisor {
 public:
  explicit Divisor(int64_t divisor) : divisor_(divisor), reciprocal_(1.0 / static_cast<double>(divisor)) {}

  DEEPQAT_DEVICE int64_t quotient(int64_t n) const {
    const int64_t guess = static_cast<int64_t>(static_cast<double>(n) * reciprocal_);
    const int64_t rest = n - guess * divisor_;
    return guess + (rest >= divisor_ ? 1 : 0) - (rest < 0 ? 1 : 0);
  }

 private:
  int64_t divisor_;
  double reciprocal_;
};

class DeviceScales {
 public:
  explicit DeviceScales(const Scales& scales)
      : scales_(scales),
        by_block_(scales.block),
        by_above_(scales.per_above),
        magic_(static_cast<uint32_t>((1 << 22) / (scales.block < kTile ? scales.block : kTile) + 1)) {}

  DEEPQAT_DEVICE int64_t count() const { return scales_.count; }
  DEEPQAT_DEVICE int64_t block() const { return scales_.block; }

  template <bool kShifted>
  DEEPQAT_DEVICE Scale of_run(int64_t run) const {
    float learned = scales_.s0 == nullptr ? 1.0f : scales_.s0[run];
    if (scales_.theta != nullptr) learned *= learned_factor(theta(run));
    float value = learned;
    if (scales_.stored_as == Stored::kBFloat16) value = stored_scale<BFloat16>(learned);
    if (scales_.stored_as == Stored::kHalf) value = stored_scale<Half>(learned);
    if (scales_.stored_as == Stored::kE8M0) value = power_of_two(learned);
    if (scales_.stored_as == Stored::kE4M3) value = below_global(learned, scales_.above[by_above_.quotient(run)]);
    return {value, 1.0f / value, learned, kShifted ? scales_.zero[run] : 0.0f};
  }

  DEEPQAT_DEVICE void store_gradient(int64_t run, float gradient, void* out) const {
    switch (scales_.theta_dtype) {
      case Dtype::kFloat32: return store(gradient, static_cast<float*>(out) + run);
      case Dtype::kBFloat16: return store(gradient, static_cast<BFloat16*>(out) + run);
      case Dtype::kHalf: return store(gradient, static_cast<Half*>(out) + run);
    }
  }

  // scale[i] = scale of run first + run_of(i), for all lanes of the warp at once; 0 <= run_of(i) < runs. Beyond the
  // last run of the tensor, lanes get the scale of the last run, which they do not use.
  template <bool kShifted, int N, typename RunOf>
  DEEPQAT_DEVICE void of_runs(int64_t first, int runs, RunOf run_of, Scale (&scale)[N]) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 1
    for (int known = 0; known < runs; known += kWarp) {
      const int64_t run = first + known + lane;
      const Scale mine = of_run<kShifted>(run < count() ? run : count() - 1);
      unrolled<N>([&](int i) {
        const int owner = run_of(i) - known;
        const Scale other = from_lane<kShifted>(mine, owner & (kWarp - 1));
        if (owner >= 0 && owner < kWarp) scale[i] = other;
      });
    }
  }

  // scale[i] = scale of element begin + position(i), likewise; 0 <= position(i) < length <= kTile.
  template <bool kShifted, int N, typename Position>
  DEEPQAT_DEVICE void of_elements(int64_t begin, int length, Position position, Scale (&scale)[N]) const {
    const int64_t first = by_block_.quotient(begin);
    // A run longer than a tile is treated as if it had the tile's length and ended with it. The dividend is then so
    // small that multiplying by floor(2^22 / divisor) + 1 is exact.
    const int left = static_cast<int>(min((first + 1) * block() - begin, static_cast<int64_t>(kTile)));
    const int into_first = static_cast<int>(min(block(), static_cast<int64_t>(kTile))) - left;
    const auto run_at = [&](int p) { return static_cast<int>(static_cast<uint32_t>(into_first + p) * magic_ >> 22); };
    of_runs<kShifted>(first, run_at(length - 1) + 1, [&](int i) { return run_at(position(i)); }, scale);
  }

 private:
  DEEPQAT_DEVICE float theta(int64_t run) const {
    switch (scales_.theta_dtype) {
      case Dtype::kFloat32: return load(static_cast<const float*>(scales_.theta)[run]);
      case Dtype::kBFloat16: return load(static_cast<const BFloat16*>(scales_.theta)[run]);
      case Dtype::kHalf: return load(static_cast<const Half*>(scales_.theta)[run]);
    }
    return 0.0f;
  }

  Scales scales_;
  Divisor by_block_, by_above_;
  uint32_t magic_;
};

}  // namespace deepqat::cuda
