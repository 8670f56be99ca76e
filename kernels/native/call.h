// What passes between the planner, the runtime and the kernels of each instruction set. Strides count
// elements.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kDTypes = 2 };

// The *Call records are packed by Python (kernels/native/__init__.py: the same fields in the same order),
// hence only fields of eight bytes.

// PagedBatch of kernels/attention.py.
struct Batch {
  const int32_t* block_tables;  // [seqs, table_stride]
  const int32_t* query_starts;  // [seqs + 1]
  const int32_t* kv_lens;       // [seqs]
  int64_t table_stride;
  int64_t seqs;
};

// One layer's slice of the pool: [blocks, 2, block_size, kv_heads, head_dim].
struct Pool {
  void* data;
  int64_t block_stride, half_stride, token_stride, head_stride;
  int64_t block_size, kv_heads;
};

struct AttentionCall {
  Batch batch;
  Pool pool;
  const void* query;  // [tokens, kv_heads * group, head_dim]
  void* out;          // the same shape
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t group;  // query heads that share one KV head
  int64_t head_dim;
  double scale;
};

// A sequence's query tokens times the query heads of one KV head are that head's rows: row = token * group +
// head. So many rows or fewer take the thin kernel, which reads keys and values where they lie; more take the
// wide one, which packs them for a matrix product and has its rows in the lanes of vectors.
constexpr int kThinRows = 8;
// Rows of one wide task and head: enough to pay for the packing, few enough for the second-level cache.
constexpr int kWideRows = 96;
// With few rows a wide task takes several heads, which lie next to each other in memory: up to so many lanes.
constexpr int kWideLanes = 240;
// KV tokens looked at together. Few, because while they are worked on the next ones are asked for, and these
// must stay in the cache until then; but the more there are, the fewer passes over the sums.
constexpr int kThinTile = 32, kWideTile = 64;

// Rows [row, row + rows) of `heads` KV heads of one sequence against KV tokens [kv_begin, kv_end).
struct Task {
  int32_t seq;
  int32_t head, heads;
  int32_t row, rows;
  int32_t kv_begin, kv_end;
  int32_t unit, split;
};

// All tasks over the same rows: `splits` stretches of the same context. The last to finish merges them in
// order.
struct Unit {
  int32_t splits;
  int32_t unfinished;
  float* partials;  // [splits, heads * rows * (head_dim + 2)]; null when there is nothing to merge
};

struct NormCall {
  void *x, *weight, *residual, *out;  // [tokens, width]; residual may be null
  int64_t x_stride, residual_stride, out_stride;
  int64_t tokens, width;
  double eps;
};

struct RopeCall {
  Pool pool;
  const void* qkv;        // [tokens, (q_heads + 2 * kv_heads) * head_dim]
  const void *cos, *sin;  // [tokens, head_dim]
  const int64_t* slots;
  void* out_q;                      // [tokens, q_heads, head_dim]
  const void *q_weight, *k_weight;  // [head_dim] or null: RMSNorm of each head before the rotation
  int64_t qkv_stride, cos_stride, sin_stride, out_stride;
  int64_t tokens, q_heads, head_dim;
  double eps;
};

struct SiluCall {
  const void* gate_up;  // [tokens, 2 * inner]
  void* out;            // [tokens, inner]
  int64_t gate_up_stride, out_stride;
  int64_t tokens, inner;
};

struct WriteCall {
  Pool pool;
  const void *key, *value;  // [tokens, kv_heads, head_dim]
  const int64_t* slots;
  // These and the pool's strides in bytes.
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t tokens, row_bytes;  // row_bytes: of one head
};

// Everything one instruction set offers. Functions on a range work on tokens [begin, end).
struct Kernels {
  const char* name;
  int32_t width;  // floats in a vector; head_dim must be a multiple of twice that
  struct PerType {
    void (*attend_thin)(const AttentionCall&, const Task&, float* partial, char* scratch);
    void (*attend_wide)(const AttentionCall&, const Task&, float* partial, char* scratch);
    void (*merge)(const AttentionCall&, const Task&, const Unit&);
    void (*norm)(const NormCall&, int64_t begin, int64_t end);
    void (*rope)(const RopeCall&, int64_t begin, int64_t end);
    void (*silu)(const SiluCall&, int64_t begin, int64_t end);
  } of[kDTypes];
};
