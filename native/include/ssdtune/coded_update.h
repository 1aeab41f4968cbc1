// The loops of src/codes.cpp, which includes this once for each instruction set: in a namespace and
// under a target of its own, after the lanes_*.h with that set's registers. So it has no include
// guard.
//
// A block goes through two steps in the nearest cache: one decodes and updates, the other encodes,
// for which the largest new moments have to be known. Both are bound by the number of instructions.
// A block is updated in the same loop in which the one before it is encoded, so that the slow roots
// and divisions of one step are hidden behind the other.

#include "ssdtune/new_weight.h"

constexpr std::size_t kTurn = 4 * kLanes;  // elements of one turn of the loop

// A block between its two steps.
struct Moments {
  alignas(64) float exp_avg[kCodeBlock];
  alignas(64) float exp_avg_size[kCodeBlock];  // absolute values
  alignas(64) float exp_avg_sq[kCodeBlock];
  float inverse_scale[2];  // of the first and the second moment, here and below
};

SSDTUNE_INLINE Floats decode_signed(Ints codes) {
  // Twice the distance from the code of 0, as the difference of two large floats.
  const Floats place = with_bits(codes | bits_of(Floats{} + kTwo24)) - (kTwo24 + 2 * kSignedZero);
  const Ints exponent = bits_of(place) >> 23;
  const Floats offset = entries(kSigned.offset, exponent);
  return (place + with_bits(with_sign_of(bits_of(place), bits_of(offset)))) *
         entries(kSigned.factor, exponent);
}

SSDTUNE_INLINE Floats decode_unsigned(Ints codes) {
  const Floats place = with_bits(codes | bits_of(Floats{} + kTwo23)) - (kTwo23 - 1);
  const Ints exponent = bits_of(place) >> 23;
  return (place + entries(kUnsigned.offset, exponent)) * entries(kUnsigned.factor, exponent);
}

// Places of numbers from 0 to 1, rounded down.
SSDTUNE_INLINE Ints places(Floats values, const Table& table) {
  Ints shift = coarse_shift(bits_of(values), table.start);
  shift = one_more_below(shift, values, entries(table.threshold, shift));
  const Floats fraction = values * entries(table.rate, shift) + kEightNinths;
  // The 24 bits of its significand, all but the first few cut off.
  return shift_right(bits_of(smaller(fraction, Floats{} + kBelowTwo)) - kHalf, shift);
}

// Decodes and updates elements [i, i + kTurn) of the block at `first`.
template <Weights kWeights>
SSDTUNE_INLINE void update_turn(const AdamArrays& a, std::size_t first, std::size_t i,
                                const AdamScalars& s, const float scale[2],
                                const RandomBits& random, Moments& moments, Ints largest_moments[2],
                                Ints& largest_weight) {
  Ints bits[4], high[4];
  for (std::size_t k = 0; k < 4; ++k) {
    const std::size_t in = i + k * kLanes;
    const std::size_t at = first + in;
    Floats weight;
    if constexpr (kWeights == Weights::kMaster) {
      weight = load(a.master + at);
    } else {
      Ints old = load_words(a.high + at) << 16;
      if constexpr (kWeights == Weights::kSplit) old += load_words(a.low + at);
      weight = with_bits(old);
    }
    Floats exp_avg = decode_signed(load_bytes(a.exp_avg_code + at)) * scale[0];
    Floats exp_avg_sq = decode_unsigned(load_bytes(a.exp_avg_sq_code + at)) * scale[1];
    weight = new_weight(weight, load(a.grad + at), exp_avg, exp_avg_sq, s);
    bits[k] = bits_of(weight);
    largest_weight = larger(largest_weight, bits[k] & kNoSign);
    const Ints size = bits_of(exp_avg) & kNoSign;
    largest_moments[0] = larger(largest_moments[0], size);
    largest_moments[1] = larger(largest_moments[1], bits_of(exp_avg_sq));
    store(moments.exp_avg + in, exp_avg);
    store(moments.exp_avg_size + in, with_bits(size));
    store(moments.exp_avg_sq + in, exp_avg_sq);
    if constexpr (kWeights == Weights::kMaster) {
      store(a.master + at, weight);
    } else if constexpr (kWeights == Weights::kSplit) {
      high[k] = (bits[k] + 0x8000U) >> 16;
      bits[k] &= 0xffffU;
    } else {
      const Ints x = load(random.products + in) + random.rest;
      high[k] = (bits[k] + (((x ^ (x >> 15)) * kHash[1]) >> 16)) >> 16;
    }
  }
  for (std::size_t k = 0; k < 4; k += 2) {
    const std::size_t at = first + i + k * kLanes;
    if constexpr (kWeights != Weights::kMaster) store_words(a.high + at, high[k], high[k + 1]);
    if constexpr (kWeights == Weights::kSplit) store_words(a.low + at, bits[k], bits[k + 1]);
  }
}

// Encodes elements [i, i + kTurn) of the block at `first`.
SSDTUNE_INLINE void encode_turn(const AdamArrays& a, std::size_t first, std::size_t i,
                                const Moments& moments) {
  Ints place[4], bits[4];
  for (std::size_t k = 0; k < 4; ++k) {
    const Floats size = load(moments.exp_avg_size + i + k * kLanes);
    place[k] = places(size * moments.inverse_scale[0], kSigned);
  }
  store_signed(a.exp_avg_code + first + i, place, moments.exp_avg + i);
  for (std::size_t k = 0; k < 4; ++k) {
    const Floats value = load(moments.exp_avg_sq + i + k * kLanes) * moments.inverse_scale[1];
    bits[k] = bits_of(value);
    place[k] = places(value, kUnsigned);
  }
  store_unsigned(a.exp_avg_sq_code + first + i, place, bits);
}

// What is far enough ahead for memory to deliver it in time.
template <Weights kWeights>
SSDTUNE_INLINE void prefetch_turn(const AdamArrays& a, std::size_t at) {
  if constexpr (kWeights == Weights::kMaster) prefetch(a.master + at, kTurn);
  if constexpr (kWeights != Weights::kMaster) prefetch(a.high + at, kTurn);
  if constexpr (kWeights == Weights::kSplit) prefetch(a.low + at, kTurn);
  prefetch(a.grad + at, kTurn);
  prefetch(a.exp_avg_code + at, kTurn);
  prefetch(a.exp_avg_sq_code + at, kTurn);
}

template <Weights kWeights>
static Largest update_blocks(const AdamArrays& arrays, const AdamScalars& scalars) {
  const AdamArrays a = arrays;  // copies: no store can change them
  const AdamScalars s = scalars;
  RandomBits random(a.rounding);
  Moments buffers[2];
  Ints largest_weight{};
  Largest largest;
  const std::size_t whole = a.size / kCodeBlock * kCodeBlock;
  for (std::size_t first = 0; first < whole; first += kCodeBlock) {
    const std::size_t block = first / kCodeBlock;
    Moments& moments = buffers[block % 2];
    const Moments& before = buffers[1 - block % 2];
    if constexpr (kWeights == Weights::kRounded) random.seek(static_cast<std::uint32_t>(first));
    const float scale[] = {a.exp_avg_scale[block], a.exp_avg_sq_scale[block]};
    Ints largest_moments[2]{};
    const std::size_t ahead = first + (first + kAhead + kCodeBlock <= a.size ? kAhead : 0);
    for (std::size_t i = 0; i < kCodeBlock; i += kTurn) {
      prefetch_turn<kWeights>(a, ahead + i);
      update_turn<kWeights>(a, first, i, s, scale, random, moments, largest_moments,
                            largest_weight);
      if (first > 0) encode_turn(a, first - kCodeBlock, i, before);
    }
    std::uint32_t bits[2];
    largest_lanes(largest_moments[0], largest_moments[1], bits);
    moments.inverse_scale[0] = inverse_scale(moments.exp_avg_size, bits[0]);
    moments.inverse_scale[1] = inverse_scale(moments.exp_avg_sq, bits[1]);
    a.exp_avg_scale[block] = scale_of(bits[0]);
    a.exp_avg_sq_scale[block] = scale_of(bits[1]);
    largest.scale = std::max({largest.scale, bits[0], bits[1]});
  }
  for (std::size_t i = 0; whole > 0 && i < kCodeBlock; i += kTurn) {
    encode_turn(a, whole - kCodeBlock, i, buffers[1 - whole / kCodeBlock % 2]);
  }
  std::uint32_t lanes[kLanes];
  std::memcpy(lanes, &largest_weight, sizeof largest_weight);
  largest.weight = *std::max_element(std::begin(lanes), std::end(lanes));
  return largest;
}

static constexpr CodedKernels kKernels{update_blocks<Weights::kMaster>,
                                       update_blocks<Weights::kSplit>,
                                       update_blocks<Weights::kRounded>};
