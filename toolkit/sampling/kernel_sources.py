"""Sources: the fused kernels' code, one text for CUDA and Metal with a header of macros for each.

`PART` gives each chunk of a row its best and second-best perturbed score and its mass, relative to the
chunk's largest logit; `JOIN` joins a row's chunks in one warp; `AT` makes noise words at listed ids. The
stream is that of `noise`: one Threefry call gives the words of ids j and j + 1024 of a block of 2,048.
"""

THREADS = 256
CHUNK = 8192

CUDA = r"""
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define SYNC __syncthreads()
#define SHUFFLE(x, lanes) __shfl_xor_sync(0xffffffffu, x, lanes)
#define LANE (threadIdx.x)
#define PLACE (blockIdx.x)
#define ROW (blockIdx.y)
#define UNROLL _Pragma("unroll")
#define LOG(x) logf(x)
#define EXP(x) expf(x)
#define MINUS_INFINITY (-__int_as_float(0x7f800000))
#define NOT_A_NUMBER (__int_as_float(0x7fc00000))
typedef unsigned int word;
"""

METAL = r"""
#define DEVICE inline
#define SHARED threadgroup
#define SYNC threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE(x, lanes) simd_shuffle_xor(x, lanes)
#define LANE (thread_position_in_threadgroup.x)
#define PLACE (threadgroup_position_in_grid.x)
#define ROW (threadgroup_position_in_grid.y)
#define UNROLL _Pragma("clang loop unroll(full)")
#define LOG(x) metal::precise::log(x)
#define EXP(x) metal::precise::exp(x)
#define MINUS_INFINITY (-INFINITY)
#define NOT_A_NUMBER (NAN)
typedef uint word;
"""

COMMON = r"""
struct pair_of_words { word a, b; };

DEVICE pair_of_words threefry(word k0, word k1, word a, word b) {
  word k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  a += k0;
  b += k1;
#define TURN(r) a += b; b = (b << r) | (b >> (32 - r)); b ^= a;
#define ODD TURN(13) TURN(15) TURN(26) TURN(6)
#define EVEN TURN(17) TURN(29) TURN(16) TURN(24)
  ODD  a += k1; b += k2 + 1u;
  EVEN a += k2; b += k0 + 2u;
  ODD  a += k0; b += k1 + 3u;
  EVEN a += k1; b += k2 + 4u;
  ODD  a += k2; b += k0 + 5u;
#undef TURN
#undef ODD
#undef EVEN
  pair_of_words out;
  out.a = a;
  out.b = b;
  return out;
}

DEVICE float gumbel(word x) {
  float u = ((float)x + 0.5f) * 2.3283064365386963e-10f;
  float v = ((float)(~x) + 0.5f) * 2.3283064365386963e-10f;
  float series = v * (1.0f + v * (0.5f + v * (0.33333334f + v * 0.25f)));
  return -LOG(x >= 0xFC000000u ? series : -LOG(u));
}

struct leader { float best, second, chosen; int id; };

DEVICE leader lead(leader a, leader b) {
  bool swap = b.best > a.best || (b.best == a.best && b.id < a.id);
  leader out = swap ? b : a;
  float loser = swap ? a.best : b.best;
  float third = out.second;
  out.second = loser > third ? loser : third;
  return out;
}

DEVICE leader lead_across(leader x) {
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    leader other;
    other.best = SHUFFLE(x.best, lanes);
    other.second = SHUFFLE(x.second, lanes);
    other.chosen = SHUFFLE(x.chosen, lanes);
    other.id = SHUFFLE(x.id, lanes);
    x = lead(x, other);
  }
  return x;
}
"""
CUDA += COMMON
METAL += COMMON

PART = r"""
  constexpr int PER = 32;       // ids of a thread: 8192 / 256
  constexpr int EMPTY = 0x7fffffff;
  SHARED word block_keys[8];
  SHARED float warp_float[8];
  SHARED leader warp_leader[8];
  const int lane = (int)LANE, row = (int)ROW, first = (int)PLACE * 8192;
  if (lane < 4) {
    pair_of_words key = threefry(keys[2 * row], keys[2 * row + 1], (word)(first / 2048 + lane), 1u);
    block_keys[2 * lane] = key.a;
    block_keys[2 * lane + 1] = key.b;
  }

  // A thread's ids are lane + 256 * n: neighbours read neighbours, and n and n + 4 share a Threefry call.
  float value[PER];
  float top = MINUS_INFINITY;
  bool broken = false;
  UNROLL
  for (int n = 0; n < PER; ++n) {
    int id = first + lane + 256 * n;
    value[n] = id < VOCAB ? (float)logits[(size_t)row * VOCAB + id] : MINUS_INFINITY;
    broken = broken || value[n] != value[n];
    top = value[n] > top ? value[n] : top;
  }
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    float other = SHUFFLE(top, lanes);
    top = other > top ? other : top;
    broken = SHUFFLE((int)broken, lanes) != 0 || broken;
  }
  if (lane % 32 == 0) warp_float[lane / 32] = broken ? NOT_A_NUMBER : top;
  SYNC;
  top = MINUS_INFINITY;
  broken = false;
  for (int w = 0; w < 8; ++w) {
    float other = warp_float[w];
    broken = broken || other != other;
    top = other > top ? other : top;
  }
  SYNC;

  float mass = 0.0f;
  leader mine;
  mine.best = MINUS_INFINITY;
  mine.second = MINUS_INFINITY;
  mine.chosen = 0.0f;
  mine.id = EMPTY;
  const float heat = inverse[row], noisy = scale[row];
  UNROLL
  for (int block = 0; block < 4; ++block) {
    UNROLL
    for (int quarter = 0; quarter < 4; ++quarter) {
      word j = (word)(lane + 256 * quarter);
      pair_of_words words;
      words.a = 0x80000000u;
      words.b = 0x80000000u;
      if (noisy != 0.0f) words = threefry(block_keys[2 * block], block_keys[2 * block + 1], j, j + 1024u);
      UNROLL
      for (int side = 0; side < 2; ++side) {
        int n = 8 * block + 4 * side + quarter;
        if (value[n] == MINUS_INFINITY) continue;
        leader next;
        next.chosen = (value[n] - top) * heat;
        mass += EXP(next.chosen);
        next.best = noisy != 0.0f ? next.chosen + gumbel(side ? words.b : words.a) : next.chosen;
        next.second = MINUS_INFINITY;
        next.id = first + lane + 256 * n;
        mine = lead(mine, next);
      }
    }
  }
  mine = lead_across(mine);
  for (int lanes = 16; lanes > 0; lanes >>= 1) mass += SHUFFLE(mass, lanes);
  if (lane % 32 == 0) {
    warp_leader[lane / 32] = mine;
    warp_float[lane / 32] = mass;
  }
  SYNC;
  if (lane == 0) {
    for (int w = 1; w < 8; ++w) {
      mine = lead(mine, warp_leader[w]);
      mass += warp_float[w];
    }
    int place = row * CHUNKS + (int)PLACE;
    floats[5 * place] = mine.best;
    floats[5 * place + 1] = mine.second;
    floats[5 * place + 2] = mine.chosen;
    floats[5 * place + 3] = broken ? NOT_A_NUMBER : top;
    floats[5 * place + 4] = mass;
    ids[place] = mine.id;
  }
"""

JOIN = r"""
  constexpr int EMPTY = 0x7fffffff;
  const int lane = (int)LANE, row = (int)ROW;
  float top = MINUS_INFINITY;
  bool broken = false;
  for (int c = lane; c < CHUNKS; c += 32) {
    float t = floats[5 * (row * CHUNKS + c) + 3];
    broken = broken || t != t;
    top = t > top ? t : top;
  }
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    float other = SHUFFLE(top, lanes);
    top = other > top ? other : top;
    broken = SHUFFLE((int)broken, lanes) != 0 || broken;
  }
  const float heat = inverse[row];
  float mass = 0.0f;
  leader mine;
  mine.best = MINUS_INFINITY;
  mine.second = MINUS_INFINITY;
  mine.chosen = 0.0f;
  mine.id = EMPTY;
  for (int c = lane; c < CHUNKS; c += 32) {
    int place = row * CHUNKS + c;
    if (ids[place] == EMPTY) continue;
    // From the chunk's own largest logit to the row's.
    float shift = (floats[5 * place + 3] - top) * heat;
    leader next;
    next.best = floats[5 * place] + shift;
    next.second = floats[5 * place + 1] + shift;
    next.chosen = floats[5 * place + 2] + shift;
    next.id = ids[place];
    mass += floats[5 * place + 4] * EXP(shift);
    mine = lead(mine, next);
  }
  mine = lead_across(mine);
  for (int lanes = 16; lanes > 0; lanes >>= 1) mass += SHUFFLE(mass, lanes);
  if (lane == 0) {
    tokens[row] = mine.id == EMPTY ? 0 : mine.id;
    values[3 * row] = mine.best - mine.second;
    values[3 * row + 1] = mine.chosen - LOG(mass);
    values[3 * row + 2] = broken ? NOT_A_NUMBER : top;
  }
"""

AT = r"""
  const int row = (int)ROW, k = (int)PLACE * 32 + (int)LANE;
  if (k < COUNT) {
    word id = (word)ids[row * COUNT + k];
    pair_of_words key = threefry(keys[2 * row], keys[2 * row + 1], id / 2048u, 1u);
    word j = id % 1024u;
    pair_of_words out = threefry(key.a, key.b, j, j + 1024u);
    words[row * COUNT + k] = (id % 2048u) < 1024u ? out.a : out.b;
  }
"""
