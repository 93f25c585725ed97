// Loops of the CUDA kernels, over the operations of cuda/operations.h:
//
//     elementwise   a warp processes tiles of kTile elements, across runs
//     tokens        a warp or a block processes a token: first its range, then its elements
//     short_tokens  a few lanes of a warp process a token of up to kWarpStep features, reading it once
//
// and helpers shared with cuda/reductions.h. All stride by the grid, which has at most as many blocks as the device
// runs at once, and load several vectors per thread before using the first. Every addition has the order of kernels.h.

#pragma once

#include "scales.h"

namespace deepqat::cuda {

constexpr int kWarpsPerBlock = kLanes / kWarp;

// Index of the warp in the grid. The shuffle shows the compiler that it is equal in all lanes; otherwise it would guard
// every shuffle of the loops below against divergent lanes.
DEEPQAT_DEVICE int64_t warp_index() {
  return static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
}

// Number of a vector's elements before the end, `left` elements from its first.
DEEPQAT_DEVICE int elements_in(int64_t left) {
  return left >= kVector ? kVector : left > 0 ? static_cast<int>(left) : 0;
}

template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) elementwise(Op op, DeviceScales scales, int64_t numel, bool wide) {
  const int lane = threadIdx.x % kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock * kTile;
  const bool one_scale = Op::kScaled && scales.count() == 1;
  const Scale the_scale = one_scale ? scales.of_run<Op::kShifted>(0) : Scale{};
  if constexpr (requires { op.take_run(int64_t{}, scales); }) {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kLanes;
    for (int64_t run = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x; run < scales.count(); run += threads)
      op.take_run(run, scales);
  }
  for (int64_t begin = warp_index() * kTile; begin < numel; begin += stride) {
    if (wide && begin + kTile <= numel) {
      const auto position = [&](int u) { return u * kWarpStep + lane * kVector; };
      typename Op::In in[kInFlight];
      unrolled<kInFlight>([&](int u) { in[u] = op.template load<true>(begin + position(u), kVector); });
      Scale scale[kInFlight];
      unrolled<kInFlight>([&](int u) { scale[u] = the_scale; });
      if (Op::kScaled && !one_scale) scales.of_elements<Op::kShifted>(begin, kTile, position, scale);
      unrolled<kInFlight>([&](int u) {
        op.template apply<true>(in[u], begin + position(u), kVector, [&](int) { return scale[u]; });
      });
      continue;
    }
#pragma unroll 1
    for (int64_t step = begin; step < min(begin + kTile, numel); step += kWarpStep) {
      const int64_t i = step + lane * kVector;
      const int n = elements_in(numel - i);
      const auto in = op.template load<false>(i, n);
      Scale scale[kVector];
      unrolled<kVector>([&](int j) { scale[j] = the_scale; });
      const auto position = [&](int j) { return lane * kVector + j; };
      if (Op::kScaled && !one_scale) scales.of_elements<Op::kShifted>(step, kWarpStep, position, scale);
      op.template apply<false>(in, i, n, [&](int j) { return scale[j]; });
    }
  }
}

// Combine eight values in the order of kernels.h: neighbors, or sums that are 32 lanes apart.
template <typename Op>
DEEPQAT_DEVICE typename Op::Value by_halves(const typename Op::Value (&a)[kVector]) {
  return Op::combine(Op::combine(Op::combine(a[0], a[4]), Op::combine(a[2], a[6])),
                     Op::combine(Op::combine(a[1], a[5]), Op::combine(a[3], a[7])));
}

// Reduce over `width` neighboring lanes, a power of two; the first of them gets the result.
template <typename Op>
DEEPQAT_DEVICE typename Op::Value over_lanes(typename Op::Value value, int width) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const auto other = __shfl_down_sync(kAllLanes, value, half);
    if (half < width) value = Op::combine(value, other);
  }
  return value;
}

// Reduce over a block; thread 0 gets the result. Calls of a block must alternate between two arrays: a warp may enter
// the next call while the first warp still reads the array of this one.
template <typename Op>
DEEPQAT_DEVICE typename Op::Value over_block(const typename Op::Value (&mine)[kVector],
                                             typename Op::Value (&shared)[kLanes]) {
  const int thread = threadIdx.x;
  shared[thread] = by_halves<Op>(mine);
  __syncthreads();
  if (thread >= kWarp) return {};
  typename Op::Value apart[kVector];
  unrolled<kVector>([&](int j) { apart[j] = shared[thread + j * kWarp]; });
  return over_lanes<Op>(by_halves<Op>(apart), kWarp);
}

// Call use(in, i, n) for every `threads`-th vector of [0, length), with kInFlight vectors loaded ahead.
template <bool kWide, typename Load, typename Use>
DEEPQAT_DEVICE void for_vectors(int64_t length, int thread, int threads, Load load, Use use) {
  constexpr int kSteps = kWide ? kInFlight : 1;
  const int stride = threads * kVector;
  for (int64_t base = thread * kVector; base < length; base += kSteps * stride) {
    decltype(load(base, 0)) in[kSteps];
    unrolled<kSteps>([&](int u) { in[u] = load(base + u * stride, elements_in(length - base - u * stride)); });
    unrolled<kSteps>([&](int u) {
      const int n = elements_in(length - base - u * stride);
      if (n > 0) use(in[u], base + u * stride, n);
    });
  }
}

// Range of a token, 0 included.
struct Range {
  float lowest, highest;
  bool nan;

  DEEPQAT_DEVICE void take(float x) {
    lowest = fminf(lowest, x);  // fminf and fmaxf drop a NaN
    highest = fmaxf(highest, x);
    nan = nan || x != x;
  }
};

// Combine ranges over a warp. `highest` becomes a NaN if there was any: as integers, the bits of magnitudes have the
// order of their values, with NaNs at the end.
DEEPQAT_DEVICE Range over_warp(const Range& range) {
  const uint32_t highest = bits_of(magnitude(range.highest)) | (range.nan ? 0x7fc00000u : 0u);
  return {-float_of(__reduce_max_sync(kAllLanes, bits_of(magnitude(range.lowest)))),
          float_of(__reduce_max_sync(kAllLanes, highest)), false};
}

// Maximum over `width` neighboring lanes, a power of two; all of them get the result.
DEEPQAT_DEVICE uint32_t largest_of_lanes(uint32_t value, int width) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, half);
    if (half < width) value = max(value, other);
  }
  return value;
}

// Process neighboring tokens from `first` on, as short_runs_of_warp does runs, for grids that need only the absmax.
template <bool kFull, int kSteps, typename Op>
DEEPQAT_DEVICE void short_tokens_of_warp(const Op& op, int64_t count, int features, int64_t first, int shift) {
  const int lane = threadIdx.x % kWarp, at_once = kWarp >> shift;
  const int position = (lane & ((1 << shift) - 1)) * kVector;
  const int present = static_cast<int>(min(count - first, static_cast<int64_t>(kSteps * kWarp)));
  const int64_t begin = first * features + position;
  const auto token_at = [&](int u) { return u * at_once + (lane >> shift); };
  const auto n = [&](int u) {
    return kFull ? kVector : token_at(u) < present ? elements_in(features - position) : 0;
  };
  typename Op::In in[kSteps];
  unrolled<kSteps>([&](int u) { in[u] = load_vector<kFull>(op.x + begin + token_at(u) * features, n(u)); });
  unrolled<kSteps>([&](int u) {
    float values[kVector];
    values_of(in[u], values);
    uint32_t largest = 0;
    unrolled<kVector>([&](int j) { largest = max(largest, bits_of(magnitude(values[j]))); });
    const auto of_token = op.grids.token(0.0f, float_of(largest_of_lanes(largest, 1 << shift)));
    op.template apply<kFull>(in[u], begin + token_at(u) * features, n(u), of_token);
    if (position == 0 && n(u) > 0) op.finish(first + token_at(u), of_token.scale);
  });
}

template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) short_tokens(Op op, int64_t count, int64_t features, int shift, bool wide) {
  const int at_once = kWarp >> shift, tile = kInFlight * at_once, size = static_cast<int>(features);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock * tile;
  for (int64_t first = warp_index() * tile; first < count; first += stride) {
    if (wide && kVector << shift == size && first + tile <= count) {
      short_tokens_of_warp<true, kInFlight>(op, count, size, first, shift);
    } else {
#pragma unroll 1
      for (int u = 0; u < kInFlight; ++u) short_tokens_of_warp<false, 1>(op, count, size, first + u * at_once, shift);
    }
  }
}

template <bool kWide, int kThreads, typename Op>
DEEPQAT_DEVICE void take_token(const Op& op, int64_t token, int64_t features, Range (&of_warps)[kWarpsPerBlock]) {
  const int thread = threadIdx.x % kThreads;
  const int64_t offset = token * features;
  const auto load = [&](int64_t i, int n) { return load_vector<kWide>(op.x + offset + i, n); };
  Range range{};
  for_vectors<kWide>(features, thread, kThreads, load, [&](const auto& in, int64_t, int) {
    float values[kVector];
    values_of(in, values);
    unrolled<kVector>([&](int j) { range.take(values[j]); });
  });
  range = over_warp(range);
  if constexpr (kThreads > kWarp) {
    if (thread % kWarp == 0) of_warps[thread / kWarp] = range;
    __syncthreads();
    range = over_warp(of_warps[thread % (kThreads / kWarp)]);
  }
  const auto of_token = op.grids.token(range.lowest, range.highest);
  for_vectors<kWide>(features, thread, kThreads, load, [&](const auto& in, int64_t i, int n) {
    op.template apply<kWide>(in, offset + i, n, of_token);
  });
  if (thread == 0) op.finish(token, of_token.scale);
}

template <typename Op, int kThreads>
__global__ void __launch_bounds__(kLanes, 2) tokens(Op op, int64_t count, int64_t features, bool wide) {
  __shared__ Range of_warps[2][kWarpsPerBlock];  // two arrays, as in over_block
  constexpr int kAtOnce = kLanes / kThreads;
  int64_t token = static_cast<int64_t>(blockIdx.x) * kAtOnce + threadIdx.x / kThreads;
  for (int turn = 0; token < count; ++turn, token += static_cast<int64_t>(gridDim.x) * kAtOnce) {
    if (wide) {
      take_token<true, kThreads>(op, token, features, of_warps[turn % 2]);
    } else {
      take_token<false, kThreads>(op, token, features, of_warps[turn % 2]);
    }
  }
}

}  // namespace deepqat::cuda
