// AdamW on moments in 8 bits: blocks of 256 numbers, each a code of one byte, with the block's
// largest absolute value as their common scale. No Python, no torch.
//
// The codes are those of dynamic tree quantization (Dettmers, 8-Bit Approximations for Parallelism
// in Deep Learning, 2016; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022,
// section 2): seven decades from 1 down to 1e-7, each divided evenly, the largest one most finely.
// Decade i has 2^i codes for each sign in a signed table and 2^(i + 1) in an unsigned one; both
// have 0 and 1 besides. The first moment has the signed codes, the second one the unsigned ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ssdtune/adam.h"

namespace ssdtune {

constexpr std::size_t kCodeBlock = 256;

// The largest new weight and scale, as bits without a sign.
struct Largest {
  std::uint32_t weight = 0;
  std::uint32_t scale = 0;
};

// What the weights are: see AdamArrays.
enum class Weights { kMaster, kSplit, kRounded };

// Updates the whole blocks of arrays whose moments are codes.
using CodedUpdate = Largest (*)(const AdamArrays&, const AdamScalars&);

// With the loops of one instruction set; all sets give the same bits.
struct CodedKernels {
  CodedUpdate masters, halves, rounded;
};

extern const CodedKernels kCodedBaseline;
#if defined(__x86_64__)
extern const CodedKernels kCodedAvx2;
extern const CodedKernels kCodedAvx512;
#endif

}  // namespace ssdtune
