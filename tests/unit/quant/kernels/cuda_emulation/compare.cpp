// compare SEED ROUNDS: runs the CUDA kernels, emulated, and the CPU kernels on random tensors, and ends with status 1
// where they differ in a bit (which NaN a floating-point result is does not count). Built with sanitizers, which find
// accesses out of bounds and misaligned words.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "cpu.cpp"
#include "cuda.cu"
#include "fused.cu"
#include "fused_cpu.cpp"

namespace {

using namespace deepqat;

std::mt19937_64 random_bits;
std::string what;  // the case that runs

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), why.c_str());
  std::exit(1);
}

int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

bool chance(double p) { return static_cast<double>(random_bits() >> 11) * 0x1p-53 < p; }

double normal() { return std::normal_distribution<double>()(random_bits); }

template <typename T>
T one_of(std::initializer_list<T> values) {
  return values.begin()[below(static_cast<int64_t>(values.size()))];
}

size_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// Memory that ends where the tensor ends, and begins `offset` elements before it with bytes that must stay as they are.
class Buffer {
 public:
  Buffer(int64_t numel, size_t element, int64_t offset, uint8_t fill)
      : bytes_(numel * element), before_(offset * element), fill_(fill) {
    memory_.reset(static_cast<uint8_t*>(std::malloc(before_ + bytes_)));  // aligned to 16 bytes, like every malloc
    std::memset(memory_.get(), fill, before_ + bytes_);
  }

  void* data() { return memory_.get() + before_; }
  size_t bytes() const { return bytes_; }

  void check() const {
    for (size_t i = 0; i < before_; ++i)
      if (memory_.get()[i] != fill_) fail("wrote before the tensor");
  }

 private:
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  size_t bytes_, before_;
  uint8_t fill_;
  std::unique_ptr<uint8_t, Free> memory_;
};

void put(Buffer& buffer, Dtype dtype, int64_t i, double value) {
  const float x = static_cast<float>(value);
  switch (dtype) {
    case Dtype::kFloat32: return store(x, static_cast<float*>(buffer.data()) + i);
    case Dtype::kBFloat16: return store(x, static_cast<BFloat16*>(buffer.data()) + i);
    case Dtype::kHalf: return store(x, static_cast<Half*>(buffer.data()) + i);
  }
}

float get(Buffer& buffer, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::kFloat32: return load(static_cast<float*>(buffer.data())[i]);
    case Dtype::kBFloat16: return load(static_cast<BFloat16*>(buffer.data())[i]);
    case Dtype::kHalf: return load(static_cast<Half*>(buffer.data())[i]);
  }
  return 0.0f;
}

// A result of both backends, unequal until both have written it.
struct Result {
  Buffer cpu, cuda;

  Result(int64_t numel, size_t element, int64_t offset)
      : cpu(numel, element, 0, 0x5a), cuda(numel, element, offset, 0xa5) {}

  void compare(const char* name) {
    cuda.check();
    const auto *a = static_cast<uint8_t*>(cpu.data()), *b = static_cast<uint8_t*>(cuda.data());
    for (size_t i = 0; i < cpu.bytes(); ++i)
      if (a[i] != b[i])
        fail(std::string(name) + " differs in byte " + std::to_string(i) + " of " + std::to_string(cpu.bytes()));
  }

  void compare(const char* name, Dtype dtype) {
    cuda.check();
    for (int64_t i = 0; i < static_cast<int64_t>(cpu.bytes() / size_of(dtype)); ++i) {
      const float a = get(cpu, dtype, i), b = get(cuda, dtype, i);
      if (bits_of(a) != bits_of(b) && !(a != a && b != b))
        fail(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(b) + ", on the CPU " +
             std::to_string(a));
    }
  }
};

Dtype any_dtype() { return one_of({Dtype::kFloat32, Dtype::kBFloat16, Dtype::kBFloat16, Dtype::kHalf}); }

Stored any_stored() {
  return one_of({Stored::kFloat32, Stored::kBFloat16, Stored::kHalf, Stored::kE8M0, Stored::kE4M3, Stored::kE4M3});
}

// Zero for most tensors: what torch allocates is aligned, its slices need not be.
int64_t any_offset() { return chance(0.75) ? 0 : 1 + below(8); }

double special() {
  return one_of({0.0, -0.0, 1e-40, -1e-45, 1e30, -1e30, HUGE_VAL, -HUGE_VAL, std::nan(""), -std::nan("")});
}

int64_t any_block() {
  return one_of<int64_t>({1,    2,    3,    5,     7,     8,     9,     12,    16,    24,    31,    32,   33,   40,
                          64,   96,   100,  128,   136,   200,   248,   250,   255,   256,   257,   264,  320,  512,
                          1000, 1016, 1023, 1024,  1025,  1032,  2040,  2047,  2048,  2049,  2056,  3000, 4096, 6000,
                          8184, 8192, 8193, 9000,  16376, 16383, 16384, 16385, 16392, 18440, 32768, 33000, 49160,
                          50001});
}

// A tensor and a gradient of it, in runs of any length.
struct Case {
  Dtype dtype = any_dtype();
  bool wild = chance(0.3);  // with values that are not finite, which would hide the order of additions
  int64_t block = any_block();
  int64_t count = 1 + below(std::max<int64_t>(1, one_of({300, 3000, 12000}) / block));
  int64_t numel = block * count;
  Buffer x{numel, size_of(dtype), any_offset(), 0}, grad{numel, size_of(dtype), any_offset(), 0};

  explicit Case(const char* name) {
    what = std::string(name) + " dtype " + std::to_string(static_cast<int>(dtype)) + " of " + std::to_string(count) +
           " x " + std::to_string(block) + (wild ? " wild" : "");
    emulation::machine.device = static_cast<int>(below(100));
    emulation::machine.processors = static_cast<int>(1 + emulation::machine.device % 3);
    for (int64_t i = 0; i < numel; ++i) {
      put(grad, dtype, i, wild && chance(0.02) ? special() : normal() * std::exp(2.0 * normal()));
      put(x, dtype, i, wild && chance(0.05) ? special() : normal() * std::exp(normal()));
    }
  }
};

struct ScaledCase : Case {
  int grid = one_of({0, 0, 0, 1, 1, 2, 3, 4, 8, -2, -4, -8});
  Dtype theta_dtype = any_dtype();
  Buffer s0{count, 4, below(3), 0}, theta{count, size_of(theta_dtype), below(3), 0}, zero{count, 4, below(3), 0};
  int64_t per_above = count % 3 == 0 && chance(0.5) ? count / 3 : count;  // of one tensor, or of a stack of three
  Buffer above{count / per_above, 4, below(3), 0};
  Scales scales;

  ScaledCase(const char* name, bool with_theta) : Case(name) {
    for (int64_t i = 0; i < count; ++i) {
      const double usual = std::exp(normal()) / (grid == 0 ? 30.0 : grid == 1 ? 2.0 : std::ldexp(1.0, std::abs(grid) - 2));
      put(s0, Dtype::kFloat32, i, wild && chance(0.1) ? special() : usual);
      put(theta, theta_dtype, i, wild && chance(0.1) ? special() : 0.3 * normal());
      const double point = grid < 2 ? 0.0 : below(int64_t{1} << grid) - std::ldexp(1.0, grid - 1);
      put(zero, Dtype::kFloat32, i, wild && chance(0.1) ? std::nan("") : point);
    }
    const bool shifted = grid >= 2 && chance(0.5);
    void* learned = with_theta ? theta.data() : nullptr;
    for (int64_t i = 0; i < count / per_above; ++i) put(above, Dtype::kFloat32, i, 500.0 * std::exp(2.0 * normal()));
    scales = {static_cast<float*>(s0.data()), learned, theta_dtype, any_stored(), count, block,
              shifted ? static_cast<float*>(zero.data()) : nullptr};
    if (scales.stored_as == Stored::kE4M3) scales.above = static_cast<float*>(above.data()), scales.per_above = per_above;
    what += " stored " + std::to_string(static_cast<int>(scales.stored_as));
    what += " grid " + std::to_string(grid) + (shifted ? " shifted" : "");
    what += with_theta ? " theta " + std::to_string(static_cast<int>(theta_dtype)) : "";
  }
};

void* const stream = reinterpret_cast<void*>(0x1234);

void test_effective_scale() {
  ScaledCase c("effective_scale", chance(0.8));
  Result out(c.count, 4, below(3));
  cpu::effective_scale(c.scales, static_cast<float*>(out.cpu.data()));
  cuda::effective_scale(c.scales, static_cast<float*>(out.cuda.data()), stream);
  out.compare("scale", Dtype::kFloat32);
}

void test_quantize() {
  ScaledCase c("quantize", chance(0.5));
  const bool masked = chance(0.6);
  const bool valued = chance(0.5);
  what += std::string(masked ? " with mask" : "") + (valued ? " with values" : "");
  Result codes(c.numel, 1, any_offset()), mask((c.numel + 7) / 8, 1, below(3));
  Result values(c.numel, size_of(c.dtype), any_offset());
  auto* cpu_mask = masked ? static_cast<uint8_t*>(mask.cpu.data()) : nullptr;
  auto* cuda_mask = masked ? static_cast<uint8_t*>(mask.cuda.data()) : nullptr;
  Result effective(c.count, 4, below(3));
  const bool scaled = chance(0.5);
  cpu::quantize(c.x.data(), c.dtype, c.scales, c.grid, codes.cpu.data(), cpu_mask,
                valued ? values.cpu.data() : nullptr, scaled ? static_cast<float*>(effective.cpu.data()) : nullptr);
  cuda::quantize(c.x.data(), c.dtype, c.scales, c.grid, codes.cuda.data(), cuda_mask,
                 valued ? values.cuda.data() : nullptr, scaled ? static_cast<float*>(effective.cuda.data()) : nullptr,
                 stream);
  codes.compare("codes");
  if (scaled) effective.compare("scales beside codes", Dtype::kFloat32);
  if (valued) values.compare("values", c.dtype);
  if (!masked) return;
  mask.compare("mask");

  Result out(c.numel, size_of(c.dtype), any_offset());
  cpu::masked(c.grad.data(), cpu_mask, c.dtype, c.numel, out.cpu.data());
  cuda::masked(c.grad.data(), cuda_mask, c.dtype, c.numel, out.cuda.data(), stream);
  out.compare("masked");

  Result values_too(c.numel, size_of(c.dtype), any_offset()), grad(c.numel, size_of(c.dtype), any_offset());
  memcpy(grad.cpu.data(), c.grad.data(), c.numel * size_of(c.dtype));
  memcpy(grad.cuda.data(), c.grad.data(), c.numel * size_of(c.dtype));
  cpu::dequantize_and_mask(codes.cpu.data(), c.scales, c.grid, c.dtype, values_too.cpu.data(), grad.cpu.data(), cpu_mask);
  cuda::dequantize_and_mask(codes.cpu.data(), c.scales, c.grid, c.dtype, values_too.cuda.data(), grad.cuda.data(),
                            cpu_mask, stream);
  values_too.compare("dequantised while masking", c.dtype);
  grad.compare("masked while dequantising");
}

void test_dequantize() {
  ScaledCase c("dequantize", chance(0.5));
  Buffer codes(c.numel, 1, any_offset(), 0);
  for (int64_t i = 0; i < c.numel; ++i) static_cast<uint8_t*>(codes.data())[i] = static_cast<uint8_t>(below(256));
  Result out(c.numel, size_of(c.dtype), any_offset());
  Result zeros(c.count, size_of(c.theta_dtype), below(3));
  const bool zeroed = c.scales.theta != nullptr && chance(0.5);
  cpu::dequantize(codes.data(), c.scales, c.grid, c.dtype, out.cpu.data(), zeroed ? zeros.cpu.data() : nullptr);
  cuda::dequantize(codes.data(), c.scales, c.grid, c.dtype, out.cuda.data(), zeroed ? zeros.cuda.data() : nullptr, stream);
  out.compare("dequantized", c.dtype);
  if (!zeroed) return;
  zeros.compare("zeros");
  for (int64_t i = 0; i < c.count; ++i)
    if (bits_of(get(zeros.cpu, c.theta_dtype, i)) != 0) fail("a zero is none");
}

void test_fake_quantize() {
  ScaledCase c("fake_quantize", chance(0.5));
  Result out(c.numel, size_of(c.dtype), any_offset());
  cpu::fake_quantize(c.x.data(), c.dtype, c.scales, c.grid, out.cpu.data());
  cuda::fake_quantize(c.x.data(), c.dtype, c.scales, c.grid, out.cuda.data(), stream);
  out.compare("fake-quantised", c.dtype);
}

// Of the runs of a case, on a stream that is sometimes captured: the number of launches since `before` is to be one, but
// where counts that outlive a launch cannot be used.
struct Reduction {
  bool captured = emulation::machine.capturing = chance(0.2);
  int before = emulation::machine.launches;

  void check(const Case& c) {
    emulation::machine.capturing = false;
    const int expected = c.block > kSegment && captured ? 2 : 1, found = emulation::machine.launches - before;
    if (found != expected) fail(std::to_string(found) + " launches, expected " + std::to_string(expected));
    for (const auto& counts : cuda::segments_done)
      for (uint32_t count : counts)
        if (count != 0) fail("a count is left");
  }
};

void test_backward() {
  const bool learned = chance(0.8), of_weight = chance(0.5);
  ScaledCase c("fake_quantize_backward", learned);
  const int64_t sums = c.count * segments_of(c.block);
  Result grad_x(c.numel, size_of(c.dtype), any_offset());
  Result grad_theta(c.count, size_of(c.theta_dtype), below(3)), partial(sums, 4, below(3));
  cpu::fake_quantize_backward(c.grad.data(), c.x.data(), c.dtype, c.scales, c.grid, 0.37f, of_weight,
                              grad_x.cpu.data(), static_cast<float*>(partial.cpu.data()),
                              learned ? grad_theta.cpu.data() : nullptr);
  Reduction reduction;
  cuda::fake_quantize_backward(c.grad.data(), c.x.data(), c.dtype, c.scales, c.grid, 0.37f, of_weight,
                               grad_x.cuda.data(), static_cast<float*>(partial.cuda.data()),
                               learned ? grad_theta.cuda.data() : nullptr,
                               stream);
  if (learned) reduction.check(c);
  grad_x.compare("grad_x", c.dtype);
  if (learned) grad_theta.compare("grad_theta", c.theta_dtype);
}

void test_amax() {
  Case c("amax");
  Result out(c.count, 4, below(3)), partial(c.count * segments_of(c.block), 4, below(3));
  cpu::amax(c.x.data(), c.dtype, c.count, c.block, static_cast<float*>(partial.cpu.data()),
            static_cast<float*>(out.cpu.data()));
  Reduction reduction;
  cuda::amax(c.x.data(), c.dtype, c.count, c.block, static_cast<float*>(partial.cuda.data()),
             static_cast<float*>(out.cuda.data()), stream);
  reduction.check(c);
  out.compare("amax", Dtype::kFloat32);
}

void test_tokens() {
  Case c("tokens");
  const int grid = c.block <= kShortToken && chance(0.5) ? 1 : one_of({0, 0, 4, 8, 8});
  const bool symmetric = grid <= 1 || chance(0.5);
  float above = static_cast<float>(500.0 * std::exp(2.0 * normal()));
  Tokens tokens{c.count, c.block, grid, symmetric};
  if (grid <= 1 && chance(0.5)) tokens.stored_as = Stored::kE8M0;
  if (grid == 1 && tokens.stored_as != Stored::kE8M0) tokens.stored_as = Stored::kE4M3, tokens.above = &above;
  what += " grid " + std::to_string(grid) + (symmetric ? " symmetric" : "");
  what += " stored " + std::to_string(static_cast<int>(tokens.stored_as));
  if (chance(0.1))
    for (int64_t i = 0; i < c.block; ++i) put(c.x, c.dtype, i, one_of({0.0, -0.0}));
  Result codes(c.numel, 1, any_offset()), scale(c.count, 4, below(3)), zero_point(c.count, 1, below(3));
  cpu::quantize_tokens(c.x.data(), c.dtype, tokens, codes.cpu.data(), static_cast<float*>(scale.cpu.data()), static_cast<int8_t*>(zero_point.cpu.data()));
  cuda::quantize_tokens(c.x.data(), c.dtype, tokens, codes.cuda.data(), static_cast<float*>(scale.cuda.data()), static_cast<int8_t*>(zero_point.cuda.data()), stream);
  codes.compare("codes");
  scale.compare("scale", Dtype::kFloat32);
  zero_point.compare("zero point");

  if (grid <= 1 && c.block % 8 == 0) {
    const bool masked = chance(0.5);
    const int64_t bytes = grid == 1 ? c.numel / 2 : c.numel, size = tokens.stored_as == Stored::kFloat32 ? 4 : 1;
    Result values(c.numel, size_of(c.dtype), any_offset()), kept(bytes, 1, any_offset());
    Result mask(c.numel / 8, 1, below(3)), scales(c.count, size, below(3));
    const auto byte = [](Buffer& buffer) { return static_cast<uint8_t*>(buffer.data()); };
    cpu::keep_tokens(c.x.data(), c.dtype, tokens, values.cpu.data(), byte(kept.cpu), masked ? byte(mask.cpu) : nullptr,
                     scales.cpu.data());
    cuda::keep_tokens(c.x.data(), c.dtype, tokens, values.cuda.data(), byte(kept.cuda),
                      masked ? byte(mask.cuda) : nullptr, scales.cuda.data(), stream);
    values.compare("kept values", c.dtype);
    kept.compare("kept codes");
    scales.compare("kept scales");
    if (masked) mask.compare("kept mask");
  }

  Result out(c.numel, size_of(c.dtype), any_offset()), grad_x(c.numel, size_of(c.dtype), any_offset());
  cpu::fake_quantize_tokens(c.x.data(), c.dtype, tokens, out.cpu.data(), nullptr);
  cuda::fake_quantize_tokens(c.x.data(), c.dtype, tokens, out.cuda.data(), nullptr, stream);
  out.compare("fake-quantised", c.dtype);
  cpu::fake_quantize_tokens_backward(c.grad.data(), c.x.data(), c.dtype, tokens,
                                     grad_x.cpu.data());
  cuda::fake_quantize_tokens_backward(c.grad.data(), c.x.data(), c.dtype, tokens,
                                      grad_x.cuda.data(), stream);
  grad_x.compare("grad_x", c.dtype);

  const bool valued = chance(0.5);
  Result values(c.numel, size_of(c.dtype), any_offset()), grad(c.numel, size_of(c.dtype), any_offset());
  for (Buffer* one : {&grad.cpu, &grad.cuda}) memcpy(one->data(), c.grad.data(), c.numel * size_of(c.dtype));
  cpu::fake_quantize_tokens(c.x.data(), c.dtype, tokens, valued ? values.cpu.data() : nullptr, grad.cpu.data());
  cuda::fake_quantize_tokens(c.x.data(), c.dtype, tokens, valued ? values.cuda.data() : nullptr, grad.cuda.data(), stream);
  grad.compare("masked", c.dtype);
  if (memcmp(grad.cpu.data(), grad_x.cpu.data(), grad.cpu.bytes()) != 0) fail("both masked gradients differ");
  if (!valued) return;
  values.compare("fake-quantised while masking", c.dtype);
  if (memcmp(values.cpu.data(), out.cpu.data(), out.cpu.bytes()) != 0) fail("both values differ");
}

void test_sum_rows() {
  Case c("sum_rows");
  const int64_t sums = below(20), per_sum = below(9);
  what += " into " + std::to_string(sums) + " x " + std::to_string(per_sum);
  Buffer places(sums * per_sum, 8, below(3), 0);
  for (int64_t i = 0; i < sums * per_sum; ++i) static_cast<int64_t*>(places.data())[i] = below(c.count);
  Result out(sums * c.block, size_of(c.dtype), any_offset());
  const auto* at = static_cast<int64_t*>(places.data());
  cpu::sum_rows(c.x.data(), at, c.dtype, sums, per_sum, c.block, out.cpu.data());
  cuda::sum_rows(c.x.data(), at, c.dtype, sums, per_sum, c.block, out.cuda.data(), stream);
  out.compare("sums", c.dtype);
}

// Rows of a multiple of eight, at most a segment, with one scale.
struct NormCase : ScaledCase {
  int64_t features = std::min<int64_t>(kSegment, (block + 7) / 8 * 8), rows = numel / features;
  Buffer weight{features, size_of(dtype), any_offset(), 0};

  explicit NormCase(const char* name) : ScaledCase(name, false) {
    what += " rows " + std::to_string(rows);
    scales = {scales.s0, nullptr, Dtype::kFloat32, Stored::kFloat32, 1, rows * features};
    for (int64_t i = 0; i < features; ++i) put(weight, dtype, i, 1.0 + 0.3 * normal());
  }
};

void test_norms() {
  NormCase c("norms");
  if (c.rows == 0) return;
  const int64_t numel = c.rows * c.features, size = size_of(c.dtype);
  const bool valued = chance(0.5), masked = chance(0.8);
  Result codes(numel, 1, any_offset()), mask(numel / 8, 1, below(3)), values(numel, size, any_offset());
  Result rstd(c.rows, 4, below(3));
  cpu::rms_norm_quantize(c.x.data(), c.weight.data(), c.dtype, c.rows, c.features, 1e-6f, c.scales, c.grid,
                         codes.cpu.data(), masked ? static_cast<uint8_t*>(mask.cpu.data()) : nullptr,
                         valued ? values.cpu.data() : nullptr, static_cast<float*>(rstd.cpu.data()));
  cuda::rms_norm_quantize(c.x.data(), c.weight.data(), c.dtype, c.rows, c.features, 1e-6f, c.scales, c.grid,
                          codes.cuda.data(), masked ? static_cast<uint8_t*>(mask.cuda.data()) : nullptr,
                          valued ? values.cuda.data() : nullptr, static_cast<float*>(rstd.cuda.data()), stream);
  rstd.compare("rstd", Dtype::kFloat32);
  codes.compare("codes");
  if (valued) values.compare("values", c.dtype);
  if (masked) mask.compare("mask");

  Buffer inside(numel / 8, 1, below(3), 0);
  for (int64_t i = 0; i < numel / 8; ++i) static_cast<uint8_t*>(inside.data())[i] = static_cast<uint8_t>(random_bits());
  const bool weighted = chance(0.8);
  Result grad_x(numel, size, any_offset()), partial(sums_of_rows(c.rows) * c.features, 4, below(3));
  Result grad_weight(c.features, size, any_offset());
  const auto* r = static_cast<float*>(rstd.cpu.data());
  const auto* bits = static_cast<uint8_t*>(inside.data());
  cpu::rms_norm_backward(c.grad.data(), c.x.data(), c.weight.data(), r, bits, c.dtype, c.rows, c.features,
                         grad_x.cpu.data(), weighted ? static_cast<float*>(partial.cpu.data()) : nullptr,
                         weighted ? grad_weight.cpu.data() : nullptr);
  cuda::rms_norm_backward(c.grad.data(), c.x.data(), c.weight.data(), r, bits, c.dtype, c.rows, c.features,
                          grad_x.cuda.data(), weighted ? static_cast<float*>(partial.cuda.data()) : nullptr,
                          weighted ? grad_weight.cuda.data() : nullptr, stream);
  grad_x.compare("grad_x", c.dtype);
  if (weighted) grad_weight.compare("grad_weight", c.dtype);
}

void test_swiglu() {
  ScaledCase c("swiglu", false);
  const int64_t size = size_of(c.dtype);
  c.scales = {c.scales.s0, nullptr, Dtype::kFloat32, Stored::kFloat32, 1, c.numel};
  const bool valued = chance(0.5);
  Result codes(c.numel, 1, any_offset()), mask((c.numel + 7) / 8, 1, below(3)), values(c.numel, size, any_offset());
  cpu::silu_mul_quantize(c.x.data(), c.grad.data(), c.dtype, c.scales, c.grid, codes.cpu.data(),
                         static_cast<uint8_t*>(mask.cpu.data()), valued ? values.cpu.data() : nullptr);
  cuda::silu_mul_quantize(c.x.data(), c.grad.data(), c.dtype, c.scales, c.grid, codes.cuda.data(),
                          static_cast<uint8_t*>(mask.cuda.data()), valued ? values.cuda.data() : nullptr, stream);
  codes.compare("codes");
  mask.compare("mask");
  if (valued) values.compare("values", c.dtype);
  Result grad_gate(c.numel, size, any_offset()), grad_up(c.numel, size, any_offset());
  const auto* bits = static_cast<uint8_t*>(mask.cpu.data());
  cpu::silu_mul_backward(c.grad.data(), c.x.data(), c.grad.data(), bits, c.dtype, c.numel, grad_gate.cpu.data(),
                         grad_up.cpu.data());
  cuda::silu_mul_backward(c.grad.data(), c.x.data(), c.grad.data(), bits, c.dtype, c.numel, grad_gate.cuda.data(),
                          grad_up.cuda.data(), stream);
  grad_gate.compare("grad_gate", c.dtype);
  grad_up.compare("grad_up", c.dtype);
}

void test_quantize_gradient() {
  Case c("quantize_gradient");
  const int64_t rows = c.count, columns = c.block, length = whole_row(rows);
  const int grid = chance(0.5) ? kE5M2Grid : kE4M3Grid;
  what += " grid " + std::to_string(grid);
  float largest, partial[8];
  cpu::amax(c.grad.data(), c.dtype, 1, c.numel, partial, &largest);
  Result codes(c.numel, 1, any_offset()), scale(1, 4, below(3));
  Result transposed(columns * length, 1, 8 * below(2)), again(columns * length, 1, 8 * below(2));
  cpu::quantize_gradient(c.grad.data(), c.dtype, grid, rows, columns, &largest, codes.cpu.data(), transposed.cpu.data(),
                         static_cast<float*>(scale.cpu.data()));
  cuda::quantize_gradient(c.grad.data(), c.dtype, grid, rows, columns, &largest, codes.cuda.data(),
                          transposed.cuda.data(), static_cast<float*>(scale.cuda.data()), stream);
  codes.compare("codes");
  transposed.compare("transposed codes");
  scale.compare("scale", Dtype::kFloat32);
  cpu::transpose_codes(codes.cpu.data(), rows, columns, again.cpu.data());
  cuda::transpose_codes(codes.cuda.data(), rows, columns, again.cuda.data(), stream);
  again.compare("codes that were transposed");
  if (memcmp(again.cpu.data(), transposed.cpu.data(), again.cpu.bytes()) != 0) fail("both transposes differ");
}

void test_quantize_transposed() {
  ScaledCase c("quantize_transposed", chance(0.5));
  const int64_t rows = c.count, columns = c.block;
  const Scales one{c.scales.s0, c.scales.theta, c.theta_dtype, Stored::kFloat32, 1, c.numel};
  Result transposed(columns * whole_row(rows), 1, 8 * below(2)), scale(1, 4, below(3));
  cpu::quantize_transposed(c.x.data(), c.dtype, one, rows, columns, transposed.cpu.data(),
                           static_cast<float*>(scale.cpu.data()));
  cuda::quantize_transposed(c.x.data(), c.dtype, one, rows, columns, transposed.cuda.data(),
                            static_cast<float*>(scale.cuda.data()), stream);
  transposed.compare("transposed codes");
  scale.compare("scale", Dtype::kFloat32);
}

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
  const Op op{{nullptr, nullptr, nullptr, E4M3{}, false}, sums, grad_theta.cuda.data(), 0.37f};
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
      {25, test_backward},       {10, test_amax},     {15, test_tokens},     {1, test_partials},
      {10, test_sum_rows},       {25, test_norms},    {10, test_swiglu},    {100, test_divisor},
      {1, test_errors},          {15, test_quantize_gradient},              {15, test_quantize_transposed},
      {1, test_counts},
  };
  const int rounds = std::atoi(arguments[2]);
  for (int round = 0; round < rounds; ++round)
    for (const auto& [times, test] : tests)
      for (int i = 0; i < times; ++i) test();
  if (emulation::machine.stream != stream) fail("launched on another stream");
}
