// conversions STEP: compares every STEPth fp32 bit pattern's conversions by arithmetic.h with those that the kernels
// leave to the GPU's instructions, as CUDA's headers define them for machines that lack the instructions. Ends with
// status 1 where they differ.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdio>
#include <cstdlib>

#include "arithmetic.h"

using namespace deepqat;

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

float value_of(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

int main(int, char** arguments) {
  const uint64_t step = std::strtoull(arguments[1], nullptr, 10);
  const E4M3 grid;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step) {
    const float x = float_of(static_cast<uint32_t>(bits));
    const uint8_t code = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    const float rounded = grid.round(x);

    const __nv_bfloat16 converted = __float2bfloat16_rn(x);
    int16_t stored;
    memcpy(&stored, &converted, sizeof stored);
    stored = stored > 0x7fc0 ? 0x7fc0 : stored;  // what the kernels do about NaN
    BFloat16 ours;
    store(x, &ours);

    if (code != grid.quantized(x) || !same(value_of(code), rounded) || !same(value_of(code), grid.decode(code)) ||
        static_cast<uint16_t>(stored) != ours.bits) {
      std::fprintf(stderr, "0x%08x: code %d and bf16 0x%04x, by arithmetic.h %d and 0x%04x\n", bits_of(x), code,
                   static_cast<unsigned>(static_cast<uint16_t>(stored)), grid.quantized(x), ours.bits);
      return 1;
    }
  }
}
