// compare SEED ROUNDS: runs the CUDA kernels, emulated, and the CPU kernels on random tensors, and ends with status 1
// where they differ in a bit (which NaN a floating-point result is does not count). Built with sanitizers, which find
// accesses out of bounds and misaligned words.

#include "layers.h"
#include "quantizers.h"
#include "random_tensors.h"

namespace {

// The sum over segments, of tensors that are too large to compute here.
void test_partials() {
  const int64_t runs = 1 + below(4), per_run = one_of<int64_t>({2, 255, 2048, 2049, 4099, 10000});
  what = "partials of " + std::to_string(runs) + " x " + std::to_string(per_run);
  Buffer partial(runs * per_run, 4, 0, 0), s0(runs, 4, 0, 0);
  Result grad_theta(runs, 4, 0);
  for (int64_t i = 0; i < runs * per_run; ++i) put(partial, Dtype::kFloat32, i, normal() * std::exp(2.0 * normal()));
  for (int64_t i = 0; i < runs; ++i) put(s0, Dtype::kFloat32, i, std::exp(normal()));
  auto* sums = static_cast<float*>(partial.data());
  for (int64_t run = 0; run < runs; ++run) {
    const float sum = cpu::sum_in_order(per_run, [&](int64_t i) { return sums[run * per_run + i]; });
    put(grad_theta.cpu, Dtype::kFloat32, run, sum * get(s0, Dtype::kFloat32, run) * 0.37f);
  }
  const Scales scales{static_cast<float*>(s0.data()), nullptr, Dtype::kFloat32, Stored::kFloat32, runs,
                      per_run * kSegment};
  using Op = cuda::BackwardSums<float, E4M3>;
  const Op op{{{nullptr}, nullptr, E4M3{}, false}, {sums, grad_theta.cuda.data(), 0.37f}};
  cuda::launch<cuda::partials<Op>>("partials", stream, runs, op, cuda::DeviceScales(scales), per_run);
  grad_theta.compare("sum", Dtype::kFloat32);
}

// Each stream has counts of its own, as long as there are some.
void test_counts() {
  what = "counts of streams";
  const auto of = [](uintptr_t handle) { return cuda::counts_of("counts", reinterpret_cast<void*>(handle)); };
  const int ours = cuda::counts_of("counts", stream);
  std::vector<int> found{ours};
  for (uintptr_t handle = 0; static_cast<int>(found.size()) < cuda::kCountedStreams; handle += 16)
    found.push_back(of(handle));
  for (uintptr_t handle = 0; handle < 160; handle += 16)
    if (of(handle) != found[1 + handle / 16]) fail("a stream has others the second time");
  std::sort(found.begin(), found.end());
  for (int i = 0; i < cuda::kCountedStreams; ++i)
    if (found[i] != i) fail("two streams have the same");
  if (of(0x9990) != -1) fail("there are more than there is memory");
  if (cuda::counts_of("counts", cudaStreamPerThread) != -1 || cuda::counts_of("counts", stream) != ours)
    fail("of the wrong stream");
}

// Of indices that no tensor here reaches.
void test_divisor() {
  const int64_t divisor = 1 + static_cast<int64_t>(random_bits() >> (1 + below(62)));
  const int64_t quotient = below(std::max<int64_t>(1, (int64_t{1} << 53) / divisor));
  what = "division of about " + std::to_string(quotient) + " times " + std::to_string(divisor);
  if (divisor > int64_t{1} << 53) return;
  const cuda::Divisor by(divisor);
  for (int64_t n : {quotient * divisor, quotient * divisor + divisor - 1, quotient * divisor + below(divisor)})
    if (n < int64_t{1} << 53 && by.quotient(n) != n / divisor) fail(std::to_string(by.quotient(n)));
}

void test_errors() {
  what = "an error of the device";
  float x = 1.0f, partial, out;
  emulation::machine.error = 1;
  try {
    cuda::amax(&x, Dtype::kFloat32, 1, 1, &partial, &out, stream);
    fail("is not reported");
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()) != "CUDA kernel amax: an emulated error") fail(error.what());
  }
  if (cudaGetLastError() != cudaSuccess) fail("would be reported twice");
}

}  // namespace

int main(int, char** arguments) {
  random_bits.seed(std::strtoull(arguments[1], nullptr, 10));
  emulation::machine.random.seed(static_cast<unsigned>(random_bits()));
  const std::pair<int, void (*)()> tests[] = {
      {2, test_effective_scale}, {15, test_quantize}, {10, test_dequantize}, {10, test_fake_quantize},
      {25, test_backward},       {15, test_runs},     {10, test_amax},       {15, test_tokens},
      {1, test_partials},        {10, test_sum_rows}, {25, test_norms},      {10, test_swiglu},
      {100, test_divisor},       {1, test_errors},    {1, test_counts},
  };
  const int rounds = std::atoi(arguments[2]);
  for (int round = 0; round < rounds; ++round)
    for (const auto& [times, test] : tests)
      for (int i = 0; i < times; ++i) test();
  if (emulation::machine.stream != stream) fail("launched on another stream");
}
