// The loops of src/codes.cpp, which includes this once for each instruction set: in a namespace and
// under a target of its own, with SSDTUNE_LANES, the elements of its registers. So it has no
// include guard.

#define SSDTUNE_INLINE static inline __attribute__((always_inline))

constexpr std::size_t kLanes = SSDTUNE_LANES;

#if SSDTUNE_LANES == 1
using Floats = float;
using Ints = std::int32_t;
SSDTUNE_INLINE Floats bits_as_floats(Ints bits) { return std::bit_cast<float>(bits); }
SSDTUNE_INLINE Ints bits_of(Floats values) { return std::bit_cast<std::int32_t>(values); }
SSDTUNE_INLINE Floats to_floats(Ints values) { return static_cast<float>(values); }
SSDTUNE_INLINE Ints to_ints(Floats values) { return static_cast<std::int32_t>(values); }
SSDTUNE_INLINE Floats entries(const float* table, Ints index) { return table[index & 7]; }
#else
using Floats [[gnu::vector_size(4 * SSDTUNE_LANES)]] = float;
using Ints [[gnu::vector_size(4 * SSDTUNE_LANES)]] = std::int32_t;
SSDTUNE_INLINE Floats bits_as_floats(Ints bits) { return (Floats)bits; }
SSDTUNE_INLINE Ints bits_of(Floats values) { return (Ints)values; }
SSDTUNE_INLINE Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }
SSDTUNE_INLINE Ints to_ints(Floats values) { return __builtin_convertvector(values, Ints); }
SSDTUNE_INLINE Floats entries(const float* table, Ints index) {
  Floats whole;  // a table of eight is kept twice, to fill a register of sixteen
  std::memcpy(&whole, table, sizeof whole);
  return __builtin_shuffle(whole, index);  // by the index's low bits
}
#endif

SSDTUNE_INLINE Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

SSDTUNE_INLINE Ints load(const std::int32_t* from) {
  Ints values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

SSDTUNE_INLINE Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
SSDTUNE_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }

// Places of numbers from 0 to 1, given by their bits; not yet rounded down.
SSDTUNE_INLINE Floats places(Ints bits, const Table& table) {
  const Floats value = bits_as_floats(bits);
  // Bits grow like a logarithm: that gives the decade or the one above it.
  const Floats logarithm = to_floats(bits) * kGuessSlope + kGuessOffset;
  // Floats from 0 up are in order as integers too, and negative ones are below.
  const Ints guess = to_ints(bits_as_floats(larger(bits_of(logarithm), Ints{})));
  const Ints decade = value < entries(table.threshold, guess) ? guess - 1 : guess;
  const Floats place = value * entries(table.slope, decade) + entries(table.intercept, decade);
  return bits_as_floats(smaller(bits_of(place), bits_of(entries(table.last, decade))));
}

// The number at places from 1 up, given as a float.
SSDTUNE_INLINE Floats value_at(Floats place, const Table& table) {
  const Ints exponent = bits_of(place) >> 23;
  return (place + entries(table.offset, exponent)) * entries(table.factor, exponent);
}

// A block's codes while they are computed. The compiler makes better vectors of whole loops from
// and to bytes than of a register's conversion, but for 16 lanes, where that is one instruction.
struct Block {
  alignas(64) std::int32_t codes[kCodeBlock];
};

SSDTUNE_INLINE void widen(const std::uint8_t* from, Block& block) {
  for (std::size_t i = 0; i < kCodeBlock; ++i) block.codes[i] = from[i];
}

#if SSDTUNE_LANES == 16
SSDTUNE_INLINE void put(Block&, std::size_t i, Ints codes, std::uint8_t* to) {
  using Bytes [[gnu::vector_size(SSDTUNE_LANES)]] = std::uint8_t;
  const Bytes bytes = __builtin_convertvector(codes, Bytes);
  std::memcpy(to + i, &bytes, sizeof bytes);
}
SSDTUNE_INLINE void narrow(const Block&, std::uint8_t*) {}
#else
SSDTUNE_INLINE void put(Block& block, std::size_t i, Ints codes, std::uint8_t*) {
  std::memcpy(block.codes + i, &codes, sizeof codes);
}
SSDTUNE_INLINE void narrow(const Block& block, std::uint8_t* to) {
  for (std::size_t i = 0; i < kCodeBlock; ++i) to[i] = static_cast<std::uint8_t>(block.codes[i]);
}
#endif

SSDTUNE_INLINE float scale_of(const float* values) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < kCodeBlock; ++i) {
    largest = std::max(largest, std::bit_cast<std::int32_t>(values[i]) & kNoSign);
  }
  const auto scale = std::bit_cast<float>(largest);
  return scale < std::numeric_limits<float>::min() ? 0.0F : scale;
}

static void decode_signed(const std::uint8_t* bytes, float scale, float* values) {
  Block block;
  widen(bytes, block);
  for (std::size_t i = 0; i < kCodeBlock; i += kLanes) {
    const Ints distance = bits_of(to_floats(load(block.codes + i) - kSignedZero));
    const Floats value = value_at(bits_as_floats(distance & kNoSign), kSigned) * scale;
    const Ints bits = bits_of(value) | (distance & ~kNoSign);
    const Ints kept = distance == 0 ? distance : bits;
    std::memcpy(values + i, &kept, sizeof kept);
  }
}

static void decode_unsigned(const std::uint8_t* bytes, float scale, float* values) {
  Block block;
  widen(bytes, block);
  for (std::size_t i = 0; i < kCodeBlock; i += kLanes) {
    const Ints code = load(block.codes + i);
    const Ints bits = bits_of(value_at(to_floats(code + 1), kUnsigned) * scale);
    const Ints kept = code == 0 ? code : bits;
    std::memcpy(values + i, &kept, sizeof kept);
  }
}

// What is not a number counts as 1.
static float encode_signed(const float* values, std::uint8_t* bytes) {
  Block block;
  const float scale = scale_of(values);
  const float inverse = scale > 0 ? 1 / scale : 0;
  for (std::size_t i = 0; i < kCodeBlock; i += kLanes) {
    const Ints bits = bits_of(load(values + i) * inverse);
    const Ints place = bits_of(places(smaller(bits & kNoSign, Ints{} + kOne), kSigned));
    const Ints distance = to_ints(bits_as_floats(place | (bits & ~kNoSign)));
    // There is no code of -1.
    const Ints code = larger(distance + kSignedZero, Ints{});
    put(block, i, code, bytes);
  }
  narrow(block, bytes);
  return scale;
}

static float encode_unsigned(const float* values, std::uint8_t* bytes) {
  Block block;
  const float scale = scale_of(values);
  const float inverse = scale > 0 ? 1 / scale : 0;
  for (std::size_t i = 0; i < kCodeBlock; i += kLanes) {
    const Ints bits = smaller(bits_of(load(values + i) * inverse) & kNoSign, Ints{} + kOne);
    const Ints code = larger(to_ints(places(bits, kUnsigned)) - 1, smaller(bits, Ints{} + 1));
    put(block, i, code, bytes);
  }
  narrow(block, bytes);
  return scale;
}

static constexpr CodeLoops kLoops{decode_signed, decode_unsigned, encode_signed, encode_unsigned};

#undef SSDTUNE_INLINE
#undef SSDTUNE_LANES
