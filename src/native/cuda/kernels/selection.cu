// Which entries leave a cache, in their order, and where the others move: what src/cache/victims.rs and src/cache/moves.rs have in
// libtorch's operations, by sorting and choosing digit by digit. Compiled at run time.
//
// A block has a row, which is a KV head of a sequence, however long it is: all that is held of it in shared memory is a table of counts,
// by digit (8 bits) and warp. Each warp has a stretch of the row, and lanes with the same digit count together; then every digit of every
// warp knows where its first item goes. So nothing is added in an order of chance, items of the same digit keep their order, and the
// same bits come out every time. Rows are few: each takes one multiprocessor, and what it reads again lies in that one's cache.

constexpr int THREADS = 1024;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr int DIGIT = 8;
constexpr int BINS = 1 << DIGIT;
// One more than warps, so that the bins of a warp lie in different banks.
constexpr int STRIDE = WARPS + 1;
// The bin of what is not counted.
constexpr unsigned NONE = BINS;
constexpr unsigned ALL = 0xffffffffu;
// So many digits are on their way at once.
constexpr int AHEAD = 4;
// Threads of a block, where each has an entry of its own.
constexpr int EACH_OWN = 256;
constexpr long long LARGEST = 0x7fffffffffffffffLL;

#ifndef KVTUNE_EMULATED

// Of memory that the same block writes, so that it must not come from a cache that sees no writes.
template <class T> __device__ __forceinline__ T fetch_from(const T* at) { return *at; }
template <class T> __device__ __forceinline__ void store_to(T* at, T value) { *at = value; }

#endif

__shared__ unsigned counts[BINS * STRIDE];
__shared__ unsigned of_warp[WARPS];
// The bin of the last key that leaves, how many keys lie in bins below, and how many in it.
__shared__ unsigned found[3];

__device__ __forceinline__ int lane_of() { return threadIdx.x % LANES; }
__device__ __forceinline__ int warp_of() { return threadIdx.x / LANES; }

// Begin and end of a warp's stretch.
__device__ __forceinline__ int stretch(int items) { return (items + THREADS - 1) / THREADS * LANES; }

// Calls `work` for each item of the warp's stretch, in their order: the item, its bin, and the lanes that have the same bin.
template <class Bin, class Work> __device__ __forceinline__ void each(int items, Bin bin_of, Work work) {
  int begin = warp_of() * stretch(items), end = min(items, begin + stretch(items));
  for (int at = begin; at < end; at += AHEAD * LANES) {
    unsigned bin[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int item = at + i * LANES + lane_of();
      bin[i] = item < end ? bin_of(item) : NONE;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) work(at + i * LANES + lane_of(), bin[i], __match_any_sync(ALL, bin[i]));
  }
}

__device__ __forceinline__ bool is_first(unsigned same) { return __ffs(static_cast<int>(same)) - 1 == lane_of(); }

// How many items each bin has in each warp's stretch.
template <class Bin> __device__ __forceinline__ void count(int items, Bin bin_of) {
  // Whoever still reads what was counted before.
  __syncthreads();
  for (int i = threadIdx.x; i < BINS * STRIDE; i += THREADS) counts[i] = 0;
  __syncthreads();
  each(items, bin_of, [](int, unsigned bin, unsigned same) {
    if (bin != NONE && is_first(same)) counts[bin * STRIDE + warp_of()] += __popc(same);
    __syncwarp();
  });
  __syncthreads();
}

// Counts become places: how many items lie in bins below, and in the same bin in warps before.
__device__ __forceinline__ void place() {
  constexpr int EACH = BINS * WARPS / THREADS;
  constexpr int PARTS = WARPS / EACH;
  unsigned* own = counts + (threadIdx.x / PARTS * STRIDE + threadIdx.x % PARTS * EACH);
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    unsigned here = own[i];
    own[i] = sum;
    sum += here;
  }
  unsigned up_to = sum;
  for (int distance = 1; distance < LANES; distance *= 2) {
    unsigned lower = __shfl_up_sync(ALL, up_to, distance);
    if (lane_of() >= distance) up_to += lower;
  }
  if (lane_of() == LANES - 1) of_warp[warp_of()] = up_to;
  __syncthreads();
  unsigned before = up_to - sum;
  for (int warp = 0; warp < warp_of(); ++warp) before += of_warp[warp];
#pragma unroll
  for (int i = 0; i < EACH; ++i) own[i] += before;
  __syncthreads();
}

// How many items lie in bins below this one, after `place`, where there are so many in all.
__device__ __forceinline__ unsigned below(unsigned bin, unsigned items) { return bin < BINS ? counts[bin * STRIDE] : items; }

// Calls `put` with each item and its place, after `count` and `place` with the same bins.
template <class Bin, class Put> __device__ __forceinline__ void scatter(int items, Bin bin_of, Put put) {
  each(items, bin_of, [&](int item, unsigned bin, unsigned same) {
    unsigned* first = counts + (bin * STRIDE + warp_of());
    unsigned to = bin == NONE ? 0 : *first + __popc(same & ((1u << lane_of()) - 1));
    __syncwarp();
    if (bin != NONE && is_first(same)) *first += __popc(same);
    __syncwarp();
    if (bin != NONE) put(item, to);
  });
}

// Puts `items` numbers at `from` in the order of their rank, of so many bits; equals stay in theirs. Returns where they are: there or
// at `to`, seen by all.
template <class Rank> __device__ unsigned* sorted(unsigned* from, unsigned* to, int items, int bits, Rank rank) {
  for (int shift = 0; shift < bits; shift += DIGIT) {
    auto digit = [&](unsigned number) { return static_cast<unsigned>(rank(number) >> shift) % BINS; };
    auto bin_of = [&](int item) { return digit(fetch_from(from + item)); };
    count(items, bin_of);
    place();
    // A digit that all have in common moves nothing.
    unsigned common = digit(fetch_from(from));
    bool has_one = below(common, items) == 0 && below(common + 1, items) == static_cast<unsigned>(items);
    // The first that scatters counts on where the last still reads.
    __syncthreads();
    if (has_one) continue;
    scatter(items, bin_of, [&](int item, unsigned at) { store_to(to + at, fetch_from(from + item)); });
    unsigned* done = to;
    to = from;
    from = done;
  }
  __syncthreads();
  return from;
}

struct Entries {
  const float* score;         // (B, G, slots), or broken down to one head or row by a stride of 0
  const long long* position;  // likewise
  const long long* bounds;    // (B, 2): begin and end of the positions that stay; null where none do
  long long* key;             // (B, G, slots), contiguous
  long long score_batch, score_group, position_batch, position_group;
  // Positions from 0 to below `sinks` stay, and those from `young` on.
  long long sinks, young;
  int groups, slots;
};
static_assert(sizeof(Entries) == 88, "as whoever launches it has it");

// A score's order: -0 is 0, and what is not a number is as large as any.
__device__ __forceinline__ int ordered(float score) {
  unsigned bits = __float_as_uint(score);
  if (bits == 0x80000000u) bits = 0;
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7f800000u;
  // A negative number has its sign set and grows downwards.
  return static_cast<int>(bits >> 31 != 0 ? bits ^ 0x7fffffffu : bits);
}

// The keys of entries: the score first and the position second; what may not leave has the largest.
extern "C" __global__ void __launch_bounds__(EACH_OWN) rank_entries(const Entries p) {
  int slot = blockIdx.x * EACH_OWN + threadIdx.x;
  if (slot >= p.slots) return;
  int row = blockIdx.y, b = row / p.groups, g = row % p.groups;
  long long position = __ldg(p.position + (b * p.position_batch + g * p.position_group + slot));
  float score = __ldg(p.score + (b * p.score_batch + g * p.score_group + slot));
  bool stays = (position >= 0 && position < p.sinks) || position >= p.young;
  if (p.bounds) stays = stays || (position >= __ldg(p.bounds + b * 2) && position < __ldg(p.bounds + (b * 2 + 1)));
  // By 2^32 and not by a shift: a score may be negative.
  long long key = ordered(score) * 0x100000000LL + max(position, 0LL);
  store_to(p.key + (static_cast<long long>(row) * p.slots + slot), stays ? LARGEST : key);
}

struct Lowest {
  const long long* key;  // (rows, slots)
  long long* slot;       // (rows, taken): lowest key first, of equals the lower slot
  unsigned* scratch;     // (rows, 2, taken)
  int slots, taken;
};
static_assert(sizeof(Lowest) == 32, "as whoever launches it has it");

extern "C" __global__ void __launch_bounds__(THREADS) take_lowest(const Lowest p) {
  const long long* key = p.key + static_cast<long long>(blockIdx.x) * p.slots;
  long long* slot = p.slot + static_cast<long long>(blockIdx.x) * p.taken;
  unsigned* scratch = p.scratch + static_cast<long long>(blockIdx.x) * p.taken * 2;
  auto rank = [&](unsigned slot) { return static_cast<unsigned long long>(__ldg(key + slot)) ^ 0x8000000000000000ULL; };

  // The digits of the last key that leaves, from the uppermost, until all keys that have them leave.
  unsigned long long last = 0;
  unsigned left = p.taken, inside = p.slots;
  int shift = 64;
  do {
    shift -= DIGIT;
    count(p.slots, [&](int slot) {
      unsigned long long upper = rank(slot) >> shift;
      return upper >> DIGIT == last ? static_cast<unsigned>(upper) % BINS : NONE;
    });
    place();
    if (threadIdx.x < BINS) {
      unsigned lower = below(threadIdx.x, inside), upper = below(threadIdx.x + 1, inside);
      if (lower < left && left <= upper) {
        found[0] = threadIdx.x;
        found[1] = lower;
        found[2] = upper - lower;
      }
    }
    __syncthreads();
    last = last << DIGIT | found[0];
    left -= found[1];
    inside = found[2];
  } while (shift > 0 && inside != left);

  // Those below, then the first of those that have the same digits: all of them, unless the keys are the same.
  auto bin_of = [&](int slot) {
    unsigned long long upper = rank(slot) >> shift;
    return upper < last ? 0u : upper == last ? 1u : NONE;
  };
  count(p.slots, bin_of);
  place();
  scatter(p.slots, bin_of, [&](int slot, unsigned at) {
    if (at < static_cast<unsigned>(p.taken)) store_to(scratch + at, static_cast<unsigned>(slot));
  });
  const unsigned* taken = sorted(scratch, scratch + p.taken, p.taken, 64, rank);
  for (int i = threadIdx.x; i < p.taken; i += THREADS) store_to(slot + i, static_cast<long long>(fetch_from(taken + i)));
}

struct Moves {
  const long long* victim;  // (rows, victims): slots that are left, in any order
  long long* to;            // the same: those slots from the lowest on
  long long* order;         // which victim each of them was
  long long* from;          // the slots from `region` on, as many, those that are left behind the others
  unsigned* scratch;        // (rows, 3, victims)
  long long region;
  int victims;
};
static_assert(sizeof(Moves) == 56, "as whoever launches it has it");

extern "C" __global__ void __launch_bounds__(THREADS) plan_moves(const Moves p) {
  long long row = static_cast<long long>(blockIdx.x) * p.victims;
  const long long* victim = p.victim + row;
  unsigned* scratch = p.scratch + row * 3;
  unsigned* is_left = scratch + 2LL * p.victims;
  for (int i = threadIdx.x; i < p.victims; i += THREADS) {
    store_to(scratch + i, static_cast<unsigned>(i));
    store_to(is_left + i, 0u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.victims; i += THREADS) {
    long long inside = __ldg(victim + i) - p.region;
    if (inside >= 0 && inside < p.victims) store_to(is_left + inside, 1u);
  }
  auto slot_of = [&](unsigned i) { return static_cast<unsigned>(__ldg(victim + i)); };
  const unsigned* order = sorted(scratch, scratch + p.victims, p.victims, 32, slot_of);
  for (int i = threadIdx.x; i < p.victims; i += THREADS) {
    unsigned own = fetch_from(order + i);
    store_to(p.order + (row + i), static_cast<long long>(own));
    store_to(p.to + (row + i), __ldg(victim + own));
  }
  auto bin_of = [&](int i) { return fetch_from(is_left + i); };
  count(p.victims, bin_of);
  place();
  scatter(p.victims, bin_of, [&](int i, unsigned at) { store_to(p.from + (row + at), p.region + i); });
}
