// Work shared out among the threads that libtorch computes with.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>

namespace kvtune {

// How many of them `count` tasks are worth, if `grain` tasks are worth waking one: one, within work that is shared out already.
int64_t threads_for(int64_t count, int64_t grain);

// Runs `body(task, thread)` for each of `count` tasks on so many threads, which are numbered from 0; who is done takes the next task.
// An exception ends it, and is thrown again here. Returns how many threads there were.
int64_t share_out(int64_t count, int64_t threads, const std::function<void(int64_t, int64_t)>& body);

// How many things of so many numbers each are worth waking a thread.
inline int64_t grain(int64_t numbers_each) { return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, numbers_each)); }

// Runs `body(begin, end)` for ranges that together are [0, count), each of at least `grain` where there are several.
template <class F> void share_out_ranges(int64_t count, int64_t grain, F body) {
  int64_t threads = threads_for(count, grain);
  if (threads == 1) return body(int64_t(0), count);
  share_out(threads, threads, [&](int64_t task, int64_t) { body(count * task / threads, count * (task + 1) / threads); });
}

}  // namespace kvtune
