// One tile of attention: rows of queries against a few dozen tokens of keys and values, for
// attention_tiles.cpp.
#pragma once
#include "call.h"
#include "simd.h"

namespace {

// Eight neighbouring tokens lie at base, base + stride, ... (in bytes).
constexpr int kGroup = 8;
constexpr int kGroups = kWideTile / kGroup;
struct Rows {
  const char* base[kGroups];
  int64_t stride[kGroups];
  INLINE const char* operator[](int token) const {
    return base[token / kGroup] + (token % kGroup) * stride[token / kGroup];
  }
};

// Asks for the keys and values that will be needed next, a line of eight tokens at a time: many at once would
// fill the queues to memory and hold up the loads that are needed now.
struct Ahead {
  const char* base[2 * kGroups];
  int64_t stride;
  int row_bytes, groups, group, byte;
  INLINE void ask() {
    if (group == groups) return;
    const char* line = base[group] + byte;
    UNROLL for (int j = 0; j < kGroup; ++j) __builtin_prefetch(line + j * stride);
    byte += 64;
    if (byte >= row_bytes) byte = 0, ++group;
  }
};

// Three ways to multiply. A "word" is the 32 bits that one lane multiplies: one float, or two bfloat16.

struct Floats {
  typedef float Elem;
  typedef float Prob;
  static constexpr int kPerWord = 1;
  static INLINE vf multiply_add(vf acc, vu a, vu b) { return acc + as_floats(a) * as_floats(b); }
  static INLINE vf load_words(const float* p) { return load(p); }
  static INLINE void pack_pair(const float* row, const float*, uint32_t* out) {
    store(out, as_bits(load(row))), store(out + W, as_bits(load(row + W)));
  }
  static INLINE vf weight(vf x) { return exp2_of(vmin(splat(127.0f), x)); }
  static INLINE void store_weights(const vf* weights, uint32_t* out) { store(out, as_bits(weights[0])); }
  // 2W neighbours as two vectors, in the order that costs least; `join` restores the order.
  static INLINE void split(const float* p, vf& a, vf& b) { a = load(p), b = load(p + W); }
  static INLINE void split_floats(const float* p, vf& a, vf& b) { split(p, a, b); }
  static INLINE void value_words(const float* row, const float*, vu& a, vu& b) {
    a = as_bits(load(row)), b = as_bits(load(row + W));
  }
  static INLINE void join(float* p, vf a, vf b) { store(p, a), store(p + W, b); }
};

struct WidenedBf16 {
  typedef bf16 Elem;
  typedef float Prob;
  static constexpr int kPerWord = 1;
  static INLINE vf multiply_add(vf acc, vu a, vu b) { return acc + as_floats(a) * as_floats(b); }
  static INLINE vf load_words(const bf16* p) { return load(p); }
  static INLINE void pack_pair(const bf16* row, const bf16*, uint32_t* out) {
    store(out, as_bits(load(row))), store(out + W, as_bits(load(row + W)));
  }
  static INLINE vf weight(vf x) { return exp2_of(vmin(splat(127.0f), x)); }
  static INLINE void store_weights(const vf* weights, uint32_t* out) { store(out, as_bits(weights[0])); }
  // Even and odd elements: one instruction each, while keeping their order would take two.
  static INLINE void split(const bf16* p, vf& a, vf& b) {
    const vu pairs = *reinterpret_cast<const vu_any*>(p);
    a = as_floats(pairs << 16), b = as_floats(pairs & 0xffff0000u);
  }
  static INLINE void value_words(const bf16* row, const bf16*, vu& a, vu& b) {
    vf even, odd;
    split(row, even, odd);
    a = as_bits(even), b = as_bits(odd);
  }
  static INLINE void split_floats(const float* p, vf& a, vf& b) {
    const vf low = load(p), high = load(p + W);
    a = even_lanes(low, high), b = odd_lanes(low, high);
  }
  static INLINE void join(float* p, vf a, vf b) { store(p, zip_low(a, b)), store(p + W, zip_high(a, b)); }
};

#if defined(__AVX512BF16__)
struct PairedBf16 {
  typedef bf16 Elem;
  typedef bf16 Prob;
  static constexpr int kPerWord = 2;
  static INLINE vf multiply_add(vf acc, vu a, vu b) {
    return reinterpret_cast<vf>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a),
                                                 reinterpret_cast<__m512bh>(b)));
  }
  static INLINE vf load_words(const bf16* p) { return as_floats(*reinterpret_cast<const vu_any*>(p)); }
  static INLINE void split_floats(const float* p, vf& a, vf& b) { a = load(p), b = load(p + W); }
  static INLINE void join(float* p, vf a, vf b) { store(p, a), store(p + W, b); }
  // Words of (row[d], next[d]) for 2W values of d.
  static INLINE void value_words(const bf16* row, const bf16* next, vu& low, vu& high) {
    const __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(next);
    const __m512i lanes = reinterpret_cast<__m512i>(lane_numbers());
    const __m512i index_low =
        _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
    const __m512i index_high = _mm512_add_epi16(index_low, _mm512_set1_epi16(16));
    low = reinterpret_cast<vu>(_mm512_permutex2var_epi16(a, index_low, b));
    high = reinterpret_cast<vu>(_mm512_permutex2var_epi16(a, index_high, b));
  }
  static INLINE void pack_pair(const bf16* row, const bf16* next, uint32_t* out) {
    vu low, high;
    value_words(row, next, low, high);
    store(out, low), store(out + W, high);
  }
  static INLINE vf weight(vf x) { return rough_exp2_of(x); }
  // Words of (weights[0], weights[1]), lane by lane.
  static INLINE void store_weights(const vf* weights, uint32_t* out) {
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
        reinterpret_cast<__m512>(weights[1]), reinterpret_cast<__m512>(weights[0])));
    const __m512i lanes = reinterpret_cast<__m512i>(lane_numbers());
    const __m512i zipped =
        _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
    store(out, reinterpret_cast<vu>(_mm512_permutexvar_epi16(zipped, halves)));
  }
};
#endif

// ---- softmax
// -----------------------------------------------------------------------------------------------------

// The running softmax of one row: weights are relative to 2^top, `total` is their sum.
struct Running {
  float* top;
  float* total;
  float* decay;  // what this tile multiplies the row's older sums by
};
constexpr float kNothingSeen = -1e30f;

INLINE void store_probs(float* p, vf a, vf b) { store(p, a), store(p + W, b); }
#if defined(__AVX512BF16__)
INLINE void store_probs(bf16* p, vf a, vf b) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(
                             _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a))));
}
#endif

// Turns the scores of one row into weights; tokens from `visible` on weigh nothing. cols: a multiple of 2W.
template <class Prob>
INLINE void softmax_row(float* scores, Prob* probs, int cols, int visible, float scale, float& top,
                        float& total, float& decay) {
  const vi lanes = lane_numbers();
  vf highest = splat(kNothingSeen);
  for (int t = 0; t < cols; t += W) {
    vf x = load(scores + t) * scale;
    if (t + W > visible) x = select(lanes < visible - t, x, splat(-__builtin_inff()));
    store(scores + t, x);
    highest = vmax(x, highest);
  }
  const float new_top = larger(top, max_lanes(highest));
  vf sum = vf{};
  for (int t = 0; t < cols; t += 2 * W) {
    const vf a = exp2_of(load(scores + t) - new_top), b = exp2_of(load(scores + t + W) - new_top);
    store_probs(probs + t, a, b);
    sum += a + b;
  }
  decay = exp2_of(splat(top - new_top))[0];
  total = total * decay + sum_lanes(sum);
  top = new_top;
}

// ---- wide: many rows, side by side in the lanes
// ------------------------------------------------------------------

// Up to so many vectors of rows are worked on at a time; without fused multiply-add the sums' registers are
// needed for products.
constexpr int kPanelVectors = W == 4 ? 2 : 3;

// What a panel of rows keeps from tile to tile. Element (i, row) of a matrix lies at i * lanes + row.
struct Panel {
  int row;             // the first, of the task's
  int vectors;         // lanes = vectors * W
  uint32_t* queries;   // [words of head_dim, lanes]
  float* sums;         // [head_dim, lanes]
  float *tops, *totals;
  int32_t* ends;       // the tokens a row sees are those before its end
};

// out[tokens, words of head_dim], over whole groups of tokens.
template <class Kind>
void pack_keys(const Rows& keys, int tokens, int head_dim, uint32_t* out) {
  typedef const typename Kind::Elem* Row;
  const int words = head_dim / Kind::kPerWord;
  for (int g = 0; g * kGroup < tokens; ++g, out += kGroup * words) {
    const char* base = keys.base[g];
    const int64_t stride = keys.stride[g];
    for (int d = 0; d < words; d += W, base += W * Kind::kPerWord * sizeof(typename Kind::Elem)) {
      UNROLL for (int j = 0; j < kGroup; ++j) {
        store(out + j * words + d, as_bits(Kind::load_words(reinterpret_cast<Row>(base + j * stride))));
      }
    }
  }
}

// out[words of tokens, head_dim], over whole groups of tokens.
template <class Kind>
void pack_values(const Rows& values, int tokens, int head_dim, uint32_t* out) {
  typedef const typename Kind::Elem* Row;
  for (int g = 0; g * kGroup < tokens; ++g, out += kGroup / Kind::kPerWord * head_dim) {
    const char* base = values.base[g];
    const int64_t stride = values.stride[g];
    for (int d = 0; d < head_dim; d += 2 * W, base += 2 * W * sizeof(typename Kind::Elem)) {
      UNROLL for (int j = 0; j < kGroup; j += Kind::kPerWord) {
        const Row row = reinterpret_cast<Row>(base + j * stride);
        const Row next = reinterpret_cast<Row>(base + (j + Kind::kPerWord - 1) * stride);
        Kind::pack_pair(row, next, out + j / Kind::kPerWord * head_dim + d);
      }
    }
  }
}

// c[rows, lanes] = a b, or c * decay[lanes] + a b. a[i, k] lies at i * row_step + k * depth_step; b is
// [depth, lanes]. rows and depth: multiples of 8, with AVX-512 of 16.
template <class Kind, int kVectors, bool kAdd>
INLINE void multiply(const uint32_t* a, int row_step, int depth_step, const uint32_t* b, int depth, float* c,
                     int rows, const float* decay, Ahead& ahead) {
  constexpr int lanes = kVectors * W;
  // Of 32 registers up to 24 are sums, of 16 up to 12. What lies ahead is asked for every kStretch steps, so
  // that one panel is enough for all of it (measured: in larger portions, or later, loads wait).
#if defined(__AVX512F__)
  constexpr int kRows = kVectors == 1 ? 16 : 8, kStretch = kVectors == 2 ? 16 : 8;
#else
  constexpr int kRows = kVectors == 1 ? 8 : 4, kStretch = 8;
#endif
  for (int i = 0; i < rows; i += kRows, a += kRows * row_step, c += kRows * lanes) {
    vf acc[kRows][kVectors];
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) acc[r][v] =
          kAdd ? load(c + r * lanes + v * W) * load(decay + v * W) : vf{};
    }
    for (int stretch = 0; stretch < depth; stretch += kStretch) {
      ahead.ask();
      for (int k = stretch; k < stretch + kStretch; ++k) {
        vu right[kVectors];
        UNROLL for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * lanes + v * W);
        UNROLL for (int r = 0; r < kRows; ++r) {
          const vu left = vu{} + a[r * row_step + k * depth_step];
          UNROLL for (int v = 0; v < kVectors; ++v) acc[r][v] = Kind::multiply_add(acc[r][v], left, right[v]);
        }
      }
    }
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) store(c + r * lanes + v * W, acc[r][v]);
    }
  }
}

// Sums that stay below this are no danger to float32, nor to bfloat16.
constexpr float kMuch = 1 << 30;

// weights = 2^(scores - top), and their sums; false if a sum is too large.
template <class Kind, int kVectors>
INLINE bool weigh(const float* scores, int tokens, float scale, const float* tops, uint32_t* weights,
                  float* sums) {
  constexpr int lanes = kVectors * W;
  vf top[kVectors], total[kVectors];
  UNROLL for (int v = 0; v < kVectors; ++v) top[v] = load(tops + v * W), total[v] = vf{};
  for (int t = 0; t < tokens; t += Kind::kPerWord, weights += lanes) {
    UNROLL for (int v = 0; v < kVectors; ++v) {
      vf weight[Kind::kPerWord];
      UNROLL for (int i = 0; i < Kind::kPerWord; ++i) {
        weight[i] = Kind::weight(load(scores + (t + i) * lanes + v * W) * scale - top[v]);
        total[v] += weight[i];
      }
      Kind::store_weights(weight, weights + v * W);
    }
  }
  vf wrong = vf{};
  UNROLL for (int v = 0; v < kVectors; ++v) {
    store(sums + v * W, total[v]);
    wrong += select(total[v] < kMuch, vf{}, splat(1.0f));
  }
  return max_lanes(wrong) == 0.0f;
}

// One tile of `tokens` tokens, the first of them token `first`. scratch: 2 * tokens * lanes words.
template <class Kind, int kVectors>
void panel_tile(const Panel& panel, const uint32_t* keys, const uint32_t* values, int first, int tokens,
                bool masked, int head_dim, float scale, float* scratch, Ahead& ahead) {
  constexpr int lanes = kVectors * W;
  const int words = head_dim / Kind::kPerWord;
  float *scores = scratch, decay[lanes], sums[lanes];
  uint32_t* weights = reinterpret_cast<uint32_t*>(scratch + tokens * lanes);
  multiply<Kind, kVectors, false>(keys, words, 1, panel.queries, words, scores, tokens, nullptr, ahead);
  if (masked) {
    for (int t = 0; t < tokens; ++t) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        float* at = scores + t * lanes + v * W;
        const vi end = reinterpret_cast<vi>(load(reinterpret_cast<const uint32_t*>(panel.ends + v * W)));
        store(at, select(end > first + t, load(at) * scale, splat(-__builtin_inff())));
      }
    }
    scale = 1.0f;
  }
  UNROLL for (int v = 0; v < kVectors; ++v) store(decay + v * W, splat(1.0f));
  // Weights need not be relative to the highest score, only to one that is not far below it: the first tile's
  // does for most of the others.
  if (!weigh<Kind, kVectors>(scores, tokens, scale, panel.tops, weights, sums)) {
    UNROLL for (int v = 0; v < kVectors; ++v) {
      const vf before = load(panel.tops + v * W);
      vf top = before;
      for (int t = 0; t < tokens; ++t) top = vmax(load(scores + t * lanes + v * W) * scale, top);
      store(panel.tops + v * W, top), store(decay + v * W, exp2_of(before - top));
    }
    weigh<Kind, kVectors>(scores, tokens, scale, panel.tops, weights, sums);
  }
  UNROLL for (int v = 0; v < kVectors; ++v) {
    store(panel.totals + v * W, load(panel.totals + v * W) * load(decay + v * W) + load(sums + v * W));
  }
  multiply<Kind, kVectors, true>(values, 1, head_dim, weights, tokens / Kind::kPerWord, panel.sums, head_dim,
                                 decay, ahead);
}

// ---- thin: a few rows, keys and values read where they lie
// -------------------------------------------------------

// scores[kRows, kThinTile] for `cols` tokens (a multiple of 2W). queries: kRows times head_dim elements as
// `prepare_thin_query` left them, query_bytes apart. A key is loaded once for all rows.
template <class Kind, int kRows>
void thin_scores(const char* queries, int query_bytes, const Rows& keys, int cols, int head_dim,
                 float* scores) {
  constexpr int kSums = W < kGroup ? W : kGroup;  // tokens whose sums make a vector, or half of one
  vf older[kRows];
  for (int t = 0; t < cols; t += kSums) {
    const char* base = keys[t];
    const int64_t stride = keys.stride[t / kGroup];
    vf acc[kRows][kSums];
    UNROLL for (int r = 0; r < kRows; ++r) { UNROLL for (int j = 0; j < kSums; ++j) acc[r][j] = vf{}; }
    for (int d = 0; d < head_dim; d += 2 * W) {
      UNROLL for (int j = 0; j < kSums; ++j) {
        const auto* key = reinterpret_cast<const typename Kind::Elem*>(base + j * stride) + d;
        if constexpr (Kind::kPerWord == 2) {
          const vu k = as_bits(Kind::load_words(key));
          UNROLL for (int r = 0; r < kRows; ++r) {
            const vu q = load(reinterpret_cast<const uint32_t*>(queries + r * query_bytes) + d / 2);
            acc[r][j] = Kind::multiply_add(acc[r][j], q, k);
          }
        } else {
          vf a, b;
          Kind::split(key, a, b);
          UNROLL for (int r = 0; r < kRows; ++r) {
            const float* q = reinterpret_cast<const float*>(queries + r * query_bytes) + d;
            acc[r][j] += load(q) * a;
            acc[r][j] += load(q + W) * b;
          }
        }
      }
    }
    UNROLL for (int r = 0; r < kRows; ++r) {
      const vf sums = sum_each<kSums>(acc[r]);
      if constexpr (kSums == W) {
        store(scores + r * kThinTile + t, sums);
      } else if (t % W == 0) {
        older[r] = sums;
      } else {
        store(scores + r * kThinTile + t - kSums, even_lanes(older[r], sums) + odd_lanes(older[r], sums));
      }
    }
  }
}

template <class Kind>
INLINE void thin_scores(const char* queries, int query_bytes, const Rows& keys, int cols, int head_dim,
                        float* scores, int rows) {
#if defined(__AVX512F__)
  constexpr int kMost = 3;  // of 32 registers 24 are sums
#else
  constexpr int kMost = 1;
#endif
  while (rows > 0) {
    const int parts = (rows + kMost - 1) / kMost, now = (rows + parts - 1) / parts;
    if (now == 3) {
      thin_scores<Kind, (kMost < 3 ? 1 : 3)>(queries, query_bytes, keys, cols, head_dim, scores);
    } else if (now == 2) {
      thin_scores<Kind, (kMost < 2 ? 1 : 2)>(queries, query_bytes, keys, cols, head_dim, scores);
    } else {
      thin_scores<Kind, 1>(queries, query_bytes, keys, cols, head_dim, scores);
    }
    rows -= now, queries += now * query_bytes, scores += now * kThinTile;
  }
}

template <class Kind>
INLINE void prepare_thin_query(const typename Kind::Elem* from, int head_dim, char* to) {
  if constexpr (Kind::kPerWord == 2) {
    __builtin_memcpy(to, from, 2 * head_dim);
  } else {
    for (int d = 0; d < head_dim; d += 2 * W) {
      vf a, b;
      Kind::split(from + d, a, b);
      store(reinterpret_cast<float*>(to) + d, a), store(reinterpret_cast<float*>(to) + d + W, b);
    }
  }
}

// Columns [0, kPairs * 2W) of sums[kRows, head_dim] = sums * decay[row] + probs[kRows, tokens] values, over
// whole groups of tokens.
template <class Kind, int kRows, int kPairs>
INLINE void thin_values_step(const typename Kind::Prob* probs, const Rows& values, int column, int groups,
                             int head_dim, float* sums, const float* decay) {
  typedef const typename Kind::Elem* Row;
  vf acc[kRows][2 * kPairs];
  UNROLL for (int r = 0; r < kRows; ++r) {
    UNROLL for (int v = 0; v < 2 * kPairs; v += 2) {
      Kind::split_floats(sums + r * head_dim + v * W, acc[r][v], acc[r][v + 1]);
      acc[r][v] *= decay[r], acc[r][v + 1] *= decay[r];
    }
  }
  for (int g = 0; g < groups; ++g) {
    const char* base = values.base[g];
    const int64_t stride = values.stride[g];
    UNROLL for (int j = 0; j < kGroup; j += Kind::kPerWord) {
      const Row row = reinterpret_cast<Row>(base + j * stride) + column;
      const Row next = reinterpret_cast<Row>(base + (j + Kind::kPerWord - 1) * stride) + column;
      vu right[2 * kPairs];
      UNROLL for (int v = 0; v < 2 * kPairs; v += 2)
          Kind::value_words(row + v * W, next + v * W, right[v], right[v + 1]);
      UNROLL for (int r = 0; r < kRows; ++r) {
        uint32_t word;
        __builtin_memcpy(&word, probs + r * kThinTile + g * kGroup + j, 4);
        UNROLL for (int v = 0; v < 2 * kPairs; ++v) acc[r][v] =
            Kind::multiply_add(acc[r][v], vu{} + word, right[v]);
      }
    }
  }
  UNROLL for (int r = 0; r < kRows; ++r) {
    UNROLL for (int v = 0; v < 2 * kPairs; v += 2)
        Kind::join(sums + r * head_dim + v * W, acc[r][v], acc[r][v + 1]);
  }
}

template <class Kind, int kRows>
void thin_values(const typename Kind::Prob* probs, const Rows& values, int groups, int head_dim, float* sums,
                 const float* decay) {
  int d = 0;
#if defined(__AVX512F__)
  for (; d + 4 * W <= head_dim; d += 4 * W) {
    thin_values_step<Kind, kRows, 2>(probs, values, d, groups, head_dim, sums + d, decay);
  }
#endif
  for (; d < head_dim; d += 2 * W) {
    thin_values_step<Kind, kRows, 1>(probs, values, d, groups, head_dim, sums + d, decay);
  }
}

template <class Kind>
INLINE void thin_values(const typename Kind::Prob* probs, const Rows& values, int groups, int head_dim,
                        float* sums, const float* decay, int rows) {
  for (; rows > 0; rows -= 4, probs += 4 * kThinTile, sums += 4 * head_dim, decay += 4) {
    switch (rows) {
      case 1:
        thin_values<Kind, 1>(probs, values, groups, head_dim, sums, decay);
        break;
      case 2:
        thin_values<Kind, 2>(probs, values, groups, head_dim, sums, decay);
        break;
      case 3:
        thin_values<Kind, 3>(probs, values, groups, head_dim, sums, decay);
        break;
      default:
        thin_values<Kind, 4>(probs, values, groups, head_dim, sums, decay);
        break;
    }
  }
}

}  // namespace
