// AdamW on flat arrays, and the sum of squares for clipping. No Python, no torch.
//
// Every instruction set, number of threads and length gives the same bits: each element is computed
// by the same sequence of IEEE operations (no fused multiply-add), and sums have a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ssdtune {

// The scalars of one step, computed in double and rounded once; see ssdtune/optim/adamw.py.
struct AdamScalars {
  float grad_scale;
  float decay;  // 1 - lr * weight_decay
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_root;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
};

// Arrays of equal length. Either `master` is set, or `high` and `low`: the two halves of the fp32
// master weight.
struct AdamArrays {
  float* master = nullptr;
  std::uint16_t* high = nullptr;
  std::int16_t* low = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const float* grad = nullptr;
  std::size_t size = 0;
};

// Instruction sets of this build that this processor has, the best first; the last one is
// "baseline".
std::vector<std::string> simd_levels();

// Updates the arrays in place. True if all new weights are finite (and their high halves too).
// `level` is one of simd_levels().
bool adamw(const AdamArrays& arrays, const AdamScalars& scalars, unsigned threads,
           const std::string& level);

// Sum of squares in double.
double sum_of_squares(const float* values, std::size_t size, unsigned threads,
                      const std::string& level);

}  // namespace ssdtune
