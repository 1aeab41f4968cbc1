// What coded_update.h computes with, on eight elements: AVX2.

constexpr std::size_t kLanes = 8;
using Floats [[gnu::vector_size(32)]] = float;
using Ints [[gnu::vector_size(32)]] = std::uint32_t;
using Words [[gnu::vector_size(32)]] = std::uint16_t;
using Bytes [[gnu::vector_size(32)]] = std::uint8_t;

SSDTUNE_INLINE __m256i raw(Ints values) { return (__m256i)values; }
SSDTUNE_INLINE __m256i raw(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
SSDTUNE_INLINE Floats load(const float* from) { return (Floats)_mm256_loadu_ps(from); }
SSDTUNE_INLINE Ints load(const std::uint32_t* from) { return (Ints)raw(from); }
SSDTUNE_INLINE void store(float* to, Floats values) { _mm256_storeu_ps(to, (__m256)values); }
SSDTUNE_INLINE Ints bits_of(Floats values) { return (Ints)values; }
SSDTUNE_INLINE Floats with_bits(Ints bits) { return (Floats)bits; }

SSDTUNE_INLINE Floats root(Floats values) { return (Floats)_mm256_sqrt_ps((__m256)values); }
SSDTUNE_INLINE Floats smaller(Floats a, Floats b) {
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
}
SSDTUNE_INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm256_max_epu32(raw(a), raw(b)); }
SSDTUNE_INLINE Ints with_sign_of(Ints sign_of, Ints bits) { return (sign_of & kSign) ^ bits; }
SSDTUNE_INLINE Ints shift_right(Ints values, Ints count) {
  return (Ints)_mm256_srlv_epi32(raw(values), raw(count));
}
SSDTUNE_INLINE Ints one_more_below(Ints count, Floats values, Floats limit) {
  return count - (Ints)_mm256_cmp_ps((__m256)values, (__m256)limit, _CMP_LT_OQ);
}
SSDTUNE_INLINE Floats entries(const float* table, Ints index) {
  return (Floats)_mm256_permutevar8x32_ps(_mm256_load_ps(table), raw(index));
}
SSDTUNE_INLINE Ints coarse_shift(Ints bits, std::uint32_t start) {
  const Words distance = (Words)(Ints{} + start) - (Words)bits;
  const Words step = (Words)(Ints{} + (kCoarseStep << 16));
  return (Ints)_mm256_mulhi_epu16((__m256i)distance, (__m256i)step) >> 16;
}

SSDTUNE_INLINE Ints load_bytes(const std::uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
SSDTUNE_INLINE Ints load_words(const std::uint16_t* from) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SSDTUNE_INLINE Ints load_words(const std::int16_t* from) {
  return (Ints)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
// Packing works within each half of a register, so that quarters have to be put in order after it.
SSDTUNE_INLINE void store_words(void* to, Ints a, Ints b) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(raw(a), raw(b)), 0xd8);
  _mm256_storeu_si256(static_cast<__m256i*>(to), words);
}
SSDTUNE_INLINE void store_bytes(std::uint8_t* to, __m256i bytes) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
}
SSDTUNE_INLINE void store_signed(std::uint8_t* to, const Ints places[4], const float* values) {
  __m256i words[2];
  for (std::size_t i = 0; i < 2; ++i) {
    const __m256i a = _mm256_sign_epi32(raw(places[2 * i]), raw(values + 2 * i * kLanes));
    const __m256i b = _mm256_sign_epi32(raw(places[2 * i + 1]), raw(values + (2 * i + 1) * kLanes));
    words[i] = _mm256_add_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(kSignedZero));
  }
  store_bytes(to, _mm256_packus_epi16(words[0], words[1]));  // -1 becomes 0
}
SSDTUNE_INLINE void store_unsigned(std::uint8_t* to, const Ints places[4], const Ints bits[4]) {
  __m256i words[2], some[2];
  for (std::size_t i = 0; i < 2; ++i) {
    const __m256i both = _mm256_packs_epi32(raw(places[2 * i]), raw(places[2 * i + 1]));
    words[i] = _mm256_sub_epi16(both, _mm256_set1_epi16(1));
    some[i] = _mm256_packs_epi32(raw(bits[2 * i]), raw(bits[2 * i + 1]));
  }
  const __m256i above_zero =
      _mm256_min_epu8(_mm256_packs_epi16(some[0], some[1]), _mm256_set1_epi8(1));
  store_bytes(to, _mm256_max_epu8(_mm256_packus_epi16(words[0], words[1]), above_zero));
}
SSDTUNE_INLINE void largest_lanes(Ints a, Ints b, std::uint32_t largest[2]) {
  // Of each pair of columns one is of a, the other of b.
  Ints both = larger((Ints)_mm256_unpacklo_epi32(raw(a), raw(b)),
                     (Ints)_mm256_unpackhi_epi32(raw(a), raw(b)));
  both = larger(both, (Ints)_mm256_shuffle_epi32(raw(both), 0x4e));
  both = larger(both, (Ints)_mm256_permute4x64_epi64(raw(both), 0x4e));
  largest[0] = both[0];
  largest[1] = both[1];
}
