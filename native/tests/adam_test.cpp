// Kernels on arrays of odd lengths and alignments: all levels and numbers of threads give the same
// bits. The arithmetic itself is tested from Python, against torch and numpy.

#include "ssdtune/adam.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"

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

struct State {
  explicit State(std::size_t size)
      : master(size), exp_avg(size), exp_avg_sq(size), grad(size), high(size), low(size) {
    for (std::size_t i = 0; i < size; ++i) {
      const auto x =
          static_cast<float>(static_cast<std::uint32_t>(i * 2654435761U) >> 8) / 16777216.0F;
      master[i] = x - 0.5F;
      exp_avg[i] = 0.1F * x;
      exp_avg_sq[i] = 0.01F * x;
      grad[i] = 1.0F - 2 * x;
      high[i] = static_cast<std::uint16_t>(0x3f00 + i % 0x80);
      low[i] = static_cast<std::int16_t>(i * 31);
    }
  }
  bool operator==(const State&) const = default;

  bool update(bool split, std::size_t skip, unsigned threads, const std::string& level) {
    ssdtune::AdamArrays arrays{.exp_avg = exp_avg.data() + skip,
                               .exp_avg_sq = exp_avg_sq.data() + skip,
                               .grad = grad.data() + skip,
                               .size = grad.size() - skip};
    if (split) {
      arrays.high = high.data() + skip;
      arrays.low = low.data() + skip;
    } else {
      arrays.master = master.data() + skip;
    }
    return ssdtune::adamw(arrays, kScalars, threads, level);
  }

  std::vector<float> master, exp_avg, exp_avg_sq, grad;
  std::vector<std::uint16_t> high;
  std::vector<std::int16_t> low;
};

}  // namespace

int main() {
  const auto levels = ssdtune::simd_levels();
  CHECK(levels.back() == "baseline");
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{17}, std::size_t{1000}, std::size_t{800001}}) {
    for (const std::size_t skip : {std::size_t{0}, std::size_t{1}}) {
      for (const bool split : {false, true}) {
        State expected(size);
        CHECK(expected.update(split, skip, 1, "baseline"));
        const double sum =
            ssdtune::sum_of_squares(expected.grad.data() + skip, size - skip, 1, "baseline");
        for (const std::string& level : levels) {
          for (const unsigned threads : {1U, 3U}) {
            State state(size);
            CHECK(state.update(split, skip, threads, level));
            CHECK(state == expected);
            CHECK(ssdtune::sum_of_squares(state.grad.data() + skip, size - skip, threads, level) ==
                  sum);
          }
        }
      }
    }
  }
  State broken(100000);
  broken.grad[77777] = INFINITY;
  CHECK(!broken.update(false, 0, 2, levels.front()));
  std::puts("adam ok");
}
