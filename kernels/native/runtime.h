// The process around the kernels: the threads of the OpenMP runtime torch uses, and reusable memory.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Threads a parallel region started here would get; 1 without OpenMP.
int max_threads();

// Runs body(context) on `threads` threads at once and waits for all of them.
void run_on_threads(int threads, void (*body)(void*), void* context);

// How many threads `pieces` pieces of work are worth that take as long as reading `work` bytes.
int worthwhile_threads(int64_t pieces, int64_t work);

// Runs each(context, begin, end) over [0, count) in equal pieces, one a thread.
void parallel_for(int64_t count, int64_t work, void (*each)(void*, int64_t, int64_t), void* context);

// Memory that one call uses and the next finds again. Null when there is none.
struct Workspace {
  char* memory;
  size_t size;
  static Workspace* take();
  bool reserve(size_t bytes);
  void give_back();
};
