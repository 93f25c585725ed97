// Launch of a CUDA kernel: on as many blocks as the device runs at once, on the stream given by torch.

#pragma once

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "loops.h"

namespace deepqat::cuda {
namespace {

constexpr __host__ __device__ int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

[[maybe_unused]] void check(cudaError_t status, const char* kernel) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clear the error, which is reported here
  throw std::runtime_error(std::string("CUDA kernel ") + kernel + ": " + cudaGetErrorString(status));
}

// Number of blocks of a kernel that the current device runs at once, queried once. Devices that share a table entry
// would share the number too; only the size of the grid depends on it.
template <auto kKernel>
int resident_blocks(const char* name) {
  static std::atomic<int> known[64];
  int device = 0, processors = 0, per_processor = 0;
  check(cudaGetDevice(&device), name);
  std::atomic<int>& blocks = known[device % 64];
  if (blocks == 0) {
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), name);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kKernel, kLanes, 0), name);
    blocks = std::max(1, processors * per_processor);
  }
  return blocks;
}

// `tasks` is the largest useful number of blocks.
template <auto kKernel, typename... Arguments>
void launch(const char* name, void* stream, int64_t tasks, const Arguments&... arguments) {
  if (tasks <= 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(tasks, resident_blocks<kKernel>(name))));
  config.blockDim = dim3(kLanes);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kKernel, arguments...), name);
}

template <typename Op>
void launch_elementwise(const char* name, const Op& op, const Scales& scales, int64_t numel, bool wide, void* stream) {
  const bool vectors_have_one_scale = scales.count == 1 || scales.block % kVector == 0;
  launch<elementwise<Op>>(name, stream, divided_up(numel, kTile * kWarpsPerBlock), op, DeviceScales(scales), numel,
                          wide && vectors_have_one_scale);
}

}  // namespace
}  // namespace deepqat::cuda
