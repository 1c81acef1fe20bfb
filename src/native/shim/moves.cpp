// Rows of a cache that change their places: one pass on the CPU, and libtorch's operations elsewhere; and the plan of such moves.
//
// Rows lie in the first dimensions of a tensor, of which the last ones are a row's numbers; whatever their kind, they are copied as bytes.
#include "guarded.h"
#include "tasks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace kvtune {
namespace {

// (B, G, C, ...) as (B · G · C, ...), without a copy.
at::Tensor in_rows(const at::Tensor& x) {
  TORCH_CHECK(x.dim() >= 3, "rows of a cache lie in three dimensions, not in ", x.dim());
  std::vector<int64_t> size = x.sizes().slice(2).vec();
  size[0] *= x.size(0) * x.size(1);
  return x.view(size);
}

// Rows of a contiguous tensor in the memory of the CPU, and two lists of them of which each is there.
struct Rows {
  char* memory;
  size_t bytes;
  const int64_t *to, *from;
  int64_t count;

  Rows(const at::Tensor& rows, const at::Tensor& to, const at::Tensor& from)
      : memory(static_cast<char*>(rows.data_ptr())), bytes(rows.size(0) == 0 ? 0 : rows.nbytes() / rows.size(0)), count(to.numel()) {
    auto list = [&](const at::Tensor& index) {
      bool fits = index.is_cpu() && index.scalar_type() == at::kLong && index.is_contiguous() && index.numel() == count;
      TORCH_CHECK(fits, "a list of ", index.numel(), " rows does not fit one of ", count);
      const int64_t* first = index.data_ptr<int64_t>();
      bool are_there = std::all_of(first, first + count, [&](int64_t row) { return 0 <= row && row < rows.size(0); });
      TORCH_CHECK_INDEX(are_there, "index out of range: there are ", rows.size(0), " rows");
      return first;
    };
    this->to = list(to);
    this->from = list(from);
  }

  char* at(int64_t row) const { return memory + row * bytes; }

  // Calls `some(first, count)` for stretches of the lists in which rows lie side by side, on several threads where that is worth it: no row
  // is written that another reads. Within a stretch of lists that were tampered with it may be: hence memmove.
  template <class F> void each_stretch(F some) const {
    constexpr int64_t kGrain = 1 << 18;  // bytes
    share_out_ranges(count, kGrain / std::max<int64_t>(bytes, 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin, next; i < end; i = next) {
        for (next = i + 1; next < end && to[next] == to[i] + next - i && from[next] == from[i] + next - i;) ++next;
        some(i, next - i);
      }
    });
  }
};

bool is_served(const at::Tensor& x) { return x.is_cpu() && x.is_contiguous(); }

// A row that is its own destination stays; no other one is in both lists.
at::Tensor move_rows(const at::Tensor& x, const at::Tensor& to, const at::Tensor& from) {
  at::Tensor rows = in_rows(x);
  if (!is_served(x)) {
    at::Tensor saved = rows.index_select(0, to);
    rows.index_copy_(0, to, rows.index_select(0, from));
    return saved;
  }
  Rows moved(rows, to, from);
  std::vector<int64_t> size = rows.sizes().vec();
  size[0] = moved.count;
  at::Tensor saved = at::empty(size, x.options());
  char* first = static_cast<char*>(saved.data_ptr());
  moved.each_stretch([&](int64_t i, int64_t count) {
    std::memcpy(first + i * moved.bytes, moved.at(moved.to[i]), count * moved.bytes);
    if (moved.to[i] != moved.from[i]) std::memmove(moved.at(moved.to[i]), moved.at(moved.from[i]), count * moved.bytes);
  });
  return saved;
}

void move_rows_back(const at::Tensor& x, const at::Tensor& to, const at::Tensor& from, const at::Tensor* saved) {
  at::Tensor rows = in_rows(x);
  if (!is_served(x) || (saved != nullptr && !is_served(*saved))) {
    at::Tensor moved = rows.index_select(0, to);
    rows.index_copy_(0, from, moved);
    rows.index_copy_(0, to, saved != nullptr ? *saved : at::zeros_like(moved));
    return;
  }
  Rows moved(rows, to, from);
  bool fits = saved == nullptr || (saved->nbytes() == moved.count * moved.bytes && saved->scalar_type() == x.scalar_type());
  TORCH_CHECK(fits, "what was saved does not fit ", moved.count, " rows");
  const char* first = saved != nullptr ? static_cast<const char*>(saved->data_ptr()) : nullptr;
  moved.each_stretch([&](int64_t i, int64_t count) {
    char* to_row = moved.at(moved.to[i]);
    if (moved.to[i] != moved.from[i]) std::memmove(moved.at(moved.from[i]), to_row, count * moved.bytes);
    if (first != nullptr) {
      std::memcpy(to_row, first + i * moved.bytes, count * moved.bytes);
    } else {
      std::memset(to_row, 0, count * moved.bytes);
    }
  });
}

// Entries of a chunk (B, G, n, ...) come to stand in `x` from a slot on, in the first sequences.
void write_chunk(const at::Tensor& x, const at::Tensor& chunk, int64_t slot) {
  at::Tensor room = x.narrow(0, 0, chunk.size(0)).narrow(2, slot, chunk.size(2));
  bool stand_together = chunk.dim() < 4 || chunk.stride(3) == 1;
  if (!is_served(x) || !chunk.is_cpu() || chunk.scalar_type() != x.scalar_type() || chunk.dim() > 4 || !stand_together ||
      room.sizes() != chunk.sizes()) {
    room.copy_(chunk);
    return;
  }
  size_t bytes = x.element_size() * (chunk.dim() < 4 ? 1 : chunk.size(3)), element = x.element_size();
  const char* from = static_cast<const char*>(chunk.data_ptr());
  char* to = static_cast<char*>(room.data_ptr());
  int64_t groups = chunk.size(1), tokens = chunk.size(2), each = chunk.stride(2) * element;
  bool is_whole = each == static_cast<int64_t>(bytes);
  for (int64_t head = 0; head < chunk.size(0) * groups; ++head) {
    const char* own = from + (head / groups * chunk.stride(0) + head % groups * chunk.stride(1)) * element;
    char* there = to + head * x.stride(1) * element;
    if (is_whole) {
      std::memcpy(there, own, tokens * bytes);
      continue;
    }
    for (int64_t i = 0; i < tokens; ++i) std::memcpy(there + i * bytes, own + i * each, bytes);
  }
}

// For each head of (B, G), whose `victim` (1 or B, 1 or G, e) are slots: these in order, those from `region` on last; where in their row
// they stood; and the slots from `region` on, as many, in order, victims last. Slots count on from head to head, of which each has `slots`.
void plan_moves(const at::Tensor& victim, at::IntArrayRef heads, int64_t slots, int64_t region, at::Tensor** results) {
  bool fits = victim.is_cpu() && victim.scalar_type() == at::kLong && victim.dim() == 3 && (victim.size(2) <= 1 || victim.stride(2) == 1);
  for (int dim : {0, 1}) fits = fits && (victim.size(dim) == 1 || victim.size(dim) == heads[dim]);
  TORCH_CHECK(fits, "victims of size ", victim.sizes(), " are no lists of slots for ", heads, " heads");
  int64_t count = victim.size(2), rows = heads[0] * heads[1];
  at::Tensor planned[3];
  for (int i = 0; i < 3; ++i) planned[i] = at::empty({heads[0], heads[1], count}, victim.options());
  std::vector<char> leaves(count);
  std::vector<std::pair<int64_t, int64_t>> ranked(count);
  const int64_t* done = nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t b = victim.size(0) == 1 ? 0 : row / heads[1], g = victim.size(1) == 1 ? 0 : row % heads[1];
    const int64_t* own = victim.data_ptr<int64_t>() + b * victim.stride(0) + g * victim.stride(1);
    int64_t *to = planned[0].data_ptr<int64_t>() + row * count, *order = planned[1].data_ptr<int64_t>() + row * count,
            *from = planned[2].data_ptr<int64_t>() + row * count;
    if (own == done) {
      // The head before has the same.
      for (int64_t i = 0; i < count; ++i) {
        to[i] = to[i - count] + slots;
        order[i] = order[i - count];
        from[i] = from[i - count] + slots;
      }
      continue;
    }
    done = own;
    std::fill(leaves.begin(), leaves.end(), 0);
    for (int64_t i = 0; i < count; ++i) {
      // Whoever names slots that there are not is told so where rows are moved.
      if (own[i] >= region && own[i] - region < count) leaves[own[i] - region] = 1;
      ranked[i] = {own[i], i};
    }
    std::sort(ranked.begin(), ranked.end());
    for (int64_t i = 0; i < count; ++i) {
      to[i] = ranked[i].first + row * slots;
      order[i] = ranked[i].second;
    }
    for (char wanted : {0, 1}) {
      for (int64_t i = 0; i < count; ++i) {
        if (leaves[i] == wanted) *from++ = region + i + row * slots;
      }
    }
  }
  for (int i = 0; i < 3; ++i) results[i] = new at::Tensor(planned[i]);
}

}  // namespace
}  // namespace kvtune

extern "C" {

// The inverse of the moves of `kvtune_write_rows` in x (B, G, C, ...); zeros for what was saved, where that is null.
int kvtune_move_rows_back(at::Tensor* x, at::Tensor* to, at::Tensor* from, at::Tensor* saved) {
  return kvtune::guarded([&] { kvtune::move_rows_back(*x, *to, *from, saved); });
}

// What one write does to the planes of a cache: rows `from` of each take the places of rows `to`, if these are not null, and `saved`
// receives what stood there, new tensors; then each plane's chunk stands from slot `slot` on, if it has one.
int kvtune_write_rows(at::Tensor** planes, at::Tensor** chunks, size_t count, at::Tensor* to, at::Tensor* from, int64_t slot,
                      at::Tensor** saved) {
  return kvtune::guarded([&] {
    for (size_t i = 0; i < count; ++i) {
      if (to != nullptr) saved[i] = new at::Tensor(kvtune::move_rows(*planes[i], *to, *from));
      if (chunks[i] != nullptr) kvtune::write_chunk(*planes[i], *chunks[i], slot);
    }
  });
}

// `results` receives three new tensors: destinations (B · G · e), their order (B, G, e), and sources (B · G · e).
int kvtune_plan_moves(at::Tensor* victim, int64_t batch, int64_t groups, int64_t slots, int64_t region, at::Tensor** results) {
  return kvtune::guarded([&] { kvtune::plan_moves(*victim, {batch, groups}, slots, region, results); });
}

}  // extern "C"
