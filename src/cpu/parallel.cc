// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/features.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ffpa {
#if defined(_OPENMP)
namespace {

// A fork copies only the calling thread, so OpenMP's pool is lost in every child of a process that used OpenMP, whoever used it: a
// child that waited for its threads would wait forever. Watched from load on, since the fork may come before our first use.
std::atomic<bool> forked{false};
const bool forks_watched = pthread_atfork(nullptr, nullptr, [] { forked = true; }) == 0;

}  // namespace
#endif

void run_parallel(int threads, int64_t items, void* context, void (*work)(void*, int64_t, int)) {
  threads =
      std::min(threads, features().processors);  // more would only wait for each other, and OpenMP's waiting spins
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
  if (forks_watched && !forked) {
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
