// The C face of the library, and the planner that cuts a batch into tasks. Compiled for the oldest CPU.
#include "call.h"
#include "runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---- instruction sets
// --------------------------------------------------------------------------------------------

// The build lists what the compiler managed: -DPAGETURNER_ISAS="X(baseline) X(avx2)".
#define X(isa)                                          \
  extern "C" void pageturner_attention_##isa(Kernels*); \
  extern "C" void pageturner_elementwise_##isa(Kernels*);
PAGETURNER_ISAS
#undef X

namespace {

enum Isa { baseline, avx2, avx512, avx512bf16, kIsas };

bool cpu_runs(int isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();  // also asks the operating system whether it saves the registers
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case avx2:
      return has_avx2;
    case avx512:
      return has_avx512;
    case avx512bf16:
      return has_avx512 && __builtin_cpu_supports("avx512bf16");
    default:
      return isa == baseline;
  }
#else
  return isa == baseline;
#endif
}

Kernels all_kernels[kIsas];  // name is null: not built, or this CPU can't run it
int chosen = -1;

// The best chosen kernels that can cut head_dim into pairs of vectors.
const Kernels* kernels_for(int64_t head_dim) {
  for (int isa = chosen; isa >= 0; --isa) {
    const Kernels& kernels = all_kernels[isa];
    if (kernels.name && head_dim % (2 * kernels.width) == 0) return &kernels;
  }
  return nullptr;
}

}  // namespace

// Finds what this CPU can run. Returns how many instruction sets there are to ask about.
EXPORT int pageturner_probe() {
#define X(isa)                                       \
  if (cpu_runs(isa)) {                               \
    pageturner_attention_##isa(&all_kernels[isa]);   \
    pageturner_elementwise_##isa(&all_kernels[isa]); \
    all_kernels[isa].name = #isa;                    \
    chosen = isa;                                    \
  }
  PAGETURNER_ISAS
#undef X
  return kIsas;
}

EXPORT const char* pageturner_isa_name(int isa) { return all_kernels[isa].name; }
EXPORT int pageturner_chosen_isa() { return chosen; }
EXPORT void pageturner_choose_isa(int isa) { chosen = isa; }
EXPORT int pageturner_supports(int64_t head_dim) {
  return head_dim > 0 && head_dim <= 256 && kernels_for(head_dim);
}

// ---- planning an attention call
// ----------------------------------------------------------------------------------

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int round_up(int a, int b) { return ceil_div(a, b) * b; }
int larger(int a, int b) { return a > b ? a : b; }
int smaller(int a, int b) { return a < b ? a : b; }

constexpr int kSplitStep = 256;
static_assert(kSplitStep % kThinTile == 0 && kSplitStep % kWideTile == 0, "splits are whole tiles");

// How many KV tokens one split covers. It must follow from the sequence alone: see attention_tiles.cpp.
int thin_split(int kv_len) { return larger(kSplitStep, round_up(ceil_div(kv_len, 32), kSplitStep)); }
// A few splits of a short chunk, as each has its queries to load and its sums to merge; one of a long prompt.
int wide_split(int kv_len, int row_tiles) {
  return larger(kSplitStep,
                round_up(static_cast<int>(static_cast<int64_t>(kv_len) * (row_tiles + 2) / 16), kSplitStep));
}

struct Plan {
  const AttentionCall& call;
  int heads_per_task;
  // Counted first, then filled.
  int64_t tasks = 0, units = 0, partial_floats = 0;
  int64_t work = 0;  // bytes a thin task reads, or as long as it takes to read so many
  Task* task = nullptr;
  Unit* unit = nullptr;
  float* partial = nullptr;

  void add_unit(int seq, int head, int heads, int row, int rows, int kv_end, int split) {
    const int splits = ceil_div(kv_end, split);
    const int64_t floats = static_cast<int64_t>(heads) * rows * (call.head_dim + 2);
    if (unit) {
      unit[units] = Unit{splits, splits, splits > 1 ? partial + partial_floats : nullptr};
      for (int s = 0; s < splits; ++s) {
        task[tasks + s] = Task{seq,
                               head,
                               heads,
                               row,
                               rows,
                               s * split,
                               smaller(kv_end, (s + 1) * split),
                               static_cast<int32_t>(units),
                               s};
      }
    }
    ++units;
    tasks += splits;
    if (splits > 1) partial_floats += splits * floats;
    work += static_cast<int64_t>(heads) * kv_end * call.head_dim * 4 * (rows > kThinRows ? rows / 2 : 1);
  }

  // Long tasks come first, so that no thread starts one when the others have finished.
  void cut() {
    tasks = units = partial_floats = work = 0;
    const Batch& batch = call.batch;
    const int group = static_cast<int>(call.group), kv_heads = static_cast<int>(call.pool.kv_heads);
    for (int thin = 0; thin < 2; ++thin) {
      for (int seq = 0; seq < batch.seqs; ++seq) {
        const int query_len = batch.query_starts[seq + 1] - batch.query_starts[seq],
                  kv_len = batch.kv_lens[seq];
        const int rows = query_len * group;
        if (rows == 0 || (rows <= kThinRows) != thin) continue;
        if (thin) {
          for (int head = 0; head < kv_heads; head += heads_per_task) {
            add_unit(seq, head, smaller(heads_per_task, kv_heads - head), 0, rows, kv_len,
                     thin_split(kv_len));
          }
          continue;
        }
        const int tiles = ceil_div(rows, kWideRows);
        for (int tile = tiles - 1; tile >= 0; --tile) {
          const int row = tile * kWideRows, count = smaller(kWideRows, rows - row);
          const int kv_end = kv_len - query_len + (row + count - 1) / group + 1;
          const int heads = smaller(heads_per_task, larger(1, kWideLanes / round_up(count, 16)));
          for (int head = 0; head < kv_heads; head += heads) {
            add_unit(seq, head, smaller(heads, kv_heads - head), row, count, kv_end,
                     wide_split(kv_len, tiles));
          }
        }
      }
    }
  }
};

struct AttentionRun {
  const AttentionCall* call;
  const Kernels::PerType* kernels;
  const Task* task;
  Unit* unit;
  int64_t tasks;
  char* scratch;
  size_t scratch_size;
  int64_t next_task;
  int32_t next_thread;
};

void run_tasks(void* run_pointer) {
  AttentionRun* run = static_cast<AttentionRun*>(run_pointer);
  char* scratch =
      run->scratch + run->scratch_size * __atomic_fetch_add(&run->next_thread, 1, __ATOMIC_RELAXED);
  for (;;) {
    const int64_t i = __atomic_fetch_add(&run->next_task, 1, __ATOMIC_RELAXED);
    if (i >= run->tasks) return;
    const Task& task = run->task[i];
    Unit& unit = run->unit[task.unit];
    const int64_t floats = static_cast<int64_t>(task.heads) * task.rows * (run->call->head_dim + 2);
    float* partial = unit.partials ? unit.partials + task.split * floats : nullptr;
    (task.rows > kThinRows ? run->kernels->attend_wide : run->kernels->attend_thin)(*run->call, task, partial,
                                                                                    scratch);
    if (partial && __atomic_sub_fetch(&unit.unfinished, 1, __ATOMIC_ACQ_REL) == 0) {
      run->kernels->merge(*run->call, task, unit);
    }
  }
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// An upper bound of what attend_thin and attend_wide take out of one thread's scratch.
size_t scratch_bytes(const AttentionCall& call, int heads_per_task) {
  const size_t dim = call.head_dim, thin_rows = static_cast<size_t>(heads_per_task) * kThinRows;
  const size_t reader = dim + kWideTile * dim;
  const size_t thin = thin_rows * (2 * dim + 2) + 2 * kThinRows * kThinTile;
  // Besides queries and sums a lane has three numbers, its share of what describes a panel, and some padding.
  const size_t wide = kWideLanes * (2 * dim + 16) + 2 * kWideTile * dim + 2 * kWideTile * 3 * 16;
  return aligned(sizeof(float) * (reader + (thin > wide ? thin : wide)) + 16 * 64);
}

}  // namespace

// 0, or -1 when there is no memory.
EXPORT int pageturner_attention(const AttentionCall* call, int dtype) {
  const Kernels* kernels = kernels_for(call->head_dim);
  const int threads = max_threads();

  // All heads in one task read whole blocks in a row; with few tasks they are dealt out instead.
  Plan plan{*call, static_cast<int>(call->pool.kv_heads)};
  plan.cut();
  while (plan.tasks < 3 * threads && threads > 1 && plan.heads_per_task > 1) {
    plan.heads_per_task = ceil_div(plan.heads_per_task, 2);
    plan.cut();
  }
  const int count = worthwhile_threads(plan.tasks, plan.work);

  Workspace* workspace = Workspace::take();
  const size_t scratch = scratch_bytes(*call, plan.heads_per_task);
  const size_t task_bytes = aligned(sizeof(Task) * plan.tasks),
               unit_bytes = aligned(sizeof(Unit) * plan.units);
  const size_t partial_bytes = aligned(sizeof(float) * plan.partial_floats);
  if (!workspace || !workspace->reserve(task_bytes + unit_bytes + partial_bytes + scratch * count)) {
    if (workspace) workspace->give_back();
    return -1;
  }
  plan.task = reinterpret_cast<Task*>(workspace->memory);
  plan.unit = reinterpret_cast<Unit*>(workspace->memory + task_bytes);
  plan.partial = reinterpret_cast<float*>(workspace->memory + task_bytes + unit_bytes);
  plan.cut();
  AttentionRun run{call,       &kernels->of[dtype],
                   plan.task,  plan.unit,
                   plan.tasks, workspace->memory + task_bytes + unit_bytes + partial_bytes,
                   scratch,    0,
                   0};
  run_on_threads(count, run_tasks, &run);
  workspace->give_back();
  return 0;
}

// ---- the rest
// ----------------------------------------------------------------------------------------------------

EXPORT void pageturner_write_kv(const WriteCall* call, int) {
  parallel_for(
      call->tokens, 2 * call->tokens * call->pool.kv_heads * call->row_bytes,
      [](void* pointer, int64_t begin, int64_t end) {
        const WriteCall& write = *static_cast<const WriteCall*>(pointer);
        const Pool& pool = write.pool;
        for (int64_t token = begin; token < end; ++token) {
          char* slot = static_cast<char*>(pool.data) +
                       write.slots[token] / pool.block_size * pool.block_stride +
                       write.slots[token] % pool.block_size * pool.token_stride;
          const char* key = static_cast<const char*>(write.key) + token * write.key_token_stride;
          const char* value = static_cast<const char*>(write.value) + token * write.value_token_stride;
          for (int64_t head = 0; head < pool.kv_heads; ++head, slot += pool.head_stride) {
            __builtin_memcpy(slot, key + head * write.key_head_stride, write.row_bytes);
            __builtin_memcpy(slot + pool.half_stride, value + head * write.value_head_stride,
                             write.row_bytes);
          }
        }
      },
      const_cast<WriteCall*>(call));
}

namespace {

template <class Call>
struct Bound {
  const Call& call;
  void (*run)(const Call&, int64_t, int64_t);
};

template <class Call>
void over_tokens(const Call& call, void (*run)(const Call&, int64_t, int64_t), int64_t bytes_per_token) {
  Bound<Call> bound{call, run};
  parallel_for(
      call.tokens, call.tokens * bytes_per_token,
      [](void* pointer, int64_t begin, int64_t end) {
        const Bound<Call>& it = *static_cast<const Bound<Call>*>(pointer);
        it.run(it.call, begin, end);
      },
      &bound);
}

}  // namespace

EXPORT void pageturner_rms_norm(const NormCall* call, int dtype) {
  over_tokens(*call, all_kernels[chosen].of[dtype].norm, 8 * call->width);
}

EXPORT void pageturner_rope_write_kv(const RopeCall* call, int dtype) {
  over_tokens(*call, kernels_for(call->head_dim)->of[dtype].rope,
              8 * (call->q_heads + 2 * call->pool.kv_heads) * call->head_dim);
}

EXPORT void pageturner_silu_mul(const SiluCall* call, int dtype) {
  over_tokens(*call, all_kernels[chosen].of[dtype].silu, 16 * call->inner);
}
