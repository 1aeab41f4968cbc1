// AdamW on flat arrays, and the sum of squares for clipping. No Python, no torch. Moments in 8 bits
// are codes.h's.
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

// Where stochastic rounding takes its random bits from: a hash of the key, which differs from step
// to step, and of the element's index modulo 2^32, `first` being that of the arrays' first one.
struct Rounding {
  std::uint32_t key[2] = {};
  std::uint32_t first = 0;
};

// Arrays of equal length. The weights are `master`; or `high` and `low`, the two halves of the fp32
// master weight; or `high` alone, bfloat16 weights that are rounded stochastically. The moments are
// `exp_avg` and `exp_avg_sq`; or codes, with a scale for each block of 256, counted from the
// arrays' start.
struct AdamArrays {
  float* master = nullptr;
  std::uint16_t* high = nullptr;
  std::int16_t* low = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  std::uint8_t* exp_avg_code = nullptr;
  std::uint8_t* exp_avg_sq_code = nullptr;
  float* exp_avg_scale = nullptr;
  float* exp_avg_sq_scale = nullptr;
  const float* grad = nullptr;
  std::size_t size = 0;
  Rounding rounding;
};

// Instruction sets of this build that this processor has, the best first; the last one is
// "baseline".
std::vector<std::string> simd_levels();

// Updates the arrays in place. True if all new weights are finite (their high halves too, and so
// that they can't be rounded to what is not), and the new scales of blocks.
// `level` is one of simd_levels().
bool adamw(const AdamArrays& arrays, const AdamScalars& scalars, unsigned threads,
           const std::string& level);

// Sum of squares in double.
double sum_of_squares(const float* values, std::size_t size, unsigned threads,
                      const std::string& level);

}  // namespace ssdtune
