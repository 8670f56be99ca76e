// Vectors of W floats for whichever instruction set this translation unit is compiled for.
//
// Everything lives in an anonymous namespace and no standard C++ header is included: the same source is
// compiled several times with different -m flags, and an inline function with external linkage could be
// merged by the linker into its AVX-512 copy and then be run by a CPU that has none.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
// The same vectors wherever they lie in memory.
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

typedef uint16_t bf16;

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
INLINE vu load(const uint32_t* p) { return *reinterpret_cast<const vu_any*>(p); }
INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
INLINE void store(uint32_t* p, vu x) { *reinterpret_cast<vu_any*>(p) = x; }

INLINE vf splat(float x) { return vf{} + x; }
INLINE vu as_bits(vf x) { return reinterpret_cast<vu>(x); }
INLINE vf as_floats(vu x) { return reinterpret_cast<vf>(x); }
INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }

INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<vf>(_mm_max_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#else
  return a > b ? a : b;
#endif
}

INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<vf>(_mm_min_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#else
  return a < b ? a : b;
#endif
}
INLINE float larger(float a, float b) { return a > b ? a : b; }

// ---- shuffles of two vectors
// -------------------------------------------------------------------------------------

#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

#if defined(__AVX512F__)
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

INLINE vf even_lanes(vf a, vf b) { return SHUFFLE(a, b, EVEN_LANES); }
INLINE vf odd_lanes(vf a, vf b) { return SHUFFLE(a, b, ODD_LANES); }
INLINE vf zip_low(vf a, vf b) { return SHUFFLE(a, b, ZIP_LOW); }
INLINE vf zip_high(vf a, vf b) { return SHUFFLE(a, b, ZIP_HIGH); }

// Neighbouring lanes of the result belong to one row each, W / kRows of them, and add up to the sum of that
// row's lanes. `rows` is used up.
template <int kRows>
INLINE vf sum_each(vf (&rows)[kRows]) {
  UNROLL for (int n = kRows; n > 1; n /= 2) {
    UNROLL for (int i = 0; i < n / 2; ++i) {
      rows[i] = even_lanes(rows[2 * i], rows[2 * i + 1]) + odd_lanes(rows[2 * i], rows[2 * i + 1]);
    }
  }
  return rows[0];
}

// W x W transpose as log2(W) perfect shuffles of the rows.
INLINE void transpose(vf (&rows)[W]) {
  UNROLL for (int stage = 1; stage < W; stage *= 2) {
    vf next[W];
    UNROLL for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + W / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + W / 2]);
    }
    UNROLL for (int i = 0; i < W; ++i) rows[i] = next[i];
  }
}

INLINE float sum_lanes(vf x) {
  UNROLL for (int n = W; n > 1; n /= 2) x = even_lanes(x, x) + odd_lanes(x, x);
  return x[0];
}

INLINE float max_lanes(vf x) {
  UNROLL for (int n = W; n > 1; n /= 2) x = vmax(even_lanes(x, x), odd_lanes(x, x));
  return x[0];
}

INLINE vi lane_numbers() {
  vi lanes;
  UNROLL for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes;
}

// ---- bfloat16
// ----------------------------------------------------------------------------------------------------

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

INLINE vf load(const bf16* p) {
  return as_floats(__builtin_convertvector(*reinterpret_cast<const vh_any*>(p), vu) << 16);
}

// To nearest, ties to even, in the upper 16 bits of each lane; NaN stays NaN.
INLINE vu round_to_bf16_bits(vf x) {
  const vu bits = as_bits(x);
  const vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return reinterpret_cast<vu>(x == x ? reinterpret_cast<vi>(rounded)
                                     : reinterpret_cast<vi>(bits | 0x400000u));
}

INLINE void store(bf16* p, vf x) {
  *reinterpret_cast<vh_any*>(p) = __builtin_convertvector(round_to_bf16_bits(x) >> 16, vh);
}

// What is left of x once it has been stored as T.
INLINE vf rounded_as(float, vf x) { return x; }
INLINE vf rounded_as(bf16, vf x) { return as_floats(round_to_bf16_bits(x) & 0xffff0000u); }

// The first n < W elements; the other lanes are zero.
template <class T>
INLINE vf load_first(const T* p, int n) {
  T lanes[W] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

template <class T>
INLINE void store_first(T* p, vf x, int n) {
  T lanes[W];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// ---- exponentials
// ------------------------------------------------------------------------------------------------

constexpr float kRoundingMagic =
    12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits

// 2^x for x <= 127, exactly 0 below -126 (and for -infinity). About 2 ulp.
INLINE vf exp2_of(vf x) {
  const vf shifted = x + kRoundingMagic;
  const vf r = x - (shifted - kRoundingMagic);  // [-0.5, 0.5]
  vf y = splat(1.5403530e-4f);                  // Taylor terms ln(2)^k / k!
  y = y * r + 1.3333558e-3f;
  y = y * r + 9.6181291e-3f;
  y = y * r + 5.5504109e-2f;
  y = y * r + 2.4022651e-1f;
  y = y * r + 6.9314718e-1f;
  y = y * r + 1.0f;
  const vf scaled = as_floats(as_bits(y) + (as_bits(shifted) << 23));
  return select(x < -126.0f, vf{}, scaled);
}

#if defined(__AVX512F__)
// The same to 1e-4, for results that will be rounded to 8 bits; infinity where it overflows.
INLINE vf rough_exp2_of(vf x) {
  const vf n = (x + kRoundingMagic) - kRoundingMagic;
  const vf r = x - n;  // NaN for -infinity, which scalef makes 0 all the same
  vf y = splat(5.5171629e-2f);
  y = y * r + 2.4261116e-1f;
  y = y * r + 6.9326099e-1f;
  y = y * r + 9.9992807e-1f;
  return reinterpret_cast<vf>(_mm512_scalef_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(n)));
}
#endif

// e^x to about 1 ulp, for x clamped to [-87, 88].
INLINE vf exp_of(vf x) {
  x = vmax(vmin(x, splat(88.0f)), splat(-87.0f));
  const vf shifted = x * 1.44269504f + kRoundingMagic;
  const vf n = shifted - kRoundingMagic;
  const vf r =
      (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln(2), with ln(2) in two parts (Cody and Waite)
  vf y = splat(1.0f / 5040);
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  return as_floats(as_bits(y) + (as_bits(shifted) << 23));
}

}  // namespace
