// Random tensors and scales for both backends, and the comparison of their results bit for bit.

#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "cpu/quantizers.cpp"
#include "cuda/quantizers.cu"
#include "cuda/fused.cu"
#include "cpu/fused.cpp"

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

  // Both backends overwrite what is given.
  void start(Buffer& given) {
    std::memcpy(cpu.data(), given.data(), cpu.bytes());
    std::memcpy(cuda.data(), given.data(), cpu.bytes());
  }

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

// A pointer to data of any type.
struct Pointer {
  void* data;

  template <typename T>
  operator T*() const {
    return static_cast<T*>(data);
  }
};

void* const stream = reinterpret_cast<void*>(0x1234);

// Run a kernel on both backends. In its arguments, at(result) is the result's memory of one backend, and
// at(result, wanted) null unless wanted.
#define ON_BOTH(kernel, ...)                                                                                    \
  do {                                                                                                          \
    {                                                                                                           \
      const auto at = [](Result& one, bool wanted = true) { return Pointer{wanted ? one.cpu.data() : nullptr}; };  \
      cpu::kernel(__VA_ARGS__);                                                                                 \
    }                                                                                                           \
    {                                                                                                           \
      const auto at = [](Result& one, bool wanted = true) { return Pointer{wanted ? one.cuda.data() : nullptr}; }; \
      cuda::kernel(__VA_ARGS__, stream);                                                                        \
    }                                                                                                           \
  } while (false)

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

}  // namespace
