// Frozen weights as codes of 1, 2, 3, 4 or 8 bits that stand for values of a table: (value - zero) * scale * factor, of which each operation
// rounds once to f32; this file is compiled without fused products.
#include "guarded.h"
#include "unpacked.h"

#include <vector>

namespace kvtune {
namespace {

// As `CodesLayout` in Rust.
struct Layout {
  int64_t width, block_rows, block_columns, first_row, zero_bits;
  float factor;
  bool is_high_nibble_first;
};

// What the codes of a byte stand for, for each byte; of 3 bits, which lie across bytes, the table alone.
template <int BITS> std::vector<float> values_of_bytes(const float* table, bool is_high_nibble_first) {
  if constexpr (BITS == 3) return std::vector<float>(table, table + 8);
  constexpr int EACH = 8 / BITS;
  std::vector<float> values(256 * EACH);
  for (int byte = 0; byte < 256; ++byte) {
    for (int at = 0; at < EACH; ++at) {
      int place = is_high_nibble_first ? EACH - 1 - at : at;
      values[byte * EACH + at] = table[byte >> BITS * place & ((1 << BITS) - 1)];
    }
  }
  return values;
}

struct Row {
  const uint8_t* codes;
  const float* scales;
  // Null where there are none; and the group of each column, where groups are not one after the other.
  const uint8_t* zeros;
  const int64_t* columns;
};

INLINE float zero_of(const Row& row, const Layout& layout, int64_t group) {
  if (!row.zeros) return 0.0f;
  return static_cast<float>(layout.zero_bits == 4 ? row.zeros[group / 2] >> 4 * (group % 2) & 15 : row.zeros[group]);
}

// Bytes of so many codes: those of 3 bits lie in eights.
template <int BITS> INLINE int64_t bytes_of(int64_t count) { return BITS == 3 ? (count + 7) / 8 * 3 : (count * BITS + 7) / 8; }

// The numbers of a row from `first` on, which is a multiple of 8.
template <int BITS> INLINE void unpack_part(const Row& row, const Layout& layout, const float* values, int64_t first, int64_t count, float* to) {
  const uint8_t* codes = row.codes + bytes_of<BITS>(first);
  if constexpr (BITS == 3) {
    for (int64_t at = 0; at < count; at += 8, codes += 3) {
      uint32_t eight = codes[0] | codes[1] << 8 | codes[2] << 16;
      for (int i = 0; i < 8; ++i) to[at + i] = values[eight >> 3 * i & 7];
    }
  } else {
    constexpr int EACH = 8 / BITS;
    for (int64_t at = 0; at < bytes_of<BITS>(count); ++at) {
      std::memcpy(to + at * EACH, values + codes[at] * EACH, EACH * sizeof *to);
    }
  }
  float factor = layout.factor;
  if (row.columns) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t group = row.columns[first + i];
      to[i] = (to[i] - zero_of(row, layout, group)) * row.scales[group] * factor;
    }
    return;
  }
  for (int64_t begin = 0; begin < count;) {
    int64_t group = (first + begin) / layout.block_columns, end = std::min((group + 1) * layout.block_columns - first, count);
    float scale = row.scales[group], zero = zero_of(row, layout, group);
    for (int64_t i = begin; i < end; ++i) to[i] = (to[i] - zero) * scale * factor;
    begin = end;
  }
}

// Values of the table and bits of a code, for every width that there is.
#define EACH_WIDTH(CODES) CODES(2, 1) CODES(4, 2) CODES(8, 3) CODES(16, 4) CODES(256, 8)

#define PART(VALUES, BITS)                                                                                                                  \
  VARIANTS void unpack_part_##BITS(const Row& row, const Layout& layout, const float* values, int64_t first, int64_t count, float* to) {      \
    unpack_part<BITS>(row, layout, values, first, count, to);                                                                                \
  }
EACH_WIDTH(PART)
#undef PART

// The tensors of a packed matrix, checked against each other.
struct Codes {
  at::Tensor codes, scales, zeros, columns;
  Layout layout;
  std::vector<float> values;
  void (*part)(const Row&, const Layout&, const float*, int64_t, int64_t, float*);

  Codes(at::Tensor* const* parts, const Layout* layout) : layout(*layout) {
    codes = parts[0]->contiguous();
    at::Tensor table = parts[1]->contiguous();
    scales = parts[2]->contiguous();
    if (parts[3]->defined()) zeros = parts[3]->contiguous();
    if (parts[4]->defined()) columns = parts[4]->contiguous();
    const float* of = table.data_ptr<float>();
    bool is_high_nibble_first = layout->is_high_nibble_first;
    int64_t width = layout->width, rows = codes.size(0), least_bytes = 0;
#define CASE(VALUES, BITS)                                                                                            \
  case VALUES:                                                                                                        \
    least_bytes = bytes_of<BITS>(width), values = values_of_bytes<BITS>(of, is_high_nibble_first), part = unpack_part_##BITS; \
    break;
    switch (table.numel()) { EACH_WIDTH(CASE) }
#undef CASE
    bool is_layout = width > 0 && layout->block_rows > 0 && layout->block_columns > 0 && layout->first_row >= 0 && (layout->zero_bits == 4 || layout->zero_bits == 8) && codes.is_cpu() && scales.is_cpu();
    int64_t last_group = columns.defined() ? scales.size(1) - 1 : is_layout ? (width - 1) / layout->block_columns : 0;
    bool fits = is_layout && least_bytes > 0 && codes.dim() == 2 && codes.size(1) >= least_bytes && scales.dim() == 2 && last_group < scales.size(1) &&
                (rows == 0 || (layout->first_row + rows - 1) / layout->block_rows < scales.size(0)) &&
                (!zeros.defined() || (zeros.size(0) == scales.size(0) && zeros.size(1) * (8 / layout->zero_bits) >= scales.size(1))) && (!columns.defined() || columns.numel() == width);
    TORCH_CHECK(fits, "codes of size ", codes.sizes(), " and scales of size ", scales.sizes(), " make no rows of ", width);
  }

  int64_t rows() const { return codes.size(0); }

  Row row(int64_t row) const {
    int64_t block = (layout.first_row + row) / layout.block_rows;
    return {codes.data_ptr<uint8_t>() + row * codes.size(1), scales.data_ptr<float>() + block * scales.size(1),
            zeros.defined() ? zeros.data_ptr<uint8_t>() + block * zeros.size(1) : nullptr, columns.defined() ? columns.data_ptr<int64_t>() : nullptr};
  }

  // Runs `take(first, count, numbers)` for parts of a row.
  template <class F> void by_parts(int64_t at, F take) const {
    Row of = row(at);
    float numbers[NUMBERS_AT_ONCE];
    for (int64_t first = 0; first < layout.width; first += NUMBERS_AT_ONCE) {
      int64_t count = std::min(NUMBERS_AT_ONCE, layout.width - first);
      part(of, layout, values.data(), first, count, numbers);
      take(first, count, numbers);
    }
  }
};

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

// parts: codes, table, scales, zeros and columns, of which the last two may be undefined. The result is of the kind of `like`.
int kvtune_unpack_codes(at::Tensor* const* parts, const Layout* layout, at::Tensor* like, at::Tensor** result) {
  return giving(result, [&] {
    Codes codes(parts, layout);
    int64_t width = layout->width;
    at::Tensor out = at::empty({codes.rows(), width}, like->options());
    BY_KIND(out, share_out_ranges(codes.rows(), grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        codes.by_parts(row, [&](int64_t first, int64_t count, const float* numbers) {
          convert(numbers, count, data<S>(out) + row * width + first);
        });
      }
    }));
    return Tensors{out};
  });
}

int kvtune_codes_product(at::Tensor* x, at::Tensor* const* parts, const Layout* layout, at::Tensor** result) {
  return giving(result, [&] {
    Codes codes(parts, layout);
    return Tensors{product_of_rows(*x, codes.rows(), layout->width, [&](int64_t row, float* whole) {
      codes.by_parts(row, [&](int64_t first, int64_t count, const float* numbers) { convert(numbers, count, whole + first); });
    })};
  });
}

}  // extern "C"
