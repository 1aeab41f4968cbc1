#include "ssdtune/codes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12, of registers left undefined there
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define SSDTUNE_INLINE static inline __attribute__((always_inline))

namespace ssdtune {
namespace {

constexpr std::uint32_t kSign = 0x80000000;
constexpr std::uint32_t kNoSign = 0x7fffffff;
constexpr std::uint32_t kNotFinite = 0x7f800000;
constexpr std::uint32_t kHalf = 0x3f000000;  // the bits of 0.5
constexpr int kSignedZero = 127;             // the signed code of 0
constexpr float kTwo23 = 1 << 23;
constexpr float kTwo24 = 1 << 24;
constexpr float kEightNinths = 8.0F / 9;
constexpr float kBelowTwo = 2 - std::numeric_limits<float>::epsilon();

// How far ahead memory is fetched, in elements; as for moments in fp32.
constexpr std::size_t kAhead = 512;

// Codes are counted upwards from the code of 0: their places. With n = 2^i codes in decade i of a
// signed table they are n ... 2 n - 1, so a place's exponent as a float tells its decade, and 1.0
// is at 128. An unsigned table has twice as many; it has nothing at place 1, and so its codes are
// places less one. ssdtune/optim/codes.py has the arithmetic in its plain form; here it is arranged
// so that little has to be looked up, and gives the same bits.
//
// Decoding: a place's value is (place + offset) * factor; offset and factor by the low three bits
// of the place's exponent. Signed places are doubled, so that those of 0 and of the smallest code
// have the same bits, and no offset; unsigned 0 (place 1) and 1 (place 256) also share an entry.
//
// Encoding: divided by its decade's n, a place is value * rate + 8/9, from 1 to 2, of which the
// first i (unsigned: i + 1) bits behind the leading one count, rounded down. So the number of bits
// to cut off tells the decade, and what belongs to a decade is kept by that number's low three
// bits. `coarse_shift` finds it, or one too few, from the upper half of the value's bits, which
// grow like its logarithm; `threshold`, halfway between two codes, tells which.
struct Table {
  alignas(64) float offset[16];  // tables of eight are kept twice, to fill registers of sixteen
  alignas(64) float factor[16];
  alignas(64) float threshold[16];
  alignas(64) float rate[16];
  std::uint32_t start;  // for coarse_shift: upper half only
};

constexpr double kDecade[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
// 65536 / 154 / 128 powers of 2 are 1.001 powers of 10.
constexpr std::uint32_t kCoarseStep = 154;

constexpr Table make_table(bool with_sign) {
  Table table{};
  for (int k = 0; k < 16; ++k) {
    const int i = k % 8;  // the eighth decade is 1.0 alone
    const float n = static_cast<float>(with_sign ? 1 << i : 2 << i);
    const float doubled = with_sign ? 2 : 1;
    float& offset = table.offset[k];
    float& factor = table.factor[k];
    const int shift = (with_sign ? 23 : 22) - i;
    float& threshold = table.threshold[shift % 8 + k / 8 * 8];
    float& rate = table.rate[shift % 8 + k / 8 * 8];
    if (i == 7) {
      offset = with_sign ? 0 : -1;
      factor = with_sign ? 1 / (n * doubled) : 1.0F / 255;
      threshold = static_cast<float>(1 - 0.45 / n);
      rate = (1.0F / 9 + 0.3F / n);  // anything that gives place n
      continue;
    }
    const double top = kDecade[i];
    offset = static_cast<float>(0.5 - 8.0 * n / 9) * doubled;
    factor = static_cast<float>(0.9 * top / n) / doubled;
    threshold = i == 0 ? 0 : static_cast<float>(0.1 * top * (1 + 1.8 / n));
    rate = static_cast<float>(n / (0.9 * top)) / n;
    if (with_sign && i == 0) {
      // One code, at 0.55e-6: the rate makes its cell begin halfway to 0, at the same float as
      // rounding 1 / 0.275e-6 does.
      factor *= 1 + static_cast<float>(0.5 - 8.0 / 9);
      offset = 0;
      rate = 404040.281F;
    }
  }
  table.start = (with_sign ? 23278U : 22852U) << 16;
  return table;
}

constexpr Table kSigned = make_table(true);
constexpr Table kUnsigned = make_table(false);

float scale_of(std::uint32_t largest) {
  const auto scale = std::bit_cast<float>(largest);
  return scale < std::numeric_limits<float>::min() ? 0.0F : scale;
}

// What a block's values are multiplied by to be from 0 to 1, with the largest one's bits. If a
// value is not finite the scale is not either; then these values count as 1 and all others as 0.
float inverse_scale(float* values, std::uint32_t& largest) {
  if (largest < kNotFinite) {
    const float scale = scale_of(largest);
    return scale > 0 ? 1 / scale : 0;
  }
  largest = 0;
  for (std::size_t i = 0; i < kCodeBlock; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(values[i]) & kNoSign;
    largest = std::max(largest, bits);
    values[i] = bits < kNotFinite ? 0.0F : 1.0F;
  }
  return 1;
}

constexpr std::uint32_t kHash[] = {0x7feb352d, 0x846ca68b};

// The hash of random_bits() in adam.cpp up to its first product, for a block: products + rest.
class RandomBits {
 public:
  explicit RandomBits(const Rounding& rounding) : rounding_(rounding) {}

  void seek(std::uint32_t first) {
    const std::uint32_t index = rounding_.first + first;
    if (index % kCodeBlock != 0) {
      for (std::uint32_t i = 0; i < kCodeBlock; ++i) {
        const std::uint32_t x = (index + i) ^ rounding_.key[0];
        products[i] = (x ^ (x >> 16)) * kHash[0];
      }
      rest = rounding_.key[1];
      low_ = kCodeBlock;
      return;
    }
    // x >> 16 is the same for the whole block, and what is left of x is a sum: of bits above an
    // element's number in the block and of the others. So is the product, and few blocks need new
    // products.
    const std::uint32_t fixed = rounding_.key[0] ^ ((index ^ rounding_.key[0]) >> 16);
    rest = ((index ^ fixed) & ~0xffU) * kHash[0] + rounding_.key[1];
    if (low_ == (fixed & 0xff)) return;
    low_ = fixed & 0xff;
    for (std::uint32_t i = 0; i < kCodeBlock; ++i) products[i] = (i ^ low_) * kHash[0];
  }

  alignas(64) std::uint32_t products[kCodeBlock];
  std::uint32_t rest = 0;

 private:
  const Rounding rounding_;
  std::uint32_t low_ = kCodeBlock;  // that products are for
};

template <typename T>
SSDTUNE_INLINE void prefetch(const T* start, std::size_t size) {
  constexpr std::size_t kLine = 64 / sizeof(T);
  for (std::size_t i = 0; i < size; i += kLine) __builtin_prefetch(start + i);
}

namespace baseline {
#include "ssdtune/lanes_1.h"
// Their order matters.
#include "ssdtune/coded_update.h"
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "ssdtune/lanes_8.h"
// Their order matters.
#include "ssdtune/coded_update.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#include "ssdtune/lanes_16.h"
// Their order matters.
#include "ssdtune/coded_update.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

}  // namespace

constexpr CodedKernels kCodedBaseline = baseline::kKernels;
#if defined(__x86_64__)
constexpr CodedKernels kCodedAvx2 = avx2::kKernels;
constexpr CodedKernels kCodedAvx512 = avx512::kKernels;
#endif

}  // namespace ssdtune
