// Kernels on arrays of odd lengths and alignments: all levels and numbers of threads give the same
// bits. The arithmetic itself is tested from Python, against torch and numpy.

#include "ssdtune/adam.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "ssdtune/codes.h"

namespace {

constexpr ssdtune::AdamScalars kScalars{
    .grad_scale = 0.5F,
    .decay = 0.9999F,
    .one_minus_beta1 = 0.1F,
    .beta2 = 0.999F,
    .one_minus_beta2 = 0.001F,
    .inverse_root = 31.6F,
    .eps = 1e-8F,
    .step_size = 1e-3F,
};

// The six kinds of update.
enum class Weights { kMaster, kSplit, kRounded };

struct State {
  explicit State(std::size_t size)
      : master(size),
        exp_avg(size),
        exp_avg_sq(size),
        grad(size),
        high(size),
        low(size),
        exp_avg_code(size),
        exp_avg_sq_code(size),
        exp_avg_scale((size + ssdtune::kCodeBlock - 1) / ssdtune::kCodeBlock, 0.1F),
        exp_avg_sq_scale(exp_avg_scale.size(), 0.01F) {
    for (std::size_t i = 0; i < size; ++i) {
      const auto x =
          static_cast<float>(static_cast<std::uint32_t>(i * 2654435761U) >> 8) / 16777216.0F;
      master[i] = x - 0.5F;
      exp_avg[i] = 0.1F * x;
      exp_avg_sq[i] = 0.01F * x;
      grad[i] = 1.0F - 2 * x;
      high[i] = static_cast<std::uint16_t>(0x3f00 + i % 0x80);
      low[i] = static_cast<std::int16_t>(i * 31);
      exp_avg_code[i] = static_cast<std::uint8_t>(i * 37);
      exp_avg_sq_code[i] = static_cast<std::uint8_t>(i * 41);
    }
  }
  bool operator==(const State&) const = default;

  bool update(Weights weights, bool coded, std::size_t skip, unsigned threads,
              const std::string& level) {
    ssdtune::AdamArrays arrays;
    arrays.grad = grad.data() + skip;
    arrays.size = grad.size() - skip;
    if (weights == Weights::kMaster) {
      arrays.master = master.data() + skip;
    } else {
      arrays.high = high.data() + skip;
    }
    if (weights == Weights::kSplit) arrays.low = low.data() + skip;
    if (coded) {
      arrays.exp_avg_code = exp_avg_code.data() + skip;
      arrays.exp_avg_sq_code = exp_avg_sq_code.data() + skip;
      arrays.exp_avg_scale = exp_avg_scale.data();
      arrays.exp_avg_sq_scale = exp_avg_sq_scale.data();
    } else {
      arrays.exp_avg = exp_avg.data() + skip;
      arrays.exp_avg_sq = exp_avg_sq.data() + skip;
    }
    arrays.rounding = {{0x12345678U, 0x9abcdef0U}, 0xfffffff0U};
    return ssdtune::adamw(arrays, kScalars, threads, level);
  }

  std::vector<float> master, exp_avg, exp_avg_sq, grad;
  std::vector<std::uint16_t> high;
  std::vector<std::int16_t> low;
  std::vector<std::uint8_t> exp_avg_code, exp_avg_sq_code;
  std::vector<float> exp_avg_scale, exp_avg_sq_scale;
};

void check_kind(std::size_t size, std::size_t skip, Weights weights, bool coded) {
  State expected(size);
  CHECK(expected.update(weights, coded, skip, 1, "baseline"));
  CHECK(!(expected == State(size)));
  for (const std::string& level : ssdtune::simd_levels()) {
    for (const unsigned threads : {1U, 2U}) {
      State state(size);
      CHECK(state.update(weights, coded, skip, threads, level));
      CHECK(state == expected);
    }
  }
}

}  // namespace

int main() {
  const auto levels = ssdtune::simd_levels();
  CHECK(levels.back() == "baseline");
  for (const std::size_t size :
       {std::size_t{2}, std::size_t{17}, std::size_t{1000}, std::size_t{530001}}) {
    for (const std::size_t skip : {std::size_t{0}, std::size_t{1}}) {
      if (skip == 0 && size > 1000) continue;  // once is enough, under a sanitizer
      for (const Weights weights : {Weights::kMaster, Weights::kSplit, Weights::kRounded}) {
        for (const bool coded : {false, true}) check_kind(size, skip, weights, coded);
      }
      const State state(size);
      const float* values = state.grad.data() + skip;
      const double sum = ssdtune::sum_of_squares(values, size - skip, 1, "baseline");
      for (const std::string& level : levels) {
        CHECK(ssdtune::sum_of_squares(values, size - skip, 3, level) == sum);
      }
    }
  }
  State broken(100000);
  broken.grad[77777] = INFINITY;
  for (const Weights weights : {Weights::kMaster, Weights::kSplit, Weights::kRounded}) {
    for (const bool coded : {false, true}) {
      CHECK(!State(broken).update(weights, coded, 0, 2, levels.front()));
    }
  }
  std::puts("adam ok");
}
