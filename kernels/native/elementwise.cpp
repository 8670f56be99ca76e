// The element-wise parts of a decoder layer, for one instruction set.
//
// Compiled with -ffp-contract=off, and every intermediate is rounded where the unfused torch code rounds it:
// the same operations in the same order give the same bits, save for the order of a mean's sum and the last
// place of exp.
#include "call.h"
#include "simd.h"

#ifndef PAGETURNER_ISA
#error "compile with -DPAGETURNER_ISA=<name>"
#endif

namespace {

// Calls each(d, load, store) for all of [0, width): whole vectors first, then what is left of one.
template <class Whole, class Rest>
INLINE void for_vectors(int64_t width, Whole whole, Rest rest) {
  int64_t d = 0;
  for (; d + W <= width; d += W) whole(d);
  if (d < width) rest(d, static_cast<int>(width - d));
}

template <class T>
INLINE float inverse_rms(const T* x, int64_t width, float eps) {
  vf sums[4] = {};  // four short sums round less than a long one, and don't wait for each other
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const vf v = load(x + d + i * W);
      sums[i] += v * v;
    }
  }
  for (; d < width; d += W) {
    const vf v = d + W <= width ? load(x + d) : load_first(x + d, static_cast<int>(width - d));
    sums[0] += v * v;
  }
  const float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
}

// x * factor is rounded before the weight comes in, as transformers does it.
template <class T>
INLINE vf normed(vf x, float factor, vf weight) {
  return rounded_as(T(), x * factor) * weight;
}

template <class T>
void norm(const NormCall& call, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(call.weight);
  for (int64_t token = begin; token < end; ++token) {
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
    T* out = static_cast<T*>(call.out) + token * call.out_stride;
    if (call.residual) {
      T* sum = static_cast<T*>(call.residual) + token * call.residual_stride;
      for_vectors(
          call.width, [&](int64_t d) { store(sum + d, load(sum + d) + load(x + d)); },
          [&](int64_t d, int n) { store_first(sum + d, load_first(sum + d, n) + load_first(x + d, n), n); });
      x = sum;
    }
    const float factor = inverse_rms(x, call.width, static_cast<float>(call.eps));
    for_vectors(
        call.width, [&](int64_t d) { store(out + d, normed<T>(load(x + d), factor, load(weight + d))); },
        [&](int64_t d, int n) {
          store_first(out + d, normed<T>(load_first(x + d, n), factor, load_first(weight + d, n)), n);
        });
  }
}

// One head: x cos + rotate_half(x) sin, normalised before when there is a weight. head_dim: a multiple of 2W.
template <class T>
INLINE void rotate(const T* x, const T* cos, const T* sin, const T* weight, float eps, int64_t head_dim,
                   T* out) {
  const int64_t half = head_dim / 2;
  const float factor = weight ? inverse_rms(x, head_dim, eps) : 1.0f;
  for (int64_t d = 0; d < half; d += W) {
    vf a = load(x + d), b = load(x + half + d);
    if (weight) {
      a = rounded_as(T(), normed<T>(a, factor, load(weight + d)));
      b = rounded_as(T(), normed<T>(b, factor, load(weight + half + d)));
    }
    const vf a_cos = rounded_as(T(), a * load(cos + d)), b_sin = rounded_as(T(), -b * load(sin + d));
    const vf b_cos = rounded_as(T(), b * load(cos + half + d)),
             a_sin = rounded_as(T(), a * load(sin + half + d));
    store(out + d, a_cos + b_sin);
    store(out + half + d, b_cos + a_sin);
  }
}

template <class T>
void rope(const RopeCall& call, int64_t begin, int64_t end) {
  const Pool& pool = call.pool;
  const int64_t head_dim = call.head_dim;
  const float eps = static_cast<float>(call.eps);
  for (int64_t token = begin; token < end; ++token) {
    const T* qkv = static_cast<const T*>(call.qkv) + token * call.qkv_stride;
    const T* cos = static_cast<const T*>(call.cos) + token * call.cos_stride;
    const T* sin = static_cast<const T*>(call.sin) + token * call.sin_stride;
    T* out = static_cast<T*>(call.out_q) + token * call.out_stride;
    for (int64_t h = 0; h < call.q_heads; ++h, qkv += head_dim) {
      rotate(qkv, cos, sin, static_cast<const T*>(call.q_weight), eps, head_dim, out + h * head_dim);
    }
    T* slot = static_cast<T*>(pool.data) + call.slots[token] / pool.block_size * pool.block_stride +
              call.slots[token] % pool.block_size * pool.token_stride;
    for (int64_t h = 0; h < pool.kv_heads; ++h, qkv += head_dim) {
      rotate(qkv, cos, sin, static_cast<const T*>(call.k_weight), eps, head_dim, slot + h * pool.head_stride);
    }
    for (int64_t h = 0; h < pool.kv_heads; ++h, qkv += head_dim) {
      __builtin_memcpy(slot + pool.half_stride + h * pool.head_stride, qkv, sizeof(T) * head_dim);
    }
  }
}

template <class T>
INLINE vf swiglu(vf gate, vf up) {
  return rounded_as(T(), gate / (1.0f + exp_of(-gate))) * up;
}

template <class T>
void silu(const SiluCall& call, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const T* gate = static_cast<const T*>(call.gate_up) + token * call.gate_up_stride;
    const T* up = gate + call.inner;
    T* out = static_cast<T*>(call.out) + token * call.out_stride;
    for_vectors(
        call.inner, [&](int64_t d) { store(out + d, swiglu<T>(load(gate + d), load(up + d))); },
        [&](int64_t d, int n) {
          store_first(out + d, swiglu<T>(load_first(gate + d, n), load_first(up + d, n)), n);
        });
  }
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" void JOIN(pageturner_elementwise_, PAGETURNER_ISA)(Kernels* kernels) {
  kernels->of[kFloat32].norm = norm<float>;
  kernels->of[kFloat32].rope = rope<float>;
  kernels->of[kFloat32].silu = silu<float>;
  kernels->of[kBFloat16].norm = norm<bf16>;
  kernels->of[kBFloat16].rope = rope<bf16>;
  kernels->of[kBFloat16].silu = silu<bf16>;
}
