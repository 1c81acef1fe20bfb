// Products of rows with rows, and matrices turned so that what stood side by side stands one below the other.
#pragma once
#include <cstdint>

namespace kvtune {

// to[r] += x_r · y_r, of `rows` rows of `count` numbers; those of x and y are so many numbers apart, at 0 they are one and the same row.
void add_dots(float* to, const float* x, int64_t apart, const float* y, int64_t y_apart, int64_t rows, int64_t count);
void add_dots(double* to, const double* x, int64_t apart, const double* y, int64_t y_apart, int64_t rows, int64_t count);

// (rows, width), of rows `stride` apart, to (width, rows), of rows `apart` apart.
void transposed(float* to, int64_t apart, const float* from, int64_t stride, int64_t rows, int64_t width);
void transposed(double* to, int64_t apart, const double* from, int64_t stride, int64_t rows, int64_t width);

}  // namespace kvtune
