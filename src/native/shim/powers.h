// Powers of 2 and of e in loops over many numbers, and how such a loop is compiled for several generations of CPUs.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VARIANTS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VARIANTS
#endif
#define INLINE static inline __attribute__((always_inline))

namespace kvtune {

// The same bits as a number of another type.
template <class To, class From> INLINE To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline constexpr double LOG2_E = 1.4426950408889634074;

// How 2^x is made in a kind: the number whose addition rounds to an integer (1.5 · 2^mantissa), the exponent's bias and place, the
// integer of the same size, the last term of the series that is not below the rounding, and ln(2) as the sum of two numbers, whole
// multiples of the first of which are exact.
template <class T> struct Powers;
template <> struct Powers<float> {
  using Bits = uint32_t;
  static constexpr float SHIFT = 12582912.f;
  static constexpr int BIAS = 127, MANTISSA = 23, TERMS = 7;
  static constexpr float LN2_HIGH = 6.93359375e-1f, LN2_LOW = -2.12194440e-4f;
};
template <> struct Powers<double> {
  using Bits = uint64_t;
  static constexpr double SHIFT = 6755399441055744.0;
  static constexpr int BIAS = 1023, MANTISSA = 52, TERMS = 13;
  static constexpr double LN2_HIGH = 6.93147180369123816490e-1, LN2_LOW = 1.90821492927058770002e-10;
};

// Taylor series of 2^f: ln(2)^k / k!.
inline constexpr double SERIES[] = {
    1.0, 6.9314718055994531e-1, 2.4022650695910072e-1, 5.5504108664821580e-2, 9.6181291076284772e-3,
    1.3333558146428443e-3, 1.5403530393381609e-4, 1.5252733804059841e-5, 1.3215486790144309e-6, 1.0178086009239700e-7,
    7.0549116208011233e-9, 4.4455382718708114e-10, 2.5678435993488202e-11, 1.3691488853904128e-12,
};

// Its terms from the k-th on, over f^k.
template <class T, int k> INLINE T series_from(T f) {
  if constexpr (k == Powers<T>::TERMS) {
    return static_cast<T>(SERIES[k]);
  } else {
    return series_from<T, k + 1>(f) * f + static_cast<T>(SERIES[k]);
  }
}

// 2^k of the integer k that the addition of SHIFT has left in the lowest bits of `shifted`.
template <class T> INLINE T power_of_rounded(T shifted) {
  using P = Powers<T>;
  using Bits = typename P::Bits;
  // The shift leaves nothing of SHIFT's own bits.
  return as<T>((as<Bits>(shifted) << P::MANTISSA) + (static_cast<Bits>(P::BIAS) << P::MANTISSA));
}

// 2^x for x at most a little above 0; 0 below the smallest normal number. Rounds to a whole power and expands the rest, |f| <= 1/2.
template <class T> INLINE T power(T x) {
  using P = Powers<T>;
  constexpr T least = 1 - P::BIAS;
  T held = x < least ? least : x;
  T shifted = held + P::SHIFT;
  return x < least ? T(0) : series_from<T, 0>(held - (shifted - P::SHIFT)) * power_of_rounded(shifted);
}

// e^x for x at most a little above 0; 0 below the smallest normal number. The whole powers of 2 are taken off x itself, exactly: the
// rest of a rounded product with log2(e) would be wrong by as much as x is large.
template <class T> INLINE T exponential(T x) {
  using P = Powers<T>;
  constexpr T least = (1 - P::BIAS) / LOG2_E, log2_e = LOG2_E;
  T held = x < least ? least : x;
  T shifted = held * log2_e + P::SHIFT, whole = shifted - P::SHIFT;
  T rest = (held - whole * P::LN2_HIGH) - whole * P::LN2_LOW;
  return x < least ? T(0) : series_from<T, 0>(rest * log2_e) * power_of_rounded(shifted);
}

// e^x - 1 for x at most 0, to some roundings of the result however small x is: what is left of whole powers is expanded without its 1.
template <class T> INLINE T exponential_less_one(T x) {
  using P = Powers<T>;
  constexpr T least = (1 - P::BIAS) / LOG2_E, log2_e = LOG2_E;
  T held = x < least ? least : x;
  T shifted = held * log2_e + P::SHIFT, whole = shifted - P::SHIFT;
  T rest = ((held - whole * P::LN2_HIGH) - whole * P::LN2_LOW) * log2_e, power = power_of_rounded(shifted);
  return x < least ? T(-1) : power * (rest * series_from<T, 1>(rest)) + (power - 1);
}

template <class T> INLINE T hyperbolic_tangent(T x) {
  T less_one = exponential_less_one(x < 0 ? 2 * x : -2 * x);
  T size = -less_one / (2 + less_one);
  return x < 0 ? -size : size;
}

}  // namespace kvtune
