// Attention of one task, for one instruction set (see tile.h for the arithmetic of a tile).
//
// Online softmax over tiles of tokens (Milakov and Gimelshein, "Online normalizer calculation for softmax"),
// tiled like FlashAttention (Dao et al.). How a row's context is cut into splits and tiles depends on its own
// sequence only, so its result is the same to the bit whatever else is in the batch and however many threads
// run.
#include "tile.h"

#ifndef PAGETURNER_ISA
#error "compile with -DPAGETURNER_ISA=<name>"
#endif

namespace {

constexpr float kLog2E = 1.44269504088896341f;

INLINE int round_up(int n, int step) { return (n + step - 1) / step * step; }
template <class T>
INLINE T smaller(T a, T b) {
  return a < b ? a : b;
}

// A cursor over one thread's scratch memory, cut into 64-byte aligned pieces.
struct Scratch {
  char* at;
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

// Where the keys or values (half 0 or 1) of one head lie, tile by tile.
template <class Elem>
struct PoolReader {
  const Pool& pool;
  const int32_t* table;
  int head_dim;
  Elem* zeros;   // head_dim of them
  Elem* copies;  // [tile, head_dim]: groups of tokens that don't lie together
  int tile;      // tokens
  bool groups_lie_together;

  PoolReader(const AttentionCall& call, int seq, int tile_tokens, Scratch& scratch)
      : pool(call.pool),
        table(call.batch.block_tables + seq * call.batch.table_stride),
        head_dim(static_cast<int>(call.head_dim)),
        zeros(scratch.take<Elem>(head_dim)),
        copies(scratch.take<Elem>(tile_tokens * head_dim)),
        tile(tile_tokens),
        groups_lie_together(pool.block_size % kGroup == 0) {
    __builtin_memset(zeros, 0, head_dim * sizeof(Elem));
  }

  INLINE const Elem* token(int t) const {
    const uint32_t block_size = static_cast<uint32_t>(pool.block_size), at = static_cast<uint32_t>(t);
    return static_cast<const Elem*>(pool.data) + table[at / block_size] * pool.block_stride +
           at % block_size * pool.token_stride;
  }

  // The first tokens of the tile's groups, as far as there are tokens. Half and head are added by the users.
  struct Place {
    const Elem* group[kGroups];
    int tokens;
  };
  INLINE Place place(int t, int end) const {
    Place place;
    place.tokens = smaller(tile, end - t);
    for (int g = 0; g * kGroup < place.tokens; ++g) place.group[g] = token(t + g * kGroup);
    return place;
  }

  // The keys or values (half 0 or 1) of one head: the tile's tokens, then zeros up to a multiple of 2W. Never
  // touches a slot behind the last token: it may hold anything.
  INLINE Rows rows(const Place& place, int t, int half, int head) const {
    Rows rows;
    const int64_t offset = half * pool.half_stride + head * pool.head_stride;
    for (int g = 0; g * kGroup < round_up(place.tokens, 2 * W); ++g) {
      const int first = g * kGroup, here = smaller(place.tokens - first, kGroup);
      if (here == kGroup && groups_lie_together) {
        rows.base[g] = reinterpret_cast<const char*>(place.group[g] + offset);
        rows.stride[g] = pool.token_stride * sizeof(Elem);
      } else if (here > 0) {
        Elem* copy = copies + first * head_dim;
        __builtin_memset(copy, 0, kGroup * head_dim * sizeof(Elem));
        for (int j = 0; j < here; ++j) {
          __builtin_memcpy(copy + j * head_dim, token(t + first + j) + offset, head_dim * sizeof(Elem));
        }
        rows.base[g] = reinterpret_cast<const char*>(copy);
        rows.stride[g] = head_dim * sizeof(Elem);
      } else {
        rows.base[g] = reinterpret_cast<const char*>(zeros);
        rows.stride[g] = 0;
      }
    }
    return rows;
  }

  // The keys and the values of one head in a tile.
  INLINE Ahead ahead(const Place& place, int head) const {
    Ahead ahead;
    ahead.stride = pool.token_stride * sizeof(Elem);
    ahead.row_bytes = head_dim * static_cast<int>(sizeof(Elem));
    ahead.groups = ahead.group = ahead.byte = 0;
    for (int half = 0; half < 2; ++half) {
      const int64_t offset = half * pool.half_stride + head * pool.head_stride;
      for (int g = 0; g * kGroup < place.tokens; ++g) {
        ahead.base[ahead.groups++] = reinterpret_cast<const char*>(place.group[g] + offset);
      }
    }
    return ahead;
  }

  // Asks for every second group of tokens, beginning with `part`. All of them at once would fill the queues
  // to memory and hold up the loads that are needed now.
  INLINE void prefetch(const Place& place, int half, int head, int part) const {
    const int64_t offset = half * pool.half_stride + head * pool.head_stride;
    for (int g = part; g * kGroup < place.tokens; g += 2) {
      for (int j = 0; j < kGroup; ++j) {
        const char* row = reinterpret_cast<const char*>(place.group[g] + offset + j * pool.token_stride);
        for (int byte = 0; byte < head_dim * static_cast<int>(sizeof(Elem)); byte += 64)
          __builtin_prefetch(row + byte);
      }
    }
  }
};

// Which token and which head a row of a task is.
struct RowMap {
  const AttentionCall& call;
  int64_t first_token;  // of the sequence, in the batch
  int first_position;   // of that token, in the sequence

  RowMap(const AttentionCall& c, int seq)
      : call(c),
        first_token(c.batch.query_starts[seq]),
        first_position(c.batch.kv_lens[seq] - (c.batch.query_starts[seq + 1] - c.batch.query_starts[seq])) {}
  INLINE int position(int row) const { return first_position + static_cast<int>(row / call.group); }
  template <class Elem>
  INLINE const Elem* query(int head, int row) const {
    return static_cast<const Elem*>(call.query) + (first_token + row / call.group) * call.query_token_stride +
           (head * call.group + row % call.group) * call.query_head_stride;
  }
  template <class Elem>
  INLINE Elem* out(int head, int row) const {
    return static_cast<Elem*>(call.out) + (first_token + row / call.group) * call.out_token_stride +
           (head * call.group + row % call.group) * call.out_head_stride;
  }
};

template <class Elem>
INLINE void write_row(Elem* out, const float* sums, int head_dim, float factor) {
  for (int d = 0; d < head_dim; d += W) store(out + d, load(sums + d) * factor);
}

// One split's rows of a unit: weighted sums, then tops, then totals.
struct Partial {
  float *sums, *tops, *totals;
  Partial(float* base, int rows, int head_dim)
      : sums(base), tops(base + static_cast<int64_t>(rows) * head_dim), totals(tops + rows) {}
};

template <class Kind>
void attend_thin(const AttentionCall& call, const Task& task, float* partial, char* scratch_memory) {
  typedef typename Kind::Elem Elem;
  Scratch scratch{scratch_memory};
  const int head_dim = static_cast<int>(call.head_dim), rows = task.rows, all_rows = task.heads * rows;
  const RowMap map(call, task.seq);
  const PoolReader<Elem> pool(call, task.seq, kThinTile, scratch);
  const int query_bytes = head_dim * (Kind::kPerWord == 2 ? 2 : 4);
  char* queries = scratch.take<char>(static_cast<int64_t>(all_rows) * query_bytes);
  float* scores = scratch.take<float>(kThinRows * kThinTile);
  typename Kind::Prob* probs = scratch.take<typename Kind::Prob>(kThinRows * kThinTile);
  const float scale = static_cast<float>(call.scale) * kLog2E;
  float decay[kThinRows];
  // With splits the sums grow where the merge will look for them.
  const Partial state(
      partial ? partial : scratch.take<float>(static_cast<int64_t>(all_rows) * (head_dim + 2)), all_rows,
      head_dim);

  for (int i = 0; i < all_rows; ++i) {
    prepare_thin_query<Kind>(map.query<Elem>(task.head + i / rows, task.row + i % rows), head_dim,
                             queries + i * query_bytes);
    state.tops[i] = kNothingSeen, state.totals[i] = 0.0f;
  }
  __builtin_memset(state.sums, 0, sizeof(float) * all_rows * head_dim);

  auto next = pool.place(task.kv_begin, task.kv_end);
  for (int t = task.kv_begin; t < task.kv_end; t += kThinTile) {
    const auto here = next;
    next = pool.place(t + kThinTile, task.kv_end);
    const int cols = round_up(here.tokens, 2 * W), groups = round_up(here.tokens, kGroup) / kGroup;
    for (int h = 0; h < task.heads; ++h) {
      const int first = h * rows;
      const Rows keys = pool.rows(here, t, 0, task.head + h);
      pool.prefetch(next, 0, task.head + h, 0);
      thin_scores<Kind>(queries + first * query_bytes, query_bytes, keys, cols, head_dim, scores, rows);
      pool.prefetch(next, 0, task.head + h, 1);
      for (int r = 0; r < rows; ++r) {
        softmax_row(scores + r * kThinTile, probs + r * kThinTile, cols, map.position(task.row + r) + 1 - t,
                    scale, state.tops[first + r], state.totals[first + r], decay[r]);
      }
      const Rows values = pool.rows(here, t, 1, task.head + h);
      pool.prefetch(next, 1, task.head + h, 0);
      thin_values<Kind>(probs, values, groups, head_dim, state.sums + static_cast<int64_t>(first) * head_dim,
                        decay, rows);
      pool.prefetch(next, 1, task.head + h, 1);
    }
  }
  if (partial) return;
  for (int i = 0; i < all_rows; ++i) {
    write_row(map.out<Elem>(task.head + i / rows, task.row + i % rows),
              state.sums + static_cast<int64_t>(i) * head_dim, head_dim, 1.0f / state.totals[i]);
  }
}

// One vector of a panel's rows, `row` being the first, to the lanes of its queries.
template <class Kind>
INLINE void load_queries(const RowMap& map, int head, int row, int last_row, int words, uint32_t* out,
                         int lanes) {
  for (int d = 0; d < words; d += W) {
    vf lines[W];
    for (int i = 0; i < W; ++i) {  // the last row again where there is none
      const auto* query = map.query<typename Kind::Elem>(head, smaller(row + i, last_row));
      lines[i] = Kind::load_words(query + d * Kind::kPerWord);
    }
    transpose(lines);
    UNROLL for (int i = 0; i < W; ++i) store(out + (d + i) * lanes, as_bits(lines[i]));
  }
}

template <class Kind>
void attend_wide(const AttentionCall& call, const Task& task, float* partial, char* scratch_memory) {
  typedef typename Kind::Elem Elem;
  Scratch scratch{scratch_memory};
  const int head_dim = static_cast<int>(call.head_dim), words = head_dim / Kind::kPerWord;
  const int rows = task.rows, vectors = round_up(rows, W) / W;
  const int panels = (vectors + kPanelVectors - 1) / kPanelVectors, all_panels = task.heads * panels;
  const RowMap map(call, task.seq);
  const PoolReader<Elem> pool(call, task.seq, kWideTile, scratch);
  uint32_t* keys = scratch.take<uint32_t>(kWideTile * words);
  uint32_t* values = scratch.take<uint32_t>(kWideTile / Kind::kPerWord * head_dim);
  float* tile_scratch = scratch.take<float>(2 * kWideTile * kPanelVectors * W);
  const float scale = static_cast<float>(call.scale) * kLog2E;

  Panel* panel = scratch.take<Panel>(all_panels);
  for (int p = 0; p < all_panels; ++p) {
    // A head's panels are alike but for a vector.
    const int first = p % panels * vectors / panels, now = (p % panels + 1) * vectors / panels - first;
    const int head = task.head + p / panels, lanes = now * W, row = first * W;
    panel[p] = {row,
                now,
                scratch.take<uint32_t>(words * lanes),
                scratch.take<float>(head_dim * lanes),
                scratch.take<float>(lanes),
                scratch.take<float>(lanes),
                scratch.take<int32_t>(lanes)};
    __builtin_memset(panel[p].sums, 0, sizeof(float) * head_dim * lanes);
    for (int i = 0; i < lanes; ++i) {
      panel[p].tops[i] = kNothingSeen, panel[p].totals[i] = 0.0f;
      panel[p].ends[i] = map.position(task.row + smaller(row + i, rows - 1)) + 1;
    }
    for (int lane = 0; lane < lanes; lane += W) {
      load_queries<Kind>(map, head, task.row + row + lane, task.row + rows - 1, words,
                         panel[p].queries + lane, lanes);
    }
  }

  auto next = pool.place(task.kv_begin, task.kv_end);
  for (int t = task.kv_begin; t < task.kv_end; t += kWideTile) {
    const auto here = next;
    next = pool.place(t + kWideTile, task.kv_end);
    const int tokens = round_up(here.tokens, 2 * W);
    for (int h = 0; h < task.heads; ++h) {
      pack_keys<Kind>(pool.rows(here, t, 0, task.head + h), tokens, head_dim, keys);
      pack_values<Kind>(pool.rows(here, t, 1, task.head + h), tokens, head_dim, values);
      Ahead ahead = h + 1 < task.heads ? pool.ahead(here, task.head + h + 1) : pool.ahead(next, task.head);
      for (const Panel* it = panel + h * panels; it < panel + (h + 1) * panels; ++it) {
        const bool masked = t + tokens > it->ends[0];
        const auto run = it->vectors == 3   ? panel_tile<Kind, 3>
                         : it->vectors == 2 ? panel_tile<Kind, 2>
                                            : panel_tile<Kind, 1>;
        run(*it, keys, values, t, tokens, masked, head_dim, scale, tile_scratch, ahead);
      }
    }
  }

  const Partial state(partial, task.heads * rows, head_dim);
  for (int p = 0; p < all_panels; ++p) {
    const int lanes = panel[p].vectors * W, head = p / panels;
    for (int lane = 0; lane < lanes; lane += W) {
      const int row = panel[p].row + lane, here = smaller(W, rows - row);
      for (int d = 0; d < head_dim; d += W) {
        vf lines[W];
        UNROLL for (int i = 0; i < W; ++i) lines[i] = load(panel[p].sums + (d + i) * lanes + lane);
        transpose(lines);
        for (int i = 0; i < here; ++i) {
          if (partial) {
            store(state.sums + static_cast<int64_t>(head * rows + row + i) * head_dim + d, lines[i]);
          } else {
            store(map.out<Elem>(task.head + head, task.row + row + i) + d,
                  lines[i] * (1.0f / panel[p].totals[lane + i]));
          }
        }
      }
      for (int i = 0; partial && i < here; ++i) {
        state.tops[head * rows + row + i] = panel[p].tops[lane + i];
        state.totals[head * rows + row + i] = panel[p].totals[lane + i];
      }
    }
  }
}

// Splits are added up in their order, whichever thread does it.
template <class Elem>
void merge(const AttentionCall& call, const Task& task, const Unit& unit) {
  const int head_dim = static_cast<int>(call.head_dim), all_rows = task.heads * task.rows;
  const int64_t size = static_cast<int64_t>(all_rows) * (head_dim + 2);
  const RowMap map(call, task.seq);
  for (int i = 0; i < all_rows; ++i) {
    const Partial first(unit.partials, all_rows, head_dim);
    float top = first.tops[i];
    for (int s = 1; s < unit.splits; ++s) {
      top = larger(top, Partial(unit.partials + s * size, all_rows, head_dim).tops[i]);
    }
    float total = 0.0f;
    float* sums = first.sums + static_cast<int64_t>(i) * head_dim;
    for (int s = 0; s < unit.splits; ++s) {
      const Partial part(unit.partials + s * size, all_rows, head_dim);
      const float factor = exp2_of(splat(part.tops[i] - top))[0];
      total += part.totals[i] * factor;
      const float* more = part.sums + static_cast<int64_t>(i) * head_dim;
      for (int d = 0; d < head_dim; d += W) {
        const vf older = s == 0 ? vf{} : load(sums + d);
        store(sums + d, older + load(more + d) * factor);
      }
    }
    write_row(map.out<Elem>(task.head + i / task.rows, task.row + i % task.rows), sums, head_dim,
              1.0f / total);
  }
}

#if defined(__AVX512BF16__)
typedef PairedBf16 Bf16Kind;
#else
typedef WidenedBf16 Bf16Kind;
#endif

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" void JOIN(pageturner_attention_, PAGETURNER_ISA)(Kernels* kernels) {
  kernels->width = W;
  kernels->of[kFloat32].attend_thin = attend_thin<Floats>;
  kernels->of[kFloat32].attend_wide = attend_wide<Floats>;
  kernels->of[kFloat32].merge = merge<float>;
  kernels->of[kBFloat16].attend_thin = attend_thin<Bf16Kind>;
  kernels->of[kBFloat16].attend_wide = attend_wide<Bf16Kind>;
  kernels->of[kBFloat16].merge = merge<bf16>;
}
