// Frozen weights in few bits, unpacked. The formulas are those of ggml (ggml-quants.c): each product and sum rounds once to f32, in the order
// written here, so that the numbers are ggml's to the bit; this file is compiled without fused products.
#include "guarded.h"
#include "unpacked.h"

#include <vector>

namespace kvtune {
namespace {

INLINE float half_at(const uint8_t* at) { return value_of_f16(static_cast<uint16_t>(at[0] | at[1] << 8)); }

constexpr float NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// E2M1, doubled.
constexpr float E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE uint32_t u32_at(const uint8_t* at) {
  uint32_t x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// Blocks of 32: the low halves of bytes are the first 16 numbers, the high ones the last 16. Levels of 4 bits, or of 5, whose uppermost lie
// apart; about zero, or above a minimum.
template <bool HAS_FIFTH, bool HAS_MINIMUM> struct InHalves {
  static constexpr int64_t HEAD = HAS_MINIMUM ? 4 : 2, LEVELS = HEAD + (HAS_FIFTH ? 4 : 0), NUMBERS = 32, BYTES = LEVELS + 16;
  INLINE void block(const uint8_t* from, float* to) {
    float d = half_at(from), m = HAS_MINIMUM ? half_at(from + 2) : 0.0f;
    uint32_t high = HAS_FIFTH ? u32_at(from + HEAD) : 0;
    for (int i = 0; i < 16; ++i) {
      int levels = from[LEVELS + i], low = (levels & 15) | static_cast<int>(high >> i & 1) << 4, up = levels >> 4 | static_cast<int>(high >> (i + 16) & 1) << 4;
      if constexpr (HAS_MINIMUM) {
        to[i] = d * static_cast<float>(low) + m;
        to[i + 16] = d * static_cast<float>(up) + m;
      } else {
        constexpr int ZERO = HAS_FIFTH ? 16 : 8;
        to[i] = d * static_cast<float>(low - ZERO);
        to[i + 16] = d * static_cast<float>(up - ZERO);
      }
    }
  }
};
using Q4_0 = InHalves<false, false>;
using Q4_1 = InHalves<false, true>;
using Q5_0 = InHalves<true, false>;
using Q5_1 = InHalves<true, true>;

struct Q8_0 {
  static constexpr int64_t NUMBERS = 32, BYTES = 34;
  INLINE void block(const uint8_t* from, float* to) {
    float d = half_at(from);
    for (int i = 0; i < 32; ++i) to[i] = d * static_cast<float>(static_cast<int8_t>(from[2 + i]));
  }
};

// Blocks of 256 in 16 parts, each with a scale and a minimum in 4 bits.
struct Q2_K {
  static constexpr int64_t NUMBERS = 256, BYTES = 84;
  INLINE void block(const uint8_t* from, float* to) {
    const uint8_t* q = from + 16;
    float d = half_at(from + 80), m = half_at(from + 82);
    for (int part = 0; part < 16; ++part) {
      int n = part / 8, j = part % 8 / 2, first = 16 * (part % 2);
      float scale = d * static_cast<float>(from[part] & 15), low = m * static_cast<float>(from[part] >> 4);
      for (int i = 0; i < 16; ++i) to[16 * part + i] = scale * static_cast<float>(q[32 * n + first + i] >> 2 * j & 3) - low;
    }
  }
};

struct Q3_K {
  static constexpr int64_t NUMBERS = 256, BYTES = 110;
  INLINE void block(const uint8_t* from, float* to) {
    const uint8_t *high = from, *q = from + 32, *sc = from + 96;
    float d = half_at(from + 108);
    for (int part = 0; part < 16; ++part) {
      int n = part / 8, j = part % 8 / 2, first = 16 * (part % 2);
      int low = part < 8 ? sc[part] & 15 : sc[part - 8] >> 4, up = sc[8 + part % 4] >> 2 * (part / 4) & 3;
      float scale = d * static_cast<float>((low | up << 4) - 32);
      for (int i = 0; i < 16; ++i) {
        int minus = high[first + i] >> (4 * n + j) & 1 ? 0 : 4;
        to[16 * part + i] = scale * static_cast<float>((q[32 * n + first + i] >> 2 * j & 3) - minus);
      }
    }
  }
};

// Scale and minimum, in 6 bits each, of eight parts of 32.
INLINE void scales_of(const uint8_t* sc, int part, int& scale, int& low) {
  if (part < 4) {
    scale = sc[part] & 63;
    low = sc[part + 4] & 63;
  } else {
    scale = (sc[part + 4] & 15) | sc[part - 4] >> 6 << 4;
    low = sc[part + 4] >> 4 | sc[part] >> 6 << 4;
  }
}

// Levels of 4 bits, or of 5, whose uppermost lie apart.
template <bool HAS_FIFTH> struct InEightParts {
  static constexpr int64_t NUMBERS = 256, BYTES = HAS_FIFTH ? 176 : 144;
  INLINE void block(const uint8_t* from, float* to) {
    const uint8_t *high = from + 16, *levels = from + (HAS_FIFTH ? 48 : 16);
    float d = half_at(from), m = half_at(from + 2);
    for (int part = 0; part < 8; ++part) {
      int s, l, shift = part % 2 * 4;
      scales_of(from + 4, part, s, l);
      float scale = d * static_cast<float>(s), low = m * static_cast<float>(l);
      const uint8_t* q = levels + 32 * (part / 2);
      for (int i = 0; i < 32; ++i) {
        int fifth = HAS_FIFTH ? (high[i] >> part & 1) * 16 : 0;
        to[32 * part + i] = scale * static_cast<float>((q[i] >> shift & 15) + fifth) - low;
      }
    }
  }
};
using Q4_K = InEightParts<false>;
using Q5_K = InEightParts<true>;

struct Q6_K {
  static constexpr int64_t NUMBERS = 256, BYTES = 210;
  INLINE void block(const uint8_t* from, float* to) {
    const uint8_t *low = from, *high = from + 128;
    const int8_t* sc = reinterpret_cast<const int8_t*>(from + 192);
    float d = half_at(from + 208);
    for (int part = 0; part < 8; ++part) {
      int n = part / 4, j = part % 4, shift = j / 2 * 4;
      const uint8_t* q = low + 64 * n + 32 * (j % 2);
      float scale[2] = {d * static_cast<float>(sc[2 * part]), d * static_cast<float>(sc[2 * part + 1])};
      for (int i = 0; i < 32; ++i) {
        int level = (q[i] >> shift & 15) | (high[32 * n + i] >> 2 * j & 3) << 4;
        to[32 * part + i] = scale[i / 16] * static_cast<float>(level - 32);
      }
    }
  }
};

// 32 numbers of a table, those of the low halves of bytes first.
INLINE void looked_up(const float* table, float d, const uint8_t* q, float* to) {
  for (int i = 0; i < 16; ++i) {
    to[i] = d * table[q[i] & 15];
    to[i + 16] = d * table[q[i] >> 4];
  }
}

struct IQ4_NL {
  static constexpr int64_t NUMBERS = 32, BYTES = 18;
  INLINE void block(const uint8_t* from, float* to) { looked_up(NONLINEAR, half_at(from), from + 2, to); }
};

struct IQ4_XS {
  static constexpr int64_t NUMBERS = 256, BYTES = 136;
  INLINE void block(const uint8_t* from, float* to) {
    float d = half_at(from);
    int high = from[2] | from[3] << 8;
    for (int part = 0; part < 8; ++part) {
      int scale = (from[4 + part / 2] >> 4 * (part % 2) & 15) | (high >> 2 * part & 3) << 4;
      looked_up(NONLINEAR, d * static_cast<float>(scale - 32), from + 8 + 16 * part, to + 32 * part);
    }
  }
};

struct MXFP4 {
  static constexpr int64_t NUMBERS = 32, BYTES = 17;
  INLINE void block(const uint8_t* from, float* to) {
    // 2^(e − 128), which is subnormal for the two smallest.
    float d = as<float>(from[0] < 2 ? 0x00200000u << from[0] : static_cast<uint32_t>(from[0] - 1) << 23);
    looked_up(E2M1, d, from + 1, to);
  }
};

template <class B> INLINE void unpacked(const uint8_t* from, int64_t blocks, float* to) {
  for (int64_t at = 0; at < blocks; ++at) B::block(from + at * B::BYTES, to + at * B::NUMBERS);
}

struct Form {
  int64_t numbers, bytes;
  int halves[2];
  void (*unpack)(const uint8_t* from, int64_t blocks, float* to);
};

// ggml's number of each, and where scale and minimum lie in a block, if they are f16.
#define EACH_FORM(FORM) \
  FORM(2, Q4_0, 0, -1)  \
  FORM(3, Q4_1, 0, 2)   \
  FORM(6, Q5_0, 0, -1)  \
  FORM(7, Q5_1, 0, 2)   \
  FORM(8, Q8_0, 0, -1)  \
  FORM(10, Q2_K, 80, 82) \
  FORM(11, Q3_K, 108, -1) \
  FORM(12, Q4_K, 0, 2)  \
  FORM(13, Q5_K, 0, 2)  \
  FORM(14, Q6_K, 208, -1) \
  FORM(20, IQ4_NL, 0, -1) \
  FORM(23, IQ4_XS, 0, -1) \
  FORM(39, MXFP4, -1, -1)

#define UNPACK(id, B, ...) \
  VARIANTS void unpack_##B(const uint8_t* from, int64_t blocks, float* to) { unpacked<B>(from, blocks, to); }
EACH_FORM(UNPACK)
#undef UNPACK

Form form_of(int64_t id) {
#define CASE(number, B, ...) case number: return {B::NUMBERS, B::BYTES, {__VA_ARGS__}, unpack_##B};
  switch (id) { EACH_FORM(CASE) }
#undef CASE
  TORCH_CHECK(false, "no packed weights have the number ", id);
}

template <class S> void unpack_blocks(Form form, const uint8_t* from, int64_t blocks, S* to) {
  if constexpr (std::is_same_v<S, float>) return form.unpack(from, blocks, to);
  else {
    float numbers[NUMBERS_AT_ONCE];
    int64_t step = NUMBERS_AT_ONCE / form.numbers;
    for (int64_t at = 0; at < blocks; at += step) {
      int64_t here = std::min(step, blocks - at);
      form.unpack(from + at * form.bytes, here, numbers);
      convert(numbers, here * form.numbers, to + at * form.numbers);
    }
  }
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

// -1 where there is none.
int kvtune_first_bad_block(at::Tensor* packed, int64_t id, int64_t* result) {
  return guarded([&] {
    Form form = form_of(id);
    at::Tensor from = packed->contiguous();
    const uint8_t* block = from.data_ptr<uint8_t>();
    int64_t count = from.numel() / form.bytes;
    *result = -1;
    for (int64_t at = 0; at < count && *result < 0; ++at, block += form.bytes) {
      bool is_bad = form.halves[0] < 0 && block[0] == 255;
      for (int half : form.halves) is_bad |= half >= 0 && (block[half + 1] & 0x7c) == 0x7c;
      if (is_bad) *result = at;
    }
  });
}

int kvtune_unpack(at::Tensor* packed, int64_t id, at::Tensor* like, at::Tensor** result) {
  return giving(result, [&] {
    Form form = form_of(id);
    bool fits = packed->is_cpu() && packed->scalar_type() == at::kByte && packed->dim() > 0 && packed->size(-1) % form.bytes == 0;
    TORCH_CHECK(fits, "a tensor of size ", packed->sizes(), " holds no blocks of ", form.bytes, " bytes");
    at::Tensor from = packed->contiguous();
    std::vector<int64_t> size = packed->sizes().vec();
    size.back() = size.back() / form.bytes * form.numbers;
    at::Tensor out = at::empty(size, like->options());
    const uint8_t* first = from.data_ptr<uint8_t>();
    BY_KIND(out, share_out_ranges(out.numel() / form.numbers, grain(form.numbers), [&](int64_t begin, int64_t end) {
      unpack_blocks(form, first + begin * form.bytes, end - begin, data<S>(out) + begin * form.numbers);
    }));
    return Tensors{out};
  });
}

int kvtune_packed_product(at::Tensor* x, at::Tensor* packed, int64_t id, at::Tensor** result) {
  return giving(result, [&] {
    Form form = form_of(id);
    bool fits = packed->is_cpu() && packed->scalar_type() == at::kByte && packed->dim() == 2 && packed->size(1) % form.bytes == 0;
    int64_t blocks = fits ? packed->size(1) / form.bytes : 0;
    at::Tensor from = packed->contiguous();
    return Tensors{product_of_rows(*x, from.size(0), blocks * form.numbers, [&](int64_t row, float* numbers) {
      form.unpack(from.data_ptr<uint8_t>() + row * from.size(1), blocks, numbers);
    })};
  });
}

}  // extern "C"
