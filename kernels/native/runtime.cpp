#include "runtime.h"

#include <stdarg.h>
#include <stdlib.h>

// The OpenMP runtime is not linked: Python hands over the entry points of the one torch has loaded. So there
// is one thread pool, the library in the cache fits any torch, and compilers without OpenMP will do.
namespace {

typedef void (*Outlined)(int32_t* thread, int32_t* bound, void* context);
struct Location {  // ident_t of LLVM's runtime
  int32_t reserved_1, flags, reserved_2, reserved_3;
  const char* source;
};
Location location = {0, 2, 0, 0, ";pageturner;parallel;0;0;;"};

struct OpenMP {
  int (*max_threads)();
  int (*in_parallel)();
  void (*gomp_parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);  // GNU, and LLVM on Linux
  void (*kmpc_fork)(Location*, int32_t count, Outlined, ...);                       // LLVM
  int32_t (*kmpc_thread)(Location*);
  void (*kmpc_push_threads)(Location*, int32_t thread, int32_t threads);
} openmp;

struct Body {
  void (*run)(void*);
  void* context;
};

void run_outlined(int32_t*, int32_t*, void* body) {
  static_cast<Body*>(body)->run(static_cast<Body*>(body)->context);
}

Workspace* idle_workspace = nullptr;

}  // namespace

extern "C" __attribute__((visibility("default"))) void pageturner_use_openmp(void* const* entries) {
  __builtin_memcpy(&openmp, entries, sizeof(openmp));
}

int max_threads() {
  if (!openmp.max_threads || (openmp.in_parallel && openmp.in_parallel())) return 1;
  return openmp.max_threads();
}

void run_on_threads(int threads, void (*body)(void*), void* context) {
  if (threads <= 1) {
    body(context);
  } else if (openmp.gomp_parallel) {
    openmp.gomp_parallel(body, context, static_cast<unsigned>(threads), 0);
  } else {
    Body outlined = {body, context};
    openmp.kmpc_push_threads(&location, openmp.kmpc_thread(&location), threads);
    openmp.kmpc_fork(&location, 1, run_outlined, &outlined);
  }
}

namespace {

struct Loop {
  int64_t count, step, next;
  void (*each)(void*, int64_t, int64_t);
  void* context;
};

void run_loop(void* loop_pointer) {
  Loop* loop = static_cast<Loop*>(loop_pointer);
  for (;;) {
    const int64_t begin = __atomic_fetch_add(&loop->next, loop->step, __ATOMIC_RELAXED);
    if (begin >= loop->count) return;
    const int64_t end = begin + loop->step;
    loop->each(loop->context, begin, end < loop->count ? end : loop->count);
  }
}

}  // namespace

int worthwhile_threads(int64_t pieces, int64_t work) {
  constexpr int64_t kWorthAThread =
      128 << 10;  // bytes: some microseconds, several times what waking a thread costs
  int64_t threads = max_threads();
  if (threads > work / kWorthAThread) threads = work / kWorthAThread;
  if (threads > pieces) threads = pieces;
  return threads > 1 ? static_cast<int>(threads) : 1;
}

void parallel_for(int64_t count, int64_t work, void (*each)(void*, int64_t, int64_t), void* context) {
  const int threads = worthwhile_threads(count, work);
  if (threads <= 1) {
    each(context, 0, count);
    return;
  }
  Loop loop = {count, (count + threads - 1) / threads, 0, each, context};
  run_on_threads(threads, run_loop, &loop);
}

// One engine thread finds its own workspace again; calls that overlap get one of their own.
Workspace* Workspace::take() {
  Workspace* mine = __atomic_exchange_n(&idle_workspace, nullptr, __ATOMIC_ACQUIRE);
  return mine ? mine : static_cast<Workspace*>(calloc(1, sizeof(Workspace)));
}

bool Workspace::reserve(size_t bytes) {
  if (bytes <= size) return true;
  free(memory);
  bytes += bytes / 2;
  void* fresh = nullptr;
  size = posix_memalign(&fresh, 64, bytes) == 0 ? bytes : 0;
  memory = size ? static_cast<char*>(fresh) : nullptr;
  return memory != nullptr;
}

void Workspace::give_back() {
  Workspace* other = __atomic_exchange_n(&idle_workspace, this, __ATOMIC_RELEASE);
  if (other) {
    free(other->memory);
    free(other);
  }
}
