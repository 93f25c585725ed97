// As much of CUDA as the kernels use, on the CPU: their indexing, tails, reductions and barriers are tested without a
// GPU.
//
// The threads of a block are fibers. A warp runs until all its lanes wait at the same barrier of the block or are done;
// its lanes run until they meet in the same shuffle. Warps, lanes and blocks take turns in random order, so that a
// result which depends on the order, as a barrier is missing, does not come out right for long. What CUDA leaves
// undefined ends the program: lanes that wait in different places, or for lanes that are done.

#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 256 * 1024;

enum class State { kReady, kBarrier, kShuffle, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* sanitizer = nullptr;
  State state = State::kDone;
  int line = 0;        // of the barrier or shuffle that it waits at
  uint32_t value = 0;  // that it gives to a shuffle
  std::function<uint32_t(const uint32_t*)> choose;  // what it takes, given the values of all lanes
};

struct Machine {
  std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);
  ucontext_t scheduler;
  void* scheduler_sanitizer = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_size = 0;
  int running = 0;
  std::function<void()> kernel;
  std::mt19937 random;
  void* stream = nullptr;  // of the last launch
  int launches = 0;
  bool capturing = false;  // the stream, into a graph
  int device = 0;
  int processors = 1;
  int error = 0;  // of the next launch
  int last_error = 0;
};

inline Machine machine;

[[noreturn]] inline void misuse(const char* what, int line) {
  std::fprintf(stderr, "emulated CUDA: %s, line %d, block %u\n", what, line, blockIdx.x);
  std::abort();
}

inline void to_scheduler() {
  Fiber& fiber = machine.fibers[machine.running];
  __sanitizer_start_switch_fiber(&fiber.sanitizer, machine.scheduler_stack, machine.scheduler_stack_size);
  swapcontext(&fiber.context, &machine.scheduler);
  __sanitizer_finish_switch_fiber(fiber.sanitizer, &machine.scheduler_stack, &machine.scheduler_stack_size);
}

inline void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_stack, &machine.scheduler_stack_size);
  for (;;) {
    machine.kernel();
    machine.fibers[machine.running].state = State::kDone;
    to_scheduler();
  }
}

inline void resume(int thread) {
  Fiber& fiber = machine.fibers[thread];
  if (fiber.stack == nullptr) {
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, fiber_main, 0);
  }
  machine.running = thread;
  threadIdx.x = static_cast<unsigned>(thread);
  __sanitizer_start_switch_fiber(&machine.scheduler_sanitizer, fiber.stack.get(), kStack);
  swapcontext(&machine.scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(machine.scheduler_sanitizer, nullptr, nullptr);
}

inline void wait(State state, int line) {
  Fiber& fiber = machine.fibers[machine.running];
  fiber.state = state;
  fiber.line = line;
  to_scheduler();
}

inline std::vector<int> shuffled(int n) {
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), machine.random);
  return order;
}

// Whether n threads from `first` on are all in the same state, in the same place.
inline bool together(int first, int n) {
  const Fiber& one = machine.fibers[first];
  for (int i = first; i < first + n; ++i) {
    const Fiber& other = machine.fibers[i];
    if (other.state != one.state || (one.state != State::kDone && other.line != one.line)) return false;
  }
  return true;
}

inline void run_warp(int first) {
  for (;;) {
    for (int lane : shuffled(kWarp))
      if (machine.fibers[first + lane].state == State::kReady) resume(first + lane);
    const Fiber& one = machine.fibers[first];
    if (!together(first, kWarp)) misuse("the lanes of a warp wait in different places, or are done", one.line);
    if (one.state != State::kShuffle) return;
    uint32_t given[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) given[lane] = machine.fibers[first + lane].value;
    for (int lane = 0; lane < kWarp; ++lane) {
      Fiber& fiber = machine.fibers[first + lane];
      fiber.value = fiber.choose(given);
      fiber.state = State::kReady;
    }
  }
}

inline void run_block(int threads) {
  for (int i = 0; i < threads; ++i) machine.fibers[i].state = State::kReady;
  for (;;) {
    for (int warp : shuffled(threads / kWarp)) run_warp(warp * kWarp);
    if (!together(0, threads)) misuse("not all threads reach a barrier", machine.fibers[0].line);
    if (machine.fibers[0].state == State::kDone) return;
    for (int i = 0; i < threads; ++i) machine.fibers[i].state = State::kReady;
  }
}

template <typename T>
T shuffle(unsigned mask, T value, int line, std::function<uint32_t(const uint32_t*)> choose) {
  static_assert(sizeof(T) == sizeof(uint32_t));
  if (mask != 0xffffffffu) misuse("a shuffle without all lanes", line);
  Fiber& fiber = machine.fibers[machine.running];
  std::memcpy(&fiber.value, &value, sizeof value);
  fiber.choose = std::move(choose);
  wait(State::kShuffle, line);
  std::memcpy(&value, &fiber.value, sizeof value);
  return value;
}

}  // namespace emulation

inline void __syncthreads(int line = __builtin_LINE()) { emulation::wait(emulation::State::kBarrier, line); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
  return emulation::shuffle(mask, value, line, [source](const uint32_t* given) { return given[source % 32]; });
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta, int line = __builtin_LINE()) {
  const int lane = static_cast<int>(threadIdx.x) % emulation::kWarp;
  const int source = lane + delta < emulation::kWarp ? lane + delta : lane;
  return emulation::shuffle(mask, value, line, [source](const uint32_t* given) { return given[source]; });
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
  const int source = static_cast<int>(threadIdx.x) % emulation::kWarp ^ lanes;
  return emulation::shuffle(mask, value, line, [source](const uint32_t* given) { return given[source]; });
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value, int line = __builtin_LINE()) {
  return emulation::shuffle(mask, value, line, [](const uint32_t* given) {
    return *std::max_element(given, given + emulation::kWarp);
  });
}

// Blocks run one after the other: what they write is there for the next.
inline void __threadfence() {}

inline unsigned atomicAdd(unsigned* to, unsigned value) { return std::exchange(*to, *to + value); }

template <typename T>
T __ldcg(const T* from) {
  return *from;
}

// ---- the host's side

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 16;

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

inline const cudaStream_t cudaStreamPerThread = reinterpret_cast<cudaStream_t>(2);

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = emulation::machine.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = emulation::machine.device;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute != cudaDevAttrMultiProcessorCount || device != emulation::machine.device) return 1;
  *value = emulation::machine.processors;
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads, size_t) {
  if (threads > emulation::kMaxThreads) return 1;
  *blocks = 2;
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }

inline cudaError_t cudaGetLastError() { return std::exchange(emulation::machine.last_error, cudaSuccess); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  emulation::Machine& machine = emulation::machine;
  if (machine.error != cudaSuccess) return machine.last_error = std::exchange(machine.error, cudaSuccess);
  machine.stream = config->stream;
  ++machine.launches;
  machine.kernel = [&] { kernel(Parameters(arguments)...); };
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (int block : emulation::shuffled(static_cast<int>(gridDim.x))) {
    blockIdx.x = static_cast<unsigned>(block);
    emulation::run_block(static_cast<int>(blockDim.x));
  }
  return cudaSuccess;
}
