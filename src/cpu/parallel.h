// Threads of the CPU engine. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ffpa {

// Calls work(context, item, thread) for every item in [0, items), in any order, on at most `threads` threads numbered from 0; returns
// when all are done. OpenMP's pool does it; in a process forked since this library was loaded, where the pool may be gone, threads of
// this call alone. `work` must not throw.
void run_parallel(int threads, int64_t items, void* context, void (*work)(void* context, int64_t item, int thread));

// The same for a callable work(item, thread).
template <class Work>
void parallel_for(int threads, int64_t items, Work&& work) {
  run_parallel(threads, items, &work,
               [](void* context, int64_t item, int thread) { (*static_cast<Work*>(context))(item, thread); });
}

}  // namespace ffpa
