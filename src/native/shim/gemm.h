// Products of small dense matrices that lie row by row, on one thread, with nothing allocated.
#pragma once
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/from_blob.h>

namespace kvtune {

struct Matrix {
  int64_t rows, columns, inner;
};

// c (rows, columns) = a (rows, inner) · b (inner, columns), or the same added to c; rows are `apart` numbers apart.
struct Apart {
  int64_t a, b, c;
};

inline void multiply(Matrix size, Apart apart, const float* a, const float* b, float* c, bool adds) {
  at::native::cpublas::brgemm(size.rows, size.columns, size.inner, apart.a, apart.b, apart.c, adds, a, b, c);
}

inline void multiply(Matrix size, Apart apart, const double* a, const double* b, double* c, bool adds) {
  auto matrix = [](const double* x, int64_t rows, int64_t columns, int64_t apart) {
    return at::from_blob(const_cast<double*>(x), {rows, columns}, {apart, 1}, at::kDouble);
  };
  at::Tensor out = matrix(c, size.rows, size.columns, apart.c);
  out.addmm_(matrix(a, size.rows, size.inner, apart.a), matrix(b, size.inner, size.columns, apart.b), adds ? 1 : 0);
}

}  // namespace kvtune
