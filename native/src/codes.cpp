#include "ssdtune/codes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace ssdtune {
namespace {

constexpr std::int32_t kNoSign = 0x7fffffff;
constexpr std::int32_t kOne = 0x3f800000;  // the bits of 1.0
constexpr std::int32_t kSignedZero = 127;  // the signed code of 0

// Codes are counted upwards from the code of 0: their places. With n = 2^i codes in decade i of a
// signed table they are n ... 2 n - 1, so a place's exponent as a float tells its decade, and 1.0
// is at 128. An unsigned table has twice as many; it has nothing at place 1, and so its codes are
// places less one. ssdtune/optim/codes.py has the same arithmetic.
struct Table {
  // From places to values, by the low bits of the place's exponent: (place + offset) * factor.
  float offset[16], factor[16];
  // From values to places, by decade (the seventh is 1.0 alone): value * slope + intercept, rounded
  // down, but at most `last`; decades begin at `threshold`, halfway between two codes.
  float threshold[16], slope[16], intercept[16], last[16];
};

constexpr double kDecade[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};

constexpr Table make_table(bool with_sign) {
  Table table{};
  for (int k = 0; k < 16; ++k) {
    const int i = k % 8;
    const double n = with_sign ? 1 << i : 2 << i;
    const int exponent = (127 + i + (with_sign ? 0 : 1)) % 8 + k / 8 * 8;
    if (i == 7) {
      table.offset[exponent] = 0;
      table.factor[exponent] = static_cast<float>(1 / n);
      table.threshold[k] = static_cast<float>(1 - 0.45 / n);
      table.slope[k] = 0;
      table.intercept[k] = static_cast<float>(n);
      table.last[k] = static_cast<float>(n);
      continue;
    }
    const double top = kDecade[i];
    table.offset[exponent] = static_cast<float>(0.5 - 8 * n / 9);
    table.factor[exponent] = static_cast<float>(0.9 * top / n);
    table.threshold[k] = i == 0 ? 0 : static_cast<float>(0.1 * top * (1 + 1.8 / n));
    table.slope[k] = static_cast<float>(n / (0.9 * top));
    table.intercept[k] = static_cast<float>(8 * n / 9);
    table.last[k] = static_cast<float>(2 * n - 1);
    if (with_sign && i == 0) {  // the only code of its decade, from halfway to 0
      table.slope[k] = static_cast<float>(1 / (0.275 * top));
      table.intercept[k] = 0;
    }
  }
  return table;
}

constexpr Table kSigned = make_table(true);
constexpr Table kUnsigned = make_table(false);

// The decade from a float's bits: 7.3 + log2(value) / 3.2 is from 0 to 0.5 above it at each
// threshold.
constexpr float kGuessSlope = 1.0F / (3.2F * (1 << 23));
constexpr float kGuessOffset = 7.3F - 127 / 3.2F;

namespace baseline {
#define SSDTUNE_LANES 1
#include "ssdtune/codes_loops.h"
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#define SSDTUNE_LANES 8
#include "ssdtune/codes_loops.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define SSDTUNE_LANES 16
#include "ssdtune/codes_loops.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

}  // namespace

constexpr CodeLoops kCodesBaseline = baseline::kLoops;
#if defined(__x86_64__)
constexpr CodeLoops kCodesAvx2 = avx2::kLoops;
constexpr CodeLoops kCodesAvx512 = avx512::kLoops;
#endif

}  // namespace ssdtune
