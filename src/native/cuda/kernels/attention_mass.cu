// The attention that queries pay to keys, and nothing else: for each key the sum over queries of exp(q · k · scale − l), with l the
// query's log-sum-exp. Compiled at run time, once for each architecture, width of a head (KVTUNE_WIDTH, a multiple of 16) and kind
// (KVTUNE_F16: 1 for f16, 0 for bf16). NVRTC has no headers, so none is used.
//
// A block holds the fragments of 256 keys of one KV head in registers and lets the queries of all heads of its group pass through
// shared memory, 32 or 64 at a time: row j is head j mod R of token j / R, so that a block of a causal square begins at its first
// token. Keys are the rows of the products, so that the sum over queries stays within a thread, and at the end within four lanes.
// Nothing is added by more than one thread: the same sums twice, to the bit.
//
// What bounds it, for Hopper and 128 channels: a product of 16 × 8 scores takes 8 instructions of 2048 multiplications, 51 cycles of
// one of the four parts of a multiprocessor at the rate that mma.sync reaches there, its powers of 2 32 cycles of the unit that makes
// them, its loads from shared memory 16 and its issue about 25. So the products do. With 64 channels the powers do (32 against 26); to
// make a quarter of them with a polynomial would cost 8 of the issue's 19, and gain nothing.

#ifndef KVTUNE_EMULATED

using Narrow = unsigned short;

// c += a b, with a 16 keys × 16 channels, b 16 channels × 8 queries.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if KVTUNE_F16
#define KVTUNE_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define KVTUNE_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
  asm(KVTUNE_MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 × 8 from shared memory; lane i says where row i mod 8 of matrix i / 8 begins.
__device__ __forceinline__ void load_matrices(unsigned (&part)[4], const Narrow* row) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3])
               : "r"(address)
               : "memory");
}

// Begins to copy 16 bytes to shared memory, or to clear them.
__device__ __forceinline__ void begin_copy(Narrow* to, const Narrow* from, bool is_there) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

// Begins to copy one number to shared memory.
__device__ __forceinline__ void begin_copy(float* to, const float* from) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

// Waits until what this thread has begun to copy is there, for this thread.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif

constexpr int WIDTH = KVTUNE_WIDTH;
constexpr int THREADS = 256;
// Keys of a warp: two products share each load of queries from shared memory, which would else be the bound.
constexpr int KEY_TILES = 2;
constexpr int KEYS = THREADS / 32 * KEY_TILES * 16;
// Rows of queries at a time: two times so many fit into 48 KiB.
constexpr int ROWS = WIDTH <= 128 ? 64 : 32;
// Tiles of 8 queries whose scores are in registers at once.
constexpr int QUERY_TILES = WIDTH <= 64 ? 4 : 2;
constexpr int STEPS = WIDTH / 16;
// 16 bytes more than a row takes: 8 rows then lie in different banks.
constexpr int PITCH = WIDTH + 8;
constexpr int PIECES = WIDTH / 8;

static_assert(WIDTH % 16 == 0 && WIDTH <= 256, "heads are 16, 32, ... 256 channels wide");

// Strides count numbers. Channels of queries and keys are neighbours, and each row of them begins at a multiple of 16 bytes.
struct MassParams {
  const Narrow* q;              // (B, H, n, D)
  const Narrow* k;              // (B, G, P, D)
  const float* level;           // (B, H, n), contiguous: l · log2 e; +inf for a query that pays nothing
  const unsigned char* in_use;  // (B, G, P), contiguous, or null
  float* out;                   // (splits, B · G, P), each row contiguous
  long long q_batch, q_head, q_token;
  long long k_batch, k_group, k_slot;
  long long out_split, out_row;
  int groups, per_group;
  int tokens, slots;
  int first;           // the first token that pays
  int causal;          // 1: slot c is seen by the tokens from c on
  int rows_per_split;  // of the queries, for each block in z
  float factor;        // scale · log2 e
};
static_assert(sizeof(MassParams) == 136, "as whoever launches it has it");

// Tiles of rows on their way: tile u is read while u + 1 is copied and the places of u + 2 are looked up.
struct Tiles {
  alignas(16) Narrow query[2][ROWS * PITCH];
  float level[2][ROWS];
  long long query_at[2][ROWS];  // -1: there is no such row
  int level_at[2][ROWS];
  int token[4][ROWS];
};

__device__ __forceinline__ void look_up(const MassParams& p, Tiles& tiles, int u, int begin, int end) {
  int i = threadIdx.x;
  if (i >= ROWS) return;
  int j = begin + u * ROWS + i;
  int batch = blockIdx.y / p.groups, group = blockIdx.y % p.groups;
  int since_first = j / p.per_group;
  int head = group * p.per_group + (j - since_first * p.per_group);
  int token = p.first + since_first;
  long long at = batch * p.q_batch + head * p.q_head + token * p.q_token;
  tiles.query_at[u % 2][i] = j < end ? at : -1;
  tiles.level_at[u % 2][i] = (batch * p.groups * p.per_group + head) * p.tokens + token;
  tiles.token[u % 4][i] = token;
}

__device__ __forceinline__ void begin_rows(const MassParams& p, Tiles& tiles, int u) {
#pragma unroll
  for (int turn = 0; turn < ROWS * PIECES; turn += THREADS) {
    int piece = turn + threadIdx.x;
    if (ROWS * PIECES % THREADS != 0 && piece >= ROWS * PIECES) break;
    int i = piece / PIECES, channel = piece % PIECES * 8;
    long long at = tiles.query_at[u % 2][i];
    begin_copy(tiles.query[u % 2] + i * PITCH + channel, p.q + (at < 0 ? 0 : at + channel), at >= 0);
  }
  int i = threadIdx.x;
  if (i >= ROWS) return;
  if (tiles.query_at[u % 2][i] >= 0) {
    begin_copy(&tiles.level[u % 2][i], p.level + tiles.level_at[u % 2][i]);
  } else {
    tiles.level[u % 2][i] = __int_as_float(0x7f800000);
  }
}

// Lane l has rows l / 4 and l / 4 + 8 of a tile of keys, and of each 16 channels 2 (l mod 4) and the next, and those 8 further on.
__device__ __forceinline__ void load_keys(const MassParams& p, int own_key, unsigned (&key)[KEY_TILES][STEPS][4]) {
  const Narrow* keys = p.k + blockIdx.y / p.groups * p.k_batch + blockIdx.y % p.groups * p.k_group;
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      int slot = own_key + tile * 16 + part * 8;
      const unsigned* from = reinterpret_cast<const unsigned*>(keys + slot * p.k_slot) + threadIdx.x % 4;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        key[tile][step][part] = slot < p.slots ? __ldg(from + step * 8) : 0;
        key[tile][step][part + 2] = slot < p.slots ? __ldg(from + step * 8 + 4) : 0;
      }
    }
  }
}

// What so many rows of tile u pay to a warp's keys. On the diagonal some of them come before some of the keys.
template <bool ON_DIAGONAL>
__device__ __forceinline__ void pay(const Tiles& tiles, int u, int rows, const unsigned (&key)[KEY_TILES][STEPS][4], int own_key,
                                    float factor, float (&sum)[KEY_TILES][2]) {
  int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int block = 0; block < rows; block += QUERY_TILES * 8) {
    float score[KEY_TILES][QUERY_TILES][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int pair = 0; pair < QUERY_TILES / 2; ++pair) {
        // Matrices 0 and 1 are the channels of 8 queries, 2 and 3 those of the next 8.
        int i = block + pair * 16 + lane / 16 * 8 + lane % 8, channel = step * 16 + lane / 8 % 2 * 8;
        unsigned part[4];
        load_matrices(part, &tiles.query[u % 2][i * PITCH + channel]);
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile) {
          multiply(score[tile][2 * pair], key[tile][step], part[0], part[1]);
          multiply(score[tile][2 * pair + 1], key[tile][step], part[2], part[3]);
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < QUERY_TILES * 2; ++pair) {
      // Lane l has queries 2 (l mod 4) and the next of each 8.
      int i = block + pair / 2 * 8 + lane % 4 * 2 + pair % 2;
      float level = tiles.level[u % 2][i];
#pragma unroll
      for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float weight = power_of_2(score[tile][pair / 2][part * 2 + pair % 2] * factor - level);
          if (ON_DIAGONAL && tiles.token[u % 4][i] < own_key + tile * 16 + part * 8) weight = 0.0f;
          sum[tile][part] += weight;
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, WIDTH <= 128 ? 2 : 1) attention_mass(const MassParams p) {
  __shared__ Tiles tiles;
  int lane = threadIdx.x % 32;
  int first_key = blockIdx.x * KEYS;
  int own_key = first_key + threadIdx.x / 32 * KEY_TILES * 16 + lane / 4;
  unsigned key[KEY_TILES][STEPS][4];
  load_keys(p, own_key, key);

  int begin = blockIdx.z * p.rows_per_split;
  int end = min((p.tokens - p.first) * p.per_group, begin + p.rows_per_split);
  // No earlier token sees the first of these keys.
  if (p.causal) begin = max(begin, (first_key - p.first) * p.per_group);
  int count = begin < end ? (end - begin + ROWS - 1) / ROWS : 0;

  float total[KEY_TILES][2] = {};
  if (count > 0) {
    look_up(p, tiles, 0, begin, end);
    __syncthreads();
    begin_rows(p, tiles, 0);
    look_up(p, tiles, 1, begin, end);
  }
  for (int u = 0; u < count; ++u) {
    end_copies();
    // Behind it tile u is there for all, and nobody reads tile u - 1 any more.
    __syncthreads();
    if (u + 1 < count) begin_rows(p, tiles, u + 1);
    look_up(p, tiles, u + 2, begin, end);
    // Sums of a tile first: a long sum then rounds as often as it has tiles, not queries.
    float sum[KEY_TILES][2] = {};
    int rows = min(ROWS, end - begin - u * ROWS);
    if (p.causal && tiles.token[u % 4][0] < first_key + KEYS - 1) {
      pay<true>(tiles, u, rows, key, own_key, p.factor, sum);
    } else {
      pay<false>(tiles, u, rows, key, own_key, p.factor, sum);
    }
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
      total[tile][0] += sum[tile][0];
      total[tile][1] += sum[tile][1];
    }
  }

#pragma unroll
  for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float mass = total[tile][part];
      mass += __shfl_xor_sync(0xffffffffu, mass, 1);
      mass += __shfl_xor_sync(0xffffffffu, mass, 2);
      int slot = own_key + tile * 16 + part * 8;
      if (lane % 4 == 0 && slot < p.slots) {
        bool counts = p.in_use == nullptr || __ldg(p.in_use + (static_cast<long long>(blockIdx.y) * p.slots + slot)) != 0;
        p.out[blockIdx.z * p.out_split + blockIdx.y * p.out_row + slot] = counts ? mass : 0.0f;
      }
    }
  }
}

// Adds up what the splits of the queries give, in their order: part (splits, rows, slots), contiguous, to out (rows, slots).
struct Splits {
  const float* part;
  float* out;
  long long out_row;
  int splits, slots;
};
static_assert(sizeof(Splits) == 32, "as whoever launches it has it");

extern "C" __global__ void __launch_bounds__(THREADS) sum_attention_mass(const Splits p) {
  int slot = blockIdx.x * THREADS + threadIdx.x;
  if (slot >= p.slots) return;
  long long rows = gridDim.y;
  float mass = 0.0f;
  for (int split = 0; split < p.splits; ++split) mass += __ldg(p.part + ((split * rows + blockIdx.y) * p.slots + slot));
  p.out[blockIdx.y * p.out_row + slot] = mass;
}
