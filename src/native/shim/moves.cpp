// Rows of a cache that change their places: one pass on the CPU, and libtorch's operations elsewhere; and the plan of such moves.
//
// Rows lie in the first dimensions of a tensor, of which the last ones are a row's numbers; whatever their kind, they are copied as bytes.
#include "guarded.h"
#include "tasks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <numeric>
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

  // Calls `one` with each number of a row of the lists, on several threads where that is worth it: no row is written that another reads.
  template <class F> void each(F one) const {
    constexpr int64_t kGrain = 1 << 18;  // bytes
    share_out_ranges(count, kGrain / std::max<int64_t>(bytes, 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) one(i);
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
  moved.each([&](int64_t i) {
    std::memcpy(first + i * moved.bytes, moved.at(moved.to[i]), moved.bytes);
    if (moved.to[i] != moved.from[i]) std::memcpy(moved.at(moved.to[i]), moved.at(moved.from[i]), moved.bytes);
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
  moved.each([&](int64_t i) {
    char* to_row = moved.at(moved.to[i]);
    if (moved.to[i] != moved.from[i]) std::memcpy(moved.at(moved.from[i]), to_row, moved.bytes);
    if (first != nullptr) {
      std::memcpy(to_row, first + i * moved.bytes, moved.bytes);
    } else {
      std::memset(to_row, 0, moved.bytes);
    }
  });
}

// For each row of `victim`: its slots in order, those from `region` on last; where in the row they stood; and the slots from `region` on,
// as many, in order, victims last.
void plan_moves(const at::Tensor& victim, int64_t region, at::Tensor** results) {
  bool fits = victim.is_cpu() && victim.scalar_type() == at::kLong && victim.is_contiguous() && victim.dim() > 0;
  TORCH_CHECK(fits, "victims are a list of slots for each head");
  at::Tensor planned[3] = {at::empty(victim.sizes(), victim.options()), at::empty(victim.sizes(), victim.options()),
                           at::empty(victim.sizes(), victim.options())};
  int64_t count = victim.size(-1), rows = count == 0 ? 0 : victim.numel() / count;
  std::vector<char> leaves(count);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* slots = victim.data_ptr<int64_t>() + row * count;
    auto at_row = [&](int i) { return planned[i].data_ptr<int64_t>() + row * count; };
    int64_t *to = at_row(0), *order = at_row(1), *from = at_row(2);
    std::iota(order, order + count, int64_t(0));
    std::sort(order, order + count, [&](int64_t a, int64_t b) {
      return std::pair(slots[a] >= region, slots[a]) < std::pair(slots[b] >= region, slots[b]);
    });
    std::fill(leaves.begin(), leaves.end(), 0);
    for (int64_t i = 0; i < count; ++i) {
      to[i] = slots[order[i]];
      if (region <= to[i] && to[i] < region + count) leaves[to[i] - region] = 1;
    }
    for (char wanted : {0, 1}) {
      for (int64_t i = 0; i < count; ++i) {
        if (leaves[i] == wanted) *from++ = region + i;
      }
    }
  }
  for (int i = 0; i < 3; ++i) results[i] = new at::Tensor(planned[i]);
}

}  // namespace
}  // namespace kvtune

extern "C" {

// Rows `from` of x (B, G, C, ...) take the places of rows `to`; `saved` receives what stood there, a new tensor.
int kvtune_move_rows(at::Tensor* x, at::Tensor* to, at::Tensor* from, at::Tensor** saved) {
  return kvtune::guarded([&] { *saved = new at::Tensor(kvtune::move_rows(*x, *to, *from)); });
}

// The inverse; zeros for what was saved, where that is null.
int kvtune_move_rows_back(at::Tensor* x, at::Tensor* to, at::Tensor* from, at::Tensor* saved) {
  return kvtune::guarded([&] { kvtune::move_rows_back(*x, *to, *from, saved); });
}

// `results` receives three new tensors like `victim` (..., e): destinations, their order, and sources.
int kvtune_plan_moves(at::Tensor* victim, int64_t region, at::Tensor** results) {
  return kvtune::guarded([&] { kvtune::plan_moves(*victim, region, results); });
}

}  // extern "C"
