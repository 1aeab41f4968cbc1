// Moments in 8 bits: blocks of 256 numbers, each a code of one byte, with the block's largest
// absolute value as their common scale. No Python, no torch.
//
// The codes are those of dynamic tree quantization (Dettmers, 8-Bit Approximations for Parallelism
// in Deep Learning, 2016; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022,
// section 2): seven decades from 1 down to 1e-7, each divided evenly, the largest one most finely.
// Decade i has 2^i codes for each sign in a signed table and 2^(i + 1) in an unsigned one; both
// have 0 and 1 besides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdtune {

constexpr std::size_t kCodeBlock = 256;

// The loops of one instruction set, over a whole block; all sets give the same bits.
struct CodeLoops {
  void (*decode_signed)(const std::uint8_t* codes, float scale, float* values);
  void (*decode_unsigned)(const std::uint8_t* codes, float scale, float* values);
  // These return the scale: 0 if it would be below the smallest normal number (then all codes mean
  // 0), and not finite if a value is not. The unsigned one never gives the code of 0 to a number
  // above 0: it would leave nothing but epsilon below an update's fraction bar.
  float (*encode_signed)(const float* values, std::uint8_t* codes);
  float (*encode_unsigned)(const float* values, std::uint8_t* codes);
};

extern const CodeLoops kCodesBaseline;
#if defined(__x86_64__)
extern const CodeLoops kCodesAvx2;
extern const CodeLoops kCodesAvx512;
#endif

}  // namespace ssdtune
