// Products of rows with rows.
#pragma once
#include <cstdint>

namespace kvtune {

// to[r] += x_r · y_r, of `rows` rows of `count` numbers; those of x and y are so many numbers apart, at 0 they are one and the same row.
void add_dots(float* to, const float* x, int64_t apart, const float* y, int64_t y_apart, int64_t rows, int64_t count);
void add_dots(double* to, const double* x, int64_t apart, const double* y, int64_t y_apart, int64_t rows, int64_t count);

}  // namespace kvtune
