// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel.h"

#include <pthread.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ffpa {
namespace {

std::atomic<bool> pool_used{false}, pool_lost{false};

// Whether OpenMP's pool may be used. A fork copies only the calling thread: a child that waits for the others would wait forever.
bool pool_usable() {
#if defined(_OPENMP)
  static const bool watched = pthread_atfork(nullptr, nullptr, [] { pool_lost = pool_used.load(); }) == 0;
  return watched && !pool_lost;
#else
  return false;
#endif
}

}  // namespace

void run_parallel(int threads, int64_t items, void* context, void (*work)(void*, int64_t, int)) {
  if (threads > items) threads = static_cast<int>(items);
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) work(context, item, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto drain = [&](int thread) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(context, item, thread);
  };
#if defined(_OPENMP)
  if (pool_usable()) {
    pool_used = true;
#pragma omp parallel num_threads(threads)
    drain(omp_get_thread_num());
    return;
  }
#endif
  std::vector<std::thread> others;
  try {
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(drain, thread);
  } catch (const std::system_error&) {
    // No more threads to be had: those that started and this one do all of it.
  }
  drain(0);
  for (std::thread& other : others) other.join();
}

}  // namespace ffpa
