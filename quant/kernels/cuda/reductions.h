// Loops of the CUDA kernels that reduce runs, over the operations of cuda/operations.h, and their launches:
//
//     short_runs    a few lanes of a warp reduce a run of up to kWarpStep elements
//     segments      a block reduces a segment of a longer run; the last block of a run reduces its segments' results
//     partials      a block reduces the results of a run's segments, in a separate launch
//
// The last block of a run varies, its result does not: every addition has the order of kernels.h in any block.

#pragma once

#include <atomic>

#include "launch.h"

namespace deepqat::cuda {
namespace {

// Number of finished segments per run, for launches that also reduce the segments' results: 0 between two launches,
// which follow each other on one stream. Each stream has separate counts.
constexpr int kCountedStreams = 32, kCountedRuns = 1024;
__device__ uint32_t segments_done[kCountedStreams][kCountedRuns];

// Index of the stream's counts, or -1: too many streams; a stream in capture, as the graph may run on any stream; or
// cudaStreamPerThread, which is another stream in each host thread.
int counts_of(const char* name, void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture), name);
  if (capture != cudaStreamCaptureStatusNone || stream == cudaStreamPerThread) return -1;
  static std::atomic<uintptr_t> known[kCountedStreams];
  const uintptr_t id = reinterpret_cast<uintptr_t>(stream) + 1;  // the default stream is null
  for (int i = 0; i < kCountedStreams; ++i) {
    uintptr_t there = 0;
    if (known[i].compare_exchange_strong(there, id) || there == id) return i;
  }
  return -1;
}

}  // namespace

// Reduce neighboring runs from `first` on, 2^shift lanes each, kSteps vectors per lane in flight. If kFull, each of
// these lanes has a run and eight of its elements.
template <bool kFull, int kSteps, typename Op>
DEEPQAT_DEVICE void short_runs_of_warp(const Op& op, const DeviceScales& scales, int64_t first, int shift) {
  const int lane = threadIdx.x % kWarp, at_once = kWarp >> shift, block = static_cast<int>(scales.block());
  const int position = (lane & ((1 << shift) - 1)) * kVector;
  const int runs = static_cast<int>(min(scales.count() - first, static_cast<int64_t>(kSteps * kWarp)));
  const int64_t begin = first * block + position;
  const auto run_of = [&](int u) { return u * at_once + (lane >> shift); };
  const auto n = [&](int u) { return kFull ? kVector : run_of(u) < runs ? elements_in(block - position) : 0; };
  typename Op::In in[kSteps];
  unrolled<kSteps>([&](int u) { in[u] = op.template load<kFull>(begin + run_of(u) * block, n(u)); });
  Scale scale[kSteps] = {};
  if constexpr (Op::kScaled) scales.of_runs<Op::kShifted>(first, kSteps * at_once, run_of, scale);
  typename Op::Value total[kSteps];
  unrolled<kSteps>([&](int u) {
    typename Op::Value mine[kVector] = {};
    op.template apply<kFull>(in[u], begin + run_of(u) * block, n(u), scale[u], mine);
    total[u] = by_halves<Op>(mine);
  });
  unrolled<kSteps>([&](int u) {
    total[u] = over_lanes<Op>(total[u], 1 << shift);
    if (position == 0 && n(u) > 0) op.finish(first + run_of(u), total[u], scales, scale[u]);
  });
}

template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) short_runs(Op op, DeviceScales scales, int shift, bool wide) {
  const int at_once = kWarp >> shift, tile = kInFlight * at_once;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock * tile;
  for (int64_t first = warp_index() * tile; first < scales.count(); first += stride) {
    if (wide && kVector << shift == scales.block() && first + tile <= scales.count()) {
      short_runs_of_warp<true, kInFlight>(op, scales, first, shift);
    } else {
#pragma unroll 1
      for (int u = 0; u < kInFlight; ++u) short_runs_of_warp<false, 1>(op, scales, first + u * at_once, shift);
    }
  }
}

template <bool kWide, typename Op>
DEEPQAT_DEVICE void take_segment(const Op& op, int64_t offset, int length, const Scale& scale,
                                 typename Op::Value (&mine)[kVector]) {
  for_vectors<kWide>(
      length, threadIdx.x, kLanes, [&](int64_t i, int n) { return op.template load<kWide>(offset + i, n); },
      [&](const auto& in, int64_t i, int n) { op.template apply<kWide>(in, offset + i, n, scale, mine); });
}

// True if the `mine` segments that this block has just finished are the last of the run's `all`; only one block gets
// true, and may then read the results of all blocks.
DEEPQAT_DEVICE bool are_last(uint32_t* done, uint32_t mine, uint32_t all) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();  // make this block's results visible before the count
    last = atomicAdd(done, mine) + mine == all;
    if (last) *done = 0;  // for the next launch
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Reduce the results of a run's segments to the run's result, with all threads of a block.
template <typename Op>
DEEPQAT_DEVICE void reduce_partials(const Op& op, const DeviceScales& scales, const Scale& scale, int64_t run,
                                    int64_t per_run, typename Op::Value (&shared)[kLanes]) {
  typename Op::Value mine[kVector] = {};
  const float* partial = op.partial + run * per_run;
  for_vectors<false>(
      per_run, threadIdx.x, kLanes,
      [&](int64_t i, int n) {
        Vector<float> v{};
        unrolled<kVector>([&](int j) {
          if (j < n) v.at[j] = __ldcg(partial + i + j);  // bypass the L1 cache, which other SMs' writes do not update
        });
        return v;
      },
      [&](const Vector<float>& in, int64_t, int) {
        unrolled<kVector>([&](int j) { mine[j] = Op::combine(mine[j], Op::of_partial(in.at[j])); });
      });
  const auto total = over_block<Op>(mine, shared);
  if (threadIdx.x == 0) op.finish(run, total, scales, scale);
}

// `counts` is the result of counts_of for the stream.
template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) segments(Op op, DeviceScales scales, Divisor by_segments,
                                                      int64_t per_run, int counts, bool wide) {
  __shared__ typename Op::Value shared[2][kLanes];
  const int64_t tasks = scales.count() * per_run;
  const int lane = threadIdx.x % kWarp;
  Scale of_next_tasks{};
  uint32_t done = 0;  // segments of the current run not yet counted
  int64_t task = blockIdx.x;
  for (int turn = 0; task < tasks; ++turn, task += gridDim.x) {
    Scale scale{};
    if constexpr (Op::kScaled) {
      // Each lane prepares the scale of a different upcoming task of the block.
      if (turn % kWarp == 0) {
        const int64_t mine = min(task + static_cast<int64_t>(gridDim.x) * lane, tasks - 1);
        of_next_tasks = scales.of_run<Op::kShifted>(by_segments.quotient(mine));
      }
      scale = from_lane<Op::kShifted>(of_next_tasks, turn % kWarp);
    }
    const int64_t run = by_segments.quotient(task), start = (task - run * per_run) * kSegment;
    const int64_t offset = run * scales.block() + start;
    const int length = static_cast<int>(min(scales.block() - start, static_cast<int64_t>(kSegment)));
    typename Op::Value mine[kVector] = {};
    if (wide) {
      take_segment<true>(op, offset, length, scale, mine);
    } else {
      take_segment<false>(op, offset, length, scale, mine);
    }
    const auto total = over_block<Op>(mine, shared[turn % 2]);
    if (threadIdx.x == 0) {
      if (per_run == 1) {
        op.finish(run, total, scales, scale);
      } else {
        op.partial[task] = Op::to_partial(total);
      }
    }
    if (counts < 0) continue;
    // A count costs the block a microsecond: count once per run, as the next task may belong to the same run.
    ++done;
    const int64_t next = task + gridDim.x;
    if (next < tasks && by_segments.quotient(next) == run) continue;
    // After the barrier in are_last, `shared` can be reused; the next task uses the other array.
    if (are_last(&segments_done[counts][run], done, static_cast<uint32_t>(per_run)))
      reduce_partials(op, scales, scale, run, per_run, shared[turn % 2]);
    done = 0;
  }
}

template <typename Op>
__global__ void __launch_bounds__(kLanes, 2) partials(Op op, DeviceScales scales, int64_t per_run) {
  __shared__ typename Op::Value shared[2][kLanes];
  int64_t run = blockIdx.x;
  for (int turn = 0; run < scales.count(); ++turn, run += gridDim.x) {
    Scale scale{};
    if constexpr (Op::kScaled) scale = scales.of_run<Op::kShifted>(run);
    reduce_partials(op, scales, scale, run, per_run, shared[turn % 2]);
  }
}

template <typename Op>
void launch_reduction(const char* name, const Op& op, const Scales& scales, bool wide, void* stream) {
  const DeviceScales on_device(scales);
  wide = wide && scales.block % kVector == 0;
  if (scales.block <= kWarpStep) {
    int shift = 0;
    while (kVector << shift < scales.block) ++shift;
    const int64_t per_block = kInFlight * (kLanes >> shift);
    launch<short_runs<Op>>(name, stream, divided_up(scales.count, per_block), op, on_device, shift, wide);
    return;
  }
  const int64_t per_run = segments_of(scales.block);
  const bool countable = per_run > 1 && per_run <= INT32_MAX && scales.count <= kCountedRuns;
  const int counts = countable ? counts_of(name, stream) : -1;
  launch<segments<Op>>(name, stream, scales.count * per_run, op, on_device, Divisor(per_run), per_run, counts, wide);
  if (per_run > 1 && counts < 0) launch<partials<Op>>(name, stream, scales.count, op, on_device, per_run);
}

}  // namespace deepqat::cuda
