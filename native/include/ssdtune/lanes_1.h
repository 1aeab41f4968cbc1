// What coded_update.h computes with, on one element: plain C++.

constexpr std::size_t kLanes = 1;
using Floats = float;
using Ints = std::uint32_t;

SSDTUNE_INLINE Floats load(const float* from) { return *from; }
SSDTUNE_INLINE Ints load(const std::uint32_t* from) { return *from; }
SSDTUNE_INLINE void store(float* to, Floats values) { *to = values; }
SSDTUNE_INLINE Ints bits_of(Floats values) { return std::bit_cast<Ints>(values); }
SSDTUNE_INLINE Floats with_bits(Ints bits) { return std::bit_cast<Floats>(bits); }

SSDTUNE_INLINE Floats root(Floats values) { return __builtin_sqrtf(values); }
SSDTUNE_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
SSDTUNE_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
SSDTUNE_INLINE Ints with_sign_of(Ints sign_of, Ints bits) { return (sign_of & kSign) ^ bits; }
SSDTUNE_INLINE Ints shift_right(Ints values, Ints count) {
  return count < 32 ? values >> count : 0;
}
SSDTUNE_INLINE Ints one_more_below(Ints count, Floats values, Floats limit) {
  return count + (values < limit ? 1 : 0);
}
SSDTUNE_INLINE Floats entries(const float* table, Ints index) { return table[index & 7]; }
SSDTUNE_INLINE Ints coarse_shift(Ints bits, std::uint32_t start) {
  return ((start >> 16) - (bits >> 16)) * kCoarseStep >> 16;
}

SSDTUNE_INLINE Ints load_bytes(const std::uint8_t* from) { return *from; }
SSDTUNE_INLINE Ints load_words(const std::uint16_t* from) { return *from; }
SSDTUNE_INLINE Ints load_words(const std::int16_t* from) {
  return static_cast<Ints>(std::int32_t{*from});
}
SSDTUNE_INLINE void store_words(void* to, Ints a, Ints b) {
  const std::uint16_t words[] = {static_cast<std::uint16_t>(a), static_cast<std::uint16_t>(b)};
  std::memcpy(to, words, sizeof words);
}
SSDTUNE_INLINE void store_signed(std::uint8_t* to, const Ints places[4], const float* values) {
  for (std::size_t i = 0; i < 4; ++i) {
    const auto place = static_cast<std::int32_t>(places[i]);
    const bool negative = (std::bit_cast<std::uint32_t>(values[i]) & kSign) != 0;
    to[i] = static_cast<std::uint8_t>(std::max(kSignedZero + (negative ? -place : place), 0));
  }
}
SSDTUNE_INLINE void store_unsigned(std::uint8_t* to, const Ints places[4], const Ints bits[4]) {
  for (std::size_t i = 0; i < 4; ++i) {
    const Ints code = places[i] > 0 ? places[i] - 1 : 0;
    to[i] = static_cast<std::uint8_t>(std::max<Ints>(code, bits[i] > 0 ? 1 : 0));
  }
}
SSDTUNE_INLINE void largest_lanes(Ints a, Ints b, std::uint32_t largest[2]) {
  largest[0] = a;
  largest[1] = b;
}
