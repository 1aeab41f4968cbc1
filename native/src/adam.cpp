#include "ssdtune/adam.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>

#include "ssdtune/codes.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

// One source for all instruction sets: the loops below are inlined into one function per set, where
// the compiler vectorizes them for it. They are simple enough for that, and equal bits come for
// free.
#define SSDTUNE_INLINE inline __attribute__((always_inline))

namespace ssdtune {
namespace {

// Elements of one piece, and how far ahead the next ones are fetched. Measured on a Xeon with
// AVX-512, one thread: 1.2 ns a parameter instead of 1.4; sums 0.37 instead of 0.54.
constexpr std::size_t kPiece = 64;
constexpr std::size_t kAhead = 512;

constexpr std::size_t kMinPerThread = std::size_t{1} << 18;

// Blocks and lanes give the sum its fixed order. The numpy form has the same two numbers.
constexpr std::size_t kBlock = std::size_t{1} << 16;
constexpr std::size_t kLanes = 16;

// Exponents of all ones: infinities and NaNs.
constexpr std::uint32_t kNotFinite = 0x7f800000;
// From here on the high half rounds to infinity.
constexpr std::uint32_t kHighNotFinite = 0x7f7f8000;
// Above the largest bfloat16, where chance decides.
constexpr std::uint32_t kRoundedNotFinite = 0x7f7f0001;
constexpr std::uint32_t kNoSign = 0x7fffffff;

SSDTUNE_INLINE float root(float value) { return __builtin_sqrtf(value); }

#include "ssdtune/new_weight.h"

// Updates elements [first, first + size) of whole masters; returns the largest absolute value's
// bits. The moments start at the first of these elements.
SSDTUNE_INLINE std::uint32_t update_masters(const AdamArrays& a, std::size_t first,
                                            std::size_t size, float* __restrict__ exp_avg,
                                            float* __restrict__ exp_avg_sq, const AdamScalars& s) {
  float* __restrict__ weights = a.master + first;
  const float* __restrict__ grad = a.grad + first;
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const float weight = new_weight(weights[i], grad[i], exp_avg[i], exp_avg_sq[i], s);
    largest = std::max(largest, std::bit_cast<std::uint32_t>(weight) & kNoSign);
    weights[i] = weight;
  }
  return largest;
}

// The same for masters in two halves.
SSDTUNE_INLINE std::uint32_t update_halves(const AdamArrays& a, std::size_t first, std::size_t size,
                                           float* __restrict__ exp_avg,
                                           float* __restrict__ exp_avg_sq, const AdamScalars& s) {
  std::uint16_t* __restrict__ high = a.high + first;
  std::int16_t* __restrict__ low = a.low + first;
  const float* __restrict__ grad = a.grad + first;
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint32_t old = (static_cast<std::uint32_t>(high[i]) << 16) +
                              static_cast<std::uint32_t>(std::int32_t{low[i]});
    const float weight =
        new_weight(std::bit_cast<float>(old), grad[i], exp_avg[i], exp_avg_sq[i], s);
    const auto bits = std::bit_cast<std::uint32_t>(weight);
    largest = std::max(largest, bits & kNoSign);
    const std::uint32_t upper = (bits + 0x8000U) >> 16;
    high[i] = static_cast<std::uint16_t>(upper);
    low[i] = static_cast<std::int16_t>(bits - (upper << 16));
  }
  return largest;
}

// Sixteen random bits for an element; ssdtune/optim/rounding.py has the same hash.
SSDTUNE_INLINE std::uint32_t random_bits(std::uint32_t index, std::uint32_t key0,
                                         std::uint32_t key1) {
  std::uint32_t x = index ^ key0;
  x = (x ^ (x >> 16)) * 0x7feb352dU + key1;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x >> 16;
}

// The same for bfloat16 weights: the random bits are added to those that are then cut off.
SSDTUNE_INLINE std::uint32_t update_rounded(const AdamArrays& a, std::size_t first,
                                            std::size_t size, float* __restrict__ exp_avg,
                                            float* __restrict__ exp_avg_sq, const AdamScalars& s) {
  std::uint16_t* __restrict__ weights = a.high + first;
  const float* __restrict__ grad = a.grad + first;
  const std::uint32_t index = a.rounding.first + static_cast<std::uint32_t>(first);
  const std::uint32_t key0 = a.rounding.key[0];
  const std::uint32_t key1 = a.rounding.key[1];
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const auto old = std::bit_cast<float>(static_cast<std::uint32_t>(weights[i]) << 16);
    const float weight = new_weight(old, grad[i], exp_avg[i], exp_avg_sq[i], s);
    const auto bits = std::bit_cast<std::uint32_t>(weight);
    largest = std::max(largest, bits & kNoSign);
    const std::uint32_t random = random_bits(index + static_cast<std::uint32_t>(i), key0, key1);
    weights[i] = static_cast<std::uint16_t>((bits + random) >> 16);
  }
  return largest;
}

template <Weights kWeights>
SSDTUNE_INLINE std::uint32_t update_piece(const AdamArrays& a, std::size_t first, std::size_t size,
                                          float* exp_avg, float* exp_avg_sq, const AdamScalars& s) {
  if constexpr (kWeights == Weights::kMaster) {
    return update_masters(a, first, size, exp_avg, exp_avg_sq, s);
  } else if constexpr (kWeights == Weights::kSplit) {
    return update_halves(a, first, size, exp_avg, exp_avg_sq, s);
  } else {
    return update_rounded(a, first, size, exp_avg, exp_avg_sq, s);
  }
}

template <typename T>
SSDTUNE_INLINE void prefetch(const T* start, std::size_t size) {
  constexpr std::size_t kLine = 64 / sizeof(T);
  for (std::size_t i = 0; i < size; i += kLine) __builtin_prefetch(start + i);
}

// The same in pieces of a fixed size, so that the hardware's prefetchers, which stop at each page,
// get help.
template <Weights kWeights>
SSDTUNE_INLINE std::uint32_t update_range(const AdamArrays& a, std::size_t first, std::size_t size,
                                          float* exp_avg, float* exp_avg_sq, const AdamScalars& s) {
  std::uint32_t largest = 0;
  std::size_t i = 0;
  for (; i + kPiece <= size; i += kPiece) {
    if (const std::size_t ahead = first + i + kAhead; ahead + kPiece <= a.size) {
      if constexpr (kWeights == Weights::kMaster) prefetch(a.master + ahead, kPiece);
      if constexpr (kWeights != Weights::kMaster) prefetch(a.high + ahead, kPiece);
      if constexpr (kWeights == Weights::kSplit) prefetch(a.low + ahead, kPiece);
      prefetch(a.grad + ahead, kPiece);
    }
    if (i + kAhead + kPiece <= size) {
      prefetch(exp_avg + i + kAhead, kPiece);
      prefetch(exp_avg_sq + i + kAhead, kPiece);
    }
    largest = std::max(
        largest, update_piece<kWeights>(a, first + i, kPiece, exp_avg + i, exp_avg_sq + i, s));
  }
  return std::max(largest,
                  update_piece<kWeights>(a, first + i, size - i, exp_avg + i, exp_avg_sq + i, s));
}

// Sum over one block: kLanes partial sums over elements i, i + kLanes, ..., then the lanes in
// order.
SSDTUNE_INLINE double sum_block(const float* values, std::size_t size) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    if (i + 2 * kAhead + kLanes <= size) prefetch(values + i + 2 * kAhead, kLanes);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (std::size_t lane = 0; i + lane < size; ++lane) {
    const double value = values[i + lane];
    lanes[lane] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Updates elements [first, first + size), whose moments are given; returns the largest absolute
// weight's bits.
using Update = std::uint32_t (*)(const AdamArrays&, std::size_t first, std::size_t size,
                                 float* exp_avg, float* exp_avg_sq, const AdamScalars&);

struct Kernels {
  const char* name;
  bool (*supported)();
  Update masters, halves, rounded;
  const CodedKernels& coded;
  double (*sum_block)(const float*, std::size_t);
};

#define SSDTUNE_KERNELS(name, target)                                                           \
  template <Weights kWeights>                                                                   \
  target std::uint32_t update_##name(const AdamArrays& a, std::size_t first, std::size_t size,  \
                                     float* exp_avg, float* exp_avg_sq, const AdamScalars& s) { \
    return update_range<kWeights>(a, first, size, exp_avg, exp_avg_sq, s);                      \
  }                                                                                             \
  target double sum_block_##name(const float* v, std::size_t n) { return sum_block(v, n); }

#define SSDTUNE_ROW(name, supported, coded) \
  {#name,                                   \
   supported,                               \
   update_##name<Weights::kMaster>,         \
   update_##name<Weights::kSplit>,          \
   update_##name<Weights::kRounded>,        \
   coded,                                   \
   sum_block_##name}

SSDTUNE_KERNELS(baseline, )
#if defined(__x86_64__)
SSDTUNE_KERNELS(avx2, __attribute__((target("avx2"))))
#define SSDTUNE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
SSDTUNE_KERNELS(avx512, __attribute__((target(SSDTUNE_AVX512))))

bool has_avx2() { return __builtin_cpu_supports("avx2") != 0; }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}
#endif

constexpr Kernels kKernels[] = {
#if defined(__x86_64__)
    SSDTUNE_ROW(avx512, has_avx512, kCodedAvx512),
    SSDTUNE_ROW(avx2, has_avx2, kCodedAvx2),
#endif
    SSDTUNE_ROW(
        baseline, [] { return true; }, kCodedBaseline),
};

const Kernels& kernels(const std::string& level) {
  for (const Kernels& k : kKernels) {
    if (level == k.name && k.supported()) return k;
  }
  return kKernels[std::size(kKernels) - 1];
}

// Moments in 8 bits. What is left after whole blocks is updated in a block of its own, which is
// filled up with its last element: that changes neither the scales nor what is finite.
Largest update_coded(const AdamArrays& a, const AdamScalars& s, CodedUpdate update) {
  Largest largest = update(a, s);
  const std::size_t whole = a.size / kCodeBlock * kCodeBlock;
  const std::size_t rest = a.size - whole;
  if (rest == 0) return largest;
  float master[kCodeBlock], grad[kCodeBlock];
  std::uint16_t high[kCodeBlock];
  std::int16_t low[kCodeBlock];
  std::uint8_t exp_avg_code[kCodeBlock], exp_avg_sq_code[kCodeBlock];
  AdamArrays block = a;
  block.size = kCodeBlock;
  block.exp_avg_scale += whole / kCodeBlock;
  block.exp_avg_sq_scale += whole / kCodeBlock;
  block.rounding.first += static_cast<std::uint32_t>(whole);
  const auto fill = [&](auto*& array, auto* copy) {
    if (array == nullptr) return;
    for (std::size_t i = 0; i < kCodeBlock; ++i) copy[i] = array[whole + std::min(i, rest - 1)];
    array = copy;
  };
  fill(block.master, master);
  fill(block.high, high);
  fill(block.low, low);
  fill(block.exp_avg_code, exp_avg_code);
  fill(block.exp_avg_sq_code, exp_avg_sq_code);
  fill(block.grad, grad);
  const Largest more = update(block, s);
  const auto take = [&](auto* array, const auto* copy) {
    if (array != nullptr) std::copy_n(copy, rest, array + whole);
  };
  take(a.master, master);
  take(a.high, high);
  take(a.low, low);
  take(a.exp_avg_code, exp_avg_code);
  take(a.exp_avg_sq_code, exp_avg_sq_code);
  return {std::max(largest.weight, more.weight), std::max(largest.scale, more.scale)};
}

// True if all that is new is finite.
bool update(const AdamArrays& a, const AdamScalars& s, const Kernels& k) {
  Update update = k.rounded;
  CodedUpdate coded = k.coded.rounded;
  std::uint32_t limit = kRoundedNotFinite;
  if (a.master != nullptr) {
    update = k.masters;
    coded = k.coded.masters;
    limit = kNotFinite;
  } else if (a.low != nullptr) {
    update = k.halves;
    coded = k.coded.halves;
    limit = kHighNotFinite;
  }
  if (a.exp_avg != nullptr) return update(a, 0, a.size, a.exp_avg, a.exp_avg_sq, s) < limit;
  const Largest largest = update_coded(a, s, coded);
  return largest.weight < limit && largest.scale < kNotFinite;
}

// Plain IEEE arithmetic while it lives, whatever the caller set (torch.set_flush_denormal).
class PlainArithmetic {
 public:
#if defined(__x86_64__)
  PlainArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Calls work(first, last) on consecutive pieces of [0, size), each a multiple of `grain` but the
// last.
void in_parallel(std::size_t size, std::size_t grain, unsigned threads,
                 const std::function<void(std::size_t, std::size_t)>& work) {
  const std::size_t most = std::max<std::size_t>(size / kMinPerThread, 1);
  const std::size_t pieces = std::clamp<std::size_t>(threads, 1, most);
  const std::size_t grains = (size + grain - 1) / grain;
  const std::size_t step = (grains + pieces - 1) / pieces * grain;
  const auto run = [&](std::size_t first) {
    const PlainArithmetic plain;
    work(first, std::min(first + step, size));
  };
  // A thread lives for a call: its start costs some 20 us, a piece takes ten times that.
  std::vector<std::jthread> helpers;
  helpers.reserve(pieces);
  for (std::size_t first = step; first < size; first += step) {
    try {
      helpers.emplace_back(run, first);
    } catch (const std::system_error&) {  // no more threads to be had
      run(first);
    }
  }
  run(0);
}

}  // namespace

std::vector<std::string> simd_levels() {
  std::vector<std::string> levels;
  for (const Kernels& k : kKernels) {
    if (k.supported()) levels.emplace_back(k.name);
  }
  return levels;
}

bool adamw(const AdamArrays& arrays, const AdamScalars& scalars, unsigned threads,
           const std::string& level) {
  const Kernels& k = kernels(level);
  std::atomic<bool> finite{true};
  in_parallel(arrays.size, kCodeBlock, threads, [&](std::size_t first, std::size_t last) {
    const auto advance = [first](auto*& array, std::size_t step = 1) {
      if (array != nullptr) array += first / step;
    };
    AdamArrays piece = arrays;
    advance(piece.master);
    advance(piece.high);
    advance(piece.low);
    advance(piece.exp_avg);
    advance(piece.exp_avg_sq);
    advance(piece.exp_avg_code);
    advance(piece.exp_avg_sq_code);
    advance(piece.exp_avg_scale, kCodeBlock);
    advance(piece.exp_avg_sq_scale, kCodeBlock);
    piece.rounding.first += static_cast<std::uint32_t>(first);
    piece.grad += first;
    piece.size = last - first;
    if (!update(piece, scalars, k)) finite = false;
  });
  return finite;
}

double sum_of_squares(const float* values, std::size_t size, unsigned threads,
                      const std::string& level) {
  const Kernels& k = kernels(level);
  std::vector<double> sums((size + kBlock - 1) / kBlock);
  in_parallel(size, kBlock, threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t start = first; start < last; start += kBlock) {
      sums[start / kBlock] = k.sum_block(values + start, std::min(kBlock, last - start));
    }
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace ssdtune
