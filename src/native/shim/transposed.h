// Matrices turned so that what stood side by side stands one below the other.
#pragma once
#include <cstdint>

namespace kvtune {

// (rows, width), of rows `stride` apart, to (width, rows), of rows `apart` apart.
void transposed(float* to, int64_t apart, const float* from, int64_t stride, int64_t rows, int64_t width);
void transposed(double* to, int64_t apart, const double* from, int64_t stride, int64_t rows, int64_t width);

}  // namespace kvtune
