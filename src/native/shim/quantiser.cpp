// Vectors in few bits, each with a minimum and a scale of its own, on the CPU: src/store/vectors.rs has the rule, in libtorch's operations.
// Here it is one pass each way, whose operations round as libtorch's do, one by one, so that the bits are the same: this file is compiled
// without fused products.
#include "guarded.h"
#include "kinds.h"
#include "tasks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvtune {
namespace {

// A 16-bit float: its bits, and what rounding to it can cost, relative and near zero, with a hundredth more for the arithmetic's own.
// Everything is compiled into the loops: what is called from within vectors of a wider kind waits for their upper halves.
struct NarrowF16 {
  static constexpr double RELATIVE = 1.0 / 2048.0 * 1.01, ABSOLUTE = 1.0 / (1 << 25) * 1.01;

  // To the nearest, of two equally near ones to the even one: the sum with a power of 2 that leaves so many places rounds.
  INLINE uint16_t bits(float x) {
    uint32_t whole = as<uint32_t>(x), twice = whole + whole, exponent = std::max<uint32_t>(twice & 0xff000000u, 0x71000000u);
    // What f16 does not hold becomes infinite on its way up.
    float size = std::abs(x) * 0x1.0p+112f * 0x1.0p-110f;
    uint32_t rounded = as<uint32_t>(as<float>((exponent >> 1) + 0x07800000u) + size);
    uint32_t number = (rounded >> 13 & 0x7c00u) + (rounded & 0x0fffu);
    return static_cast<uint16_t>(whole >> 16 & 0x8000u | (twice > 0xff000000u ? 0x7e00u : number));
  }

  INLINE float value(uint16_t bits) { return value_of_f16(bits); }
};
struct NarrowBf16 {
  static constexpr double RELATIVE = 1.0 / 256.0 * 1.01, ABSOLUTE = 1e-37 * 1.01;
  INLINE uint16_t bits(float x) { return Rounded<Half>::of(x); }
  INLINE float value(uint16_t bits) { return wide(Half(bits)); }
};

constexpr double F16_LIMIT = 60000;
// Of a scale: it and the minimum are bf16.
constexpr uint16_t SIGN = 0x8000;

// Minimum and scale as they are stored, and their values.
template <class T> struct Range {
  uint16_t low_bits, scale_bits;
  T low, scale;
};

template <class N, class T> INLINE Range<T> covered(T minimum, T maximum, T steps) {
  Range<T> range;
  range.low_bits = N::bits(static_cast<float>(minimum - std::abs(minimum) * static_cast<T>(N::RELATIVE) - static_cast<T>(N::ABSOLUTE)));
  range.low = N::value(range.low_bits);
  T scale = (maximum - range.low) / steps;
  range.scale_bits = N::bits(static_cast<float>(scale * static_cast<T>(1.0 + N::RELATIVE) + static_cast<T>(N::ABSOLUTE)));
  range.scale = N::value(range.scale_bits);
  return range;
}

template <class T> INLINE Range<T> covering(T minimum, T maximum, T steps) {
  bool is_large = std::abs(minimum) > static_cast<T>(F16_LIMIT) || maximum - minimum > static_cast<T>(F16_LIMIT * steps);
  if (!is_large) return covered<NarrowF16>(minimum, maximum, steps);
  Range<T> range = covered<NarrowBf16>(minimum, maximum, steps);
  range.scale_bits |= SIGN;
  return range;
}

template <class T> INLINE Range<T> read(const uint16_t* bits) {
  bool is_large = (bits[1] & SIGN) != 0;
  uint16_t low = bits[0], scale = bits[1] & (SIGN - 1);
  if (is_large) return {low, scale, NarrowBf16::value(low), NarrowBf16::value(scale)};
  return {low, scale, NarrowF16::value(low), NarrowF16::value(scale)};
}

// How the levels of a vector lie in bytes.
struct Form {
  int64_t bits, width;

  // A level with an odd number of bits has its last one apart.
  __attribute__((always_inline)) bool has_last() const { return bits % 2 == 1; }
  __attribute__((always_inline)) int64_t upper_bytes() const { return bits >= 8 ? width : (width + 1) / 2; }
  __attribute__((always_inline)) int64_t bytes() const { return upper_bytes() + (has_last() ? (width + 7) / 8 : 0); }
};

// So many values in a byte: those of the first part of a vector in the upper bits, and so on.
INLINE void spread(const uint16_t* values, int64_t width, int64_t parts, uint8_t* bytes) {
  int64_t part = (width + parts - 1) / parts, shift = 8 / parts;
  for (int64_t i = 0; i < part; ++i) bytes[i] = static_cast<uint8_t>(values[i]);
  for (int64_t first = part; first < part * parts; first += part) {
    int64_t here = std::clamp<int64_t>(width - first, 0, part);
    for (int64_t i = 0; i < here; ++i) bytes[i] = static_cast<uint8_t>(bytes[i] << shift | values[first + i]);
    for (int64_t i = here; i < part; ++i) bytes[i] = static_cast<uint8_t>(bytes[i] << shift);
  }
}

INLINE void gathered(const uint8_t* bytes, int64_t width, int64_t parts, uint16_t* values) {
  int64_t part = (width + parts - 1) / parts, bits = 8 / parts;
  for (int64_t first = 0, down = 8 - bits; first < width; first += part, down -= bits) {
    int64_t here = std::min(width - first, part);
    for (int64_t i = 0; i < here; ++i) values[first + i] = (bytes[i] >> down) & ((1 << bits) - 1);
  }
}

// `level` is room for the levels of a vector and their last bits.
INLINE void pack(uint16_t* level, Form form, uint8_t* bytes) {
  uint16_t* last = level + form.width;
  if (form.has_last()) {
    for (int64_t i = 0; i < form.width; ++i) {
      last[i] = level[i] & 1;
      level[i] >>= 1;
    }
    spread(last, form.width, 8, bytes + form.upper_bytes());
  }
  if (form.bits < 8) return spread(level, form.width, 2, bytes);
  for (int64_t i = 0; i < form.width; ++i) bytes[i] = static_cast<uint8_t>(level[i]);
}

INLINE void unpack(const uint8_t* bytes, Form form, uint16_t* level) {
  uint16_t* last = level + form.width;
  if (form.bits < 8) {
    gathered(bytes, form.width, 2, level);
  } else {
    for (int64_t i = 0; i < form.width; ++i) level[i] = bytes[i];
  }
  if (form.has_last()) {
    gathered(bytes + form.upper_bytes(), form.width, 8, last);
    for (int64_t i = 0; i < form.width; ++i) level[i] = static_cast<uint16_t>(level[i] << 1 | last[i]);
  }
}

template <class S> INLINE void quantised(const S* x, Form form, int64_t count, uint8_t* bytes, uint16_t* range, uint16_t* level) {
  using T = Wide<S>;
  T steps = static_cast<T>((1 << form.bits) - 1);
  int64_t each = form.bytes();
  for (int64_t row = 0; row < count; ++row, x += form.width, bytes += each, range += 2) {
    T minimum = wide(x[0]), maximum = minimum;
    int none = 0;
#pragma omp simd reduction(min : minimum) reduction(max : maximum) reduction(| : none)
    for (int64_t i = 0; i < form.width; ++i) {
      T value = wide(x[i]);
      minimum = value < minimum ? value : minimum;
      maximum = value > maximum ? value : maximum;
      none |= value != value;
    }
    // What is no number must not be lost among numbers.
    if (none != 0) minimum = maximum = std::numeric_limits<T>::quiet_NaN();
    Range<T> of = covering(minimum, maximum, steps);
    range[0] = of.low_bits;
    range[1] = of.scale_bits;
    T low = of.low, scale = of.scale;
#pragma omp simd
    for (int64_t i = 0; i < form.width; ++i) {
      T value = (wide(x[i]) - low) / scale;
      value = value > T(0) ? value : T(0);
      value = value < steps ? value : steps;
      // Rounds to the nearest, of two equally near ones to the even one.
      level[i] = static_cast<uint16_t>(static_cast<int32_t>((value + Powers<T>::SHIFT) - Powers<T>::SHIFT));
    }
    pack(level, form, bytes);
  }
}

// `each` and `range_each` are from one vector to the next.
template <class S>
INLINE void restored(const uint8_t* bytes, int64_t each, const uint16_t* range, int64_t range_each, Form form, int64_t count, S* x,
                     uint16_t* level) {
  using T = Wide<S>;
  for (int64_t row = 0; row < count; ++row, x += form.width, bytes += each, range += range_each) {
    Range<T> of = read<T>(range);
    T low = of.low, scale = of.scale;
    if (form.bits == 8) {
#pragma omp simd
      for (int64_t i = 0; i < form.width; ++i) x[i] = Rounded<S>::of(static_cast<T>(static_cast<int32_t>(bytes[i])) * scale + low);
      continue;
    }
    unpack(bytes, form, level);
#pragma omp simd
    for (int64_t i = 0; i < form.width; ++i) x[i] = Rounded<S>::of(static_cast<T>(static_cast<int32_t>(level[i])) * scale + low);
  }
}

#define FOR_KIND(S)                                                                                                                 \
  VARIANTS void quantise_rows(const S* x, Form form, int64_t count, uint8_t* bytes, uint16_t* range, uint16_t* level) {             \
    quantised<S>(x, form, count, bytes, range, level);                                                                              \
  }                                                                                                                                 \
  VARIANTS void restore_rows(const uint8_t* bytes, int64_t each, const uint16_t* range, int64_t range_each, Form form, int64_t count, \
                             S* x, uint16_t* level) {                                                                               \
    restored<S>(bytes, each, range, range_each, form, count, x, level);                                                             \
  }
FOR_KIND(float)
FOR_KIND(double)
FOR_KIND(Half)
#undef FOR_KIND

// Calls `body(begin, end, room)` with ranges of so many vectors, and room for the levels of one and as many bits.
template <class F> void by_vectors(int64_t count, Form form, F body) {
  share_out_ranges(count, grain(form.width), [&](int64_t begin, int64_t end) {
    std::vector<uint16_t> room(2 * form.width);
    body(begin, end, room.data());
  });
}

// Where the rows of a tensor begin, the numbers of each of which stand together.
struct Rows {
  std::vector<int64_t> first{0};
  int64_t each = 1, stride = 0;

  explicit Rows(const at::Tensor& x) {
    for (int64_t dim = 0; dim + 2 < x.dim(); ++dim) {
      std::vector<int64_t> next;
      for (int64_t begin : first) {
        for (int64_t i = 0; i < x.size(dim); ++i) next.push_back(begin + i * x.stride(dim));
      }
      first = std::move(next);
    }
    if (x.dim() > 1) {
      each = x.size(-2);
      stride = x.stride(-2);
    }
  }

  int64_t at(int64_t row) const { return first[row / each] + row % each * stride; }
};

std::vector<int64_t> with_last(at::IntArrayRef size, int64_t last) {
  std::vector<int64_t> changed = size.vec();
  changed.back() = last;
  return changed;
}

void check_form(const at::Tensor& x, int64_t last, Form form) {
  bool is_known = form.bits == 4 || form.bits == 5 || form.bits == 8 || form.bits == 9;
  bool fits = is_known && form.width > 0 && x.is_cpu() && x.dim() > 0 && x.size(-1) == last;
  TORCH_CHECK(fits, "a tensor of size ", x.sizes(), " holds no vectors of ", form.width, " values in ", form.bits, " bits");
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

int kvtune_quantise(at::Tensor* x, int64_t bits, at::Tensor** results) {
  return giving(results, [&] {
    int64_t width = x->dim() > 0 ? x->size(-1) : 0;
    Form form{bits, width};
    check_form(*x, width, form);
    int64_t bytes = form.bytes();
    at::Tensor from = x->contiguous(), level = at::empty(with_last(x->sizes(), bytes), x->options().dtype(at::kByte));
    at::Tensor range = at::empty(with_last(x->sizes(), 2), x->options().dtype(at::kShort));
    uint8_t* levels = level.data_ptr<uint8_t>();
    uint16_t* ranges = reinterpret_cast<uint16_t*>(range.data_ptr<int16_t>());
    BY_KIND(from, by_vectors(from.numel() / width, form, [&](int64_t begin, int64_t end, uint16_t* room) {
      quantise_rows(data<S>(from) + begin * width, form, end - begin, levels + begin * bytes, ranges + 2 * begin, room);
    }));
    return Tensors{level, range};
  });
}

int kvtune_restore(at::Tensor* level, at::Tensor* range, at::Tensor* like, int64_t bits, int64_t width, at::Tensor** result) {
  return giving(result, [&] {
    Form form{bits, width};
    check_form(*level, form.bytes(), form);
    bool fits = range->is_cpu() && range->scalar_type() == at::kShort && level->scalar_type() == at::kByte && range->sizes() == at::IntArrayRef(with_last(level->sizes(), 2));
    TORCH_CHECK(fits, "ranges of size ", range->sizes(), " do not fit levels of size ", level->sizes());
    at::Tensor from = with_channels_together(*level), ranges = with_channels_together(*range);
    at::Tensor out = at::empty(with_last(level->sizes(), width), like->options());
    const uint8_t* first = from.data_ptr<uint8_t>();
    const uint16_t* first_range = reinterpret_cast<const uint16_t*>(ranges.data_ptr<int16_t>());
    int64_t count = out.numel() / width;
    if (count > 0) {
      Rows rows(from), of_range(ranges);
      BY_KIND(out, by_vectors(count, form, [&](int64_t begin, int64_t end, uint16_t* room) {
        for (int64_t at = begin; at < end;) {
          // As many as there are of one head.
          int64_t here = std::min(end - at, rows.each - at % rows.each);
          restore_rows(first + rows.at(at), rows.stride, first_range + of_range.at(at), of_range.stride, form, here,
                       data<S>(out) + at * width, room);
          at += here;
        }
      }));
    }
    return Tensors{out};
  });
}

}  // extern "C"
