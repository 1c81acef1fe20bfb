// Attention's work, by row and head and in tasks that threads take, each with memory of its thread's own.
#pragma once
#include "shape.h"
#include "tasks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace kvtune {

// The memory of a task, handed out piece by piece.
template <class T> class Scratch {
 public:
  explicit Scratch(T* memory) : next_(memory) {}
  T* take(int64_t numbers) {
    T* taken = next_;
    next_ += numbers;
    return taken;
  }

 private:
  T* next_;
};

// One of the tasks that a head is divided into; `index` counts those of all heads.
struct Task {
  int64_t index, split, splits;
  Head head;
  // Which of `count` things are this task's: [begin, end).
  int64_t begin(int64_t count) const { return count * split / splits; }
  int64_t end(int64_t count) const { return count * (split + 1) / splits; }
};

// Calls `body(task, scratch)` for each of `splits` tasks of every head, with `numbers` of scratch.
template <class T, class F> void for_tasks(const Shape& s, int64_t splits, int64_t numbers, F body) {
  int64_t tasks = s.all() * splits, threads = threads_for(tasks, s.grain(splits));
  at::Tensor memory = at::empty({threads, numbers}, at::dtype<T>());
  share_out(tasks, threads, [&](int64_t index, int64_t thread) {
    body(Task{index, index % splits, splits, s.head(index / splits)}, Scratch<T>(data<T>(memory) + thread * numbers));
  });
}

// Zeros to which tasks add the attention mass, (B · G, splits, keys): `mass`, which is zeros, itself where a head is one task. Nothing where it
// is not defined.
inline at::Tensor sums_by_task(const Shape& s, int64_t splits, at::Tensor& mass) {
  if (!mass.defined()) return {};
  return splits == 1 ? mass.view({s.all(), 1, s.keys}) : at::zeros({s.all(), splits, s.keys}, mass.options());
}

inline void bring_together(const at::Tensor& by_task, at::Tensor& mass) {
  if (by_task.defined() && by_task.size(1) > 1) mass.copy_(by_task.sum(1).view(mass.sizes()));
}

}  // namespace kvtune
