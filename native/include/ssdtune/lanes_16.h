// What coded_update.h computes with, on sixteen elements: AVX-512.

constexpr std::size_t kLanes = 16;
using Floats [[gnu::vector_size(64)]] = float;
using Ints [[gnu::vector_size(64)]] = std::uint32_t;
using Words [[gnu::vector_size(64)]] = std::uint16_t;

SSDTUNE_INLINE __m512i raw(Ints values) { return (__m512i)values; }
SSDTUNE_INLINE __m512i raw(const void* from) { return _mm512_loadu_si512(from); }
SSDTUNE_INLINE Floats load(const float* from) { return (Floats)_mm512_loadu_ps(from); }
SSDTUNE_INLINE Ints load(const std::uint32_t* from) { return (Ints)raw(from); }
SSDTUNE_INLINE void store(float* to, Floats values) { _mm512_storeu_ps(to, (__m512)values); }
SSDTUNE_INLINE Ints bits_of(Floats values) { return (Ints)values; }
SSDTUNE_INLINE Floats with_bits(Ints bits) { return (Floats)bits; }

SSDTUNE_INLINE Floats root(Floats values) { return (Floats)_mm512_sqrt_ps((__m512)values); }
SSDTUNE_INLINE Floats smaller(Floats a, Floats b) {
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
}
SSDTUNE_INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epu32(raw(a), raw(b)); }
SSDTUNE_INLINE Ints with_sign_of(Ints sign_of, Ints bits) {
  return (Ints)_mm512_ternarylogic_epi32(raw(bits), raw(sign_of), raw(Ints{} + kSign), 0x78);
}
SSDTUNE_INLINE Ints shift_right(Ints values, Ints count) {
  return (Ints)_mm512_srlv_epi32(raw(values), raw(count));
}
SSDTUNE_INLINE Ints one_more_below(Ints count, Floats values, Floats limit) {
  const __mmask16 below = _mm512_cmp_ps_mask((__m512)values, (__m512)limit, _CMP_LT_OQ);
  return (Ints)_mm512_mask_add_epi32(raw(count), below, raw(count), _mm512_set1_epi32(1));
}
SSDTUNE_INLINE Floats entries(const float* table, Ints index) {
  return (Floats)_mm512_permutexvar_ps(raw(index), _mm512_load_ps(table));
}
SSDTUNE_INLINE Ints coarse_shift(Ints bits, std::uint32_t start) {
  const Words distance = (Words)(Ints{} + start) - (Words)bits;
  const Words step = (Words)(Ints{} + (kCoarseStep << 16));
  return (Ints)_mm512_mulhi_epu16((__m512i)distance, (__m512i)step) >> 16;
}

SSDTUNE_INLINE Ints load_bytes(const std::uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SSDTUNE_INLINE Ints load_words(const std::uint16_t* from) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
SSDTUNE_INLINE Ints load_words(const std::int16_t* from) {
  return (Ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
// Packing works within each quarter of a register, so that its parts have to be put in order after
// it.
SSDTUNE_INLINE void store_words(void* to, Ints a, Ints b) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i words = _mm512_packus_epi32(raw(a), raw(b));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, words));
}
SSDTUNE_INLINE void store_bytes(std::uint8_t* to, __m512i bytes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}
SSDTUNE_INLINE void store_signed(std::uint8_t* to, const Ints places[4], const float* values) {
  __m512i words[2], signs[2];
  for (std::size_t i = 0; i < 2; ++i) {
    words[i] = _mm512_packs_epi32(raw(places[2 * i]), raw(places[2 * i + 1]));
    signs[i] = _mm512_packs_epi32(raw(values + 2 * i * kLanes), raw(values + (2 * i + 1) * kLanes));
  }
  const __m512i place = _mm512_packus_epi16(words[0], words[1]);
  const __mmask64 negative = _mm512_movepi8_mask(_mm512_packs_epi16(signs[0], signs[1]));
  const __m512i zero = _mm512_set1_epi8(kSignedZero);
  // There is no code of -1.
  store_bytes(to, _mm512_mask_subs_epu8(_mm512_add_epi8(zero, place), negative, zero, place));
}
SSDTUNE_INLINE void store_unsigned(std::uint8_t* to, const Ints places[4], const Ints bits[4]) {
  __m512i words[2], some[2];
  for (std::size_t i = 0; i < 2; ++i) {
    const __m512i both = _mm512_packs_epi32(raw(places[2 * i]), raw(places[2 * i + 1]));
    words[i] = _mm512_sub_epi16(both, _mm512_set1_epi16(1));
    some[i] = _mm512_packs_epi32(raw(bits[2 * i]), raw(bits[2 * i + 1]));
  }
  const __m512i above_zero =
      _mm512_min_epu8(_mm512_packs_epi16(some[0], some[1]), _mm512_set1_epi8(1));
  store_bytes(to, _mm512_max_epu8(_mm512_packus_epi16(words[0], words[1]), above_zero));
}
SSDTUNE_INLINE void largest_lanes(Ints a, Ints b, std::uint32_t largest[2]) {
  // Of each pair of columns one is of a, the other of b.
  Ints both = larger((Ints)_mm512_unpacklo_epi32(raw(a), raw(b)),
                     (Ints)_mm512_unpackhi_epi32(raw(a), raw(b)));
  both = larger(both, (Ints)_mm512_shuffle_i32x4(raw(both), raw(both), 0x4e));
  both = larger(both, (Ints)_mm512_shuffle_i32x4(raw(both), raw(both), 0xb1));
  both = larger(both, (Ints)_mm512_shuffle_epi32(raw(both), _MM_PERM_BADC));
  largest[0] = both[0];
  largest[1] = both[1];
}
