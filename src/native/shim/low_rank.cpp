// What a low-rank addition to a linear adds, on the CPU in one pass over the rows: its two thin products and its factor need a block of rows
// at a time, which stays in a core's cache. And the gradients of its two matrices, which are thin products across the rows. The rest has
// libtorch's operations.
#include "gemm.h"
#include "guarded.h"
#include "kinds.h"
#include "product.h"
#include "tasks.h"
#include "transposed.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

namespace kvtune {
namespace {

// Rows of a block, and numbers of a row of x that are taken at a time: with more of them at once the rows drive each other out of the cache.
constexpr int64_t kRows = 64, kDepth = 256;
// As many numbers of x and y are worth waking a thread.
constexpr int64_t kGrain = 1 << 16;

// A matrix row by row. Thin ones mostly lie column by column, and libtorch would take longer to turn them than to multiply with them.
template <class T> at::Tensor by_row(const at::Tensor& x) {
  int64_t rows = x.size(0), columns = x.size(1);
  if (x.is_contiguous() || x.stride(0) != 1 || x.stride(1) != rows) return x.contiguous();
  at::Tensor turned = at::empty({rows, columns}, x.options());
  transposed(data<T>(turned), columns, data<T>(x), rows, columns, rows);
  return turned;
}

template <class T> at::Tensor add_by_block(at::Tensor& y, const at::Tensor& x, const at::Tensor& first, const at::Tensor& second, double scale) {
  int64_t rows = x.size(0), in = x.size(1), rank = first.size(1), out = y.size(1);
  at::Tensor inner = at::empty({rows, rank}, x.options()), first_rows = by_row<T>(first), second_rows = by_row<T>(second);
  const T *from = data<T>(x), *down = data<T>(first_rows), *up = data<T>(second_rows);
  T *middle = data<T>(inner), *to = data<T>(y);
  int64_t blocks = at::ceil_div(rows, kRows), grain = at::ceil_div(kGrain, kRows * (in + out));
  share_out(blocks, threads_for(blocks, grain), [&](int64_t block, int64_t) {
    int64_t begin = block * kRows, count = std::min(kRows, rows - begin);
    T* own = middle + begin * rank;
    for (int64_t done = 0; done < in; done += kDepth) {
      multiply({count, rank, std::min(kDepth, in - done)}, {in, rank, rank}, from + begin * in + done, down + done * rank, own, done > 0);
    }
    for (int64_t i = 0; i < count * rank; ++i) own[i] *= static_cast<T>(scale);
    multiply({count, out, rank}, {rank, out, out}, own, up, to + begin * out, true);
  });
  return inner;
}

// y (m, o) += inner · second (r, o) with inner = scale · x (m, i) · first (i, r), which is the result.
at::Tensor add_low_rank(at::Tensor& y, const at::Tensor& x, const at::Tensor& first, const at::Tensor& second, double scale) {
  // For few rows, copies of the matrices would cost as much as the products.
  bool are_enough = x.dim() == 2 && x.size(0) >= kRows && x.numel() > 0 && y.numel() > 0 && first.numel() > 0;
  bool is_served = is_wide(x) && are_enough && x.is_cpu() && y.is_contiguous();
  if (!is_served) {
    at::Tensor inner = product(x, first.t()).mul_(scale);
    y.addmm_(inner, second);
    return inner;
  }
  auto fits = [&](const at::Tensor& of, int64_t rows, int64_t columns) {
    return of.sizes() == at::IntArrayRef({rows, columns}) && of.scalar_type() == x.scalar_type() && of.is_cpu();
  };
  bool fit = y.dim() == 2 && first.dim() == 2 && fits(y, x.size(0), y.size(1)) &&
             fits(first, x.size(1), first.size(1)) && fits(second, first.size(1), y.size(1));
  TORCH_CHECK(fit, "matrices of size ", first.sizes(), " and ", second.sizes(), " do not lead from ", x.sizes(), " to ", y.sizes());
  at::Tensor rows = x.contiguous();
  return x.scalar_type() == at::kFloat ? add_by_block<float>(y, rows, first, second, scale)
                                       : add_by_block<double>(y, rows, first, second, scale);
}

// Columns of a task of a gradient: they are summed up over all rows alone, whatever the number of threads.
constexpr int64_t kColumns = 128;

// c (thin, columns) += thin_t (thin, count) · wide (count, columns): for rows that are too few for a block, each number of which would have
// kernels of its own.
template <class T>
INLINE void add_rows(const T* thin_t, int64_t apart, const T* wide, int64_t width, T* c, int64_t c_apart, int64_t thin, int64_t count,
                     int64_t columns) {
  for (int64_t r = 0; r < thin; ++r, thin_t += apart, c += c_apart) {
    for (int64_t row = 0; row < count; ++row) {
      T factor = thin_t[row];
      const T* from = wide + row * width;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) c[i] += factor * from[i];
    }
  }
}

#define FOR_KIND(T)                                                                                                                      \
  VARIANTS void add_last_rows(const T* thin_t, int64_t apart, const T* wide, int64_t width, T* c, int64_t c_apart, int64_t thin,          \
                              int64_t count, int64_t columns) {                                                                          \
    add_rows<T>(thin_t, apart, wide, width, c, c_apart, thin, count, columns);                                                           \
  }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

template <class T> at::Tensor across_by_block(const at::Tensor& thin, const at::Tensor& wide, bool is_transposed) {
  int64_t rows = thin.size(0), rank = thin.size(1), width = wide.size(1), whole = rows / kRows * kRows;
  at::Tensor thin_t = at::empty({rank, rows}, thin.options()), sum = at::empty({rank, width}, thin.options());
  at::Tensor turned = is_transposed ? at::empty({width, rank}, thin.options()) : at::Tensor();
  const T *from = data<T>(thin), *x = data<T>(wide);
  T *short_t = data<T>(thin_t), *to = data<T>(sum), *out = is_transposed ? data<T>(turned) : nullptr;
  // Block by block: a library keeps kernels for each distance between rows, so that there are no more of them than shapes of matrices.
  for (int64_t row = 0; row < whole; row += kRows) transposed(short_t + row * rank, kRows, from + row * rank, rank, kRows, rank);
  transposed(short_t + whole * rank, rows - whole, from + whole * rank, rank, rows - whole, rank);
  int64_t tasks = at::ceil_div(width, kColumns), grain = at::ceil_div(kGrain, kColumns * rows);
  share_out(tasks, threads_for(tasks, grain), [&](int64_t task, int64_t) {
    int64_t column = task * kColumns, columns = std::min(kColumns, width - column);
    T* own = to + column;
    for (int64_t row = 0; row < whole; row += kRows) {
      multiply({rank, columns, kRows}, {kRows, width, width}, short_t + row * rank, x + row * width + column, own, row > 0);
    }
    if (whole == 0) {
      for (int64_t r = 0; r < rank; ++r) std::fill_n(own + r * width, columns, T(0));
    }
    add_last_rows(short_t + whole * rank, rows - whole, x + whole * width + column, width, own, width, rank, rows - whole, columns);
    if (is_transposed) transposed(out + column * rank, rank, own, width, rank, columns);
  });
  return is_transposed ? turned : sum;
}

// thin (m, r)ᵀ · wide (m, o) as a new tensor (r, o), or (o, r) if it is to be transposed.
at::Tensor across(const at::Tensor& thin, const at::Tensor& wide, bool is_transposed) {
  bool are_matrices = thin.dim() == 2 && wide.dim() == 2 && thin.size(0) == wide.size(0) && thin.scalar_type() == wide.scalar_type();
  TORCH_CHECK(are_matrices, "rows of size ", thin.sizes(), " do not fit rows of size ", wide.sizes());
  if (!is_wide(thin) || !thin.is_cpu() || !wide.is_cpu() || thin.numel() == 0 || wide.numel() == 0) {
    // The large factor is the one that may lie transposed.
    at::Tensor sum = product(thin.t().contiguous(), wide.t());
    return is_transposed ? sum.t().contiguous() : sum;
  }
  at::Tensor from = thin.contiguous(), x = wide.contiguous();
  return thin.scalar_type() == at::kFloat ? across_by_block<float>(from, x, is_transposed)
                                          : across_by_block<double>(from, x, is_transposed);
}

}  // namespace
}  // namespace kvtune

extern "C" {

// `result` receives a new tensor (r, o), or (o, r) if it is to be transposed.
int kvtune_across(at::Tensor* thin, at::Tensor* wide, int is_transposed, at::Tensor** result) {
  return kvtune::guarded([&] { *result = new at::Tensor(kvtune::across(*thin, *wide, is_transposed != 0)); });
}

// `result` receives a new tensor (m, r).
int kvtune_add_low_rank(at::Tensor* y, at::Tensor* x, at::Tensor* first, at::Tensor* second, double scale, at::Tensor** result) {
  return kvtune::guarded([&] { *result = new at::Tensor(kvtune::add_low_rank(*y, *x, *first, *second, scale)); });
}

}  // extern "C"
