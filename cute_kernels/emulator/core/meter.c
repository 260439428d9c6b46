// What accesses cost: wavefronts of shared memory, sectors of global memory; counters.py names what is counted here.
//
// Shared memory has 32 banks of 4 bytes; one pass through the data pipe (a wavefront, as Nsight Compute names it)
// delivers one word per bank, and the same word to any number of lanes. It moves at most 128 bytes of distinct words,
// so a warp with 8 bytes per lane is served by halves and with 16 bytes by quarters; a conflict is a wavefront beyond
// the first of its half or quarter. Loads have an exception: when in every pair of lanes (i, i ^ 1), or in every pair
// (i, i ^ 2), both read the same address, twice as many lanes are served together.
//
// NVIDIA documents the banks; the groups and the exception are what its engineers wrote in its developer forum about
// compute capability 7. bench/counters.py measures both on sm_90.
#include "meter.h"

#include <string.h>

enum { BANKS = 32, WORD = 4, MOST_WORDS = 8 };  // of a lane

// Distinct words by bank.
typedef struct Words {
  int32_t count[BANKS];
  int64_t words[BANKS][LANES * MOST_WORDS];
} Words;

static void add_words(Words *all, int64_t address, int64_t count) {
  for (int64_t k = 0; k < count; k++) {
    int64_t word = (address >> 2) + k, bank = word & (BANKS - 1);
    int32_t known = all->count[bank], i = 0;
    while (i < known && all->words[bank][i] != word) i++;
    all->words[bank][i] = word;
    all->count[bank] += i == known;
  }
}

// Whether lanes `distance` apart have one address wherever both are active.
static int pairs_agree(const int64_t *addresses, uint32_t mask, int distance) {
  for (int lane = 0; lane < LANES; lane++)
    if (!(lane & distance) && mask >> lane & mask >> (lane ^ distance) & 1 &&
        addresses[lane] != addresses[lane ^ distance])
      return 0;
  return 1;
}

// cost: wavefronts, conflicts, and the wavefronts that the distinct words would need in the best arrangement.
static void shared_cost(const int64_t *addresses, uint32_t mask, int64_t nbytes, int load, int64_t *cost) {
  int64_t width = nbytes < WORD ? WORD : nbytes, together = WAVEFRONT / width;
  if (together > LANES) together = LANES;
  if (load && together < LANES && (pairs_agree(addresses, mask, 1) || pairs_agree(addresses, mask, 2))) together *= 2;
  Words all, group;
  memset(all.count, 0, sizeof all.count);
  cost[0] = cost[1] = cost[2] = 0;
  for (int64_t first = 0; first < LANES; first += together) {
    uint32_t lanes = mask >> first & (uint32_t)((1ull << together) - 1);
    if (!lanes) continue;
    memset(group.count, 0, sizeof group.count);
    for (; lanes; lanes &= lanes - 1) {
      int64_t address = addresses[first + __builtin_ctz(lanes)];
      add_words(&group, address, width / WORD);
      add_words(&all, address, width / WORD);
    }
    int64_t passes = 0;
    for (int bank = 0; bank < BANKS; bank++) passes = group.count[bank] > passes ? group.count[bank] : passes;
    cost[0] += passes;
    cost[1] += passes - 1;
  }
  int64_t distinct = 0;
  for (int bank = 0; bank < BANKS; bank++) distinct += all.count[bank];
  cost[2] = (distinct + BANKS - 1) / BANKS;
}

// Lanes of an atomic that share a bank go one after the other, equal address or not.
static void atomic_cost(const int64_t *addresses, uint32_t mask, int64_t *cost) {
  int64_t lanes[BANKS] = {0}, most = 0;
  for (; mask; mask &= mask - 1) {
    int64_t count = ++lanes[addresses[__builtin_ctz(mask)] / WORD % BANKS];
    most = count > most ? count : most;
  }
  cost[0] = most;
  cost[1] = most - 1;
  cost[2] = 1;
}

// Distinct aligned pieces of `size` bytes, a power of two, that lanes access; no access crosses a border.
static int64_t distinct_pieces(const int64_t *addresses, uint32_t mask, int64_t size) {
  int64_t known[LANES], count = 0;
  int shift = __builtin_ctzll((uint64_t)size);
  for (; mask; mask &= mask - 1) {
    int64_t piece = addresses[__builtin_ctz(mask)] >> shift, i = count;
    while (i && known[i - 1] != piece) i--;  // from the end: neighbours mostly share a piece
    if (!i) known[count++] = piece;
  }
  return count;
}

// Of atomics on global memory lanes with one address go one after the other, and each pass counts its sectors: as Nsight
// Compute counts on an H200, where 32 lanes at one address are 32 sectors (docs/emulator/counters.md).
static int64_t atomic_sectors(const int64_t *addresses, uint32_t mask) {
  int64_t sectors = 0;
  while (mask) {
    uint32_t pass = 0;
    for (uint32_t left = mask; left; left &= left - 1) {
      int lane = __builtin_ctz(left), first = 1;
      for (uint32_t in = pass; in && first; in &= in - 1) first = addresses[__builtin_ctz(in)] != addresses[lane];
      pass |= (uint32_t)first << lane;
    }
    sectors += distinct_pieces(addresses, pass, SECTOR);
    mask &= ~pass;
  }
  return sectors;
}

// An access to another CTA's memory goes through the network between multiprocessors, whose cost is not documented.
static int of_own_cta(const Tables *t, const int64_t *addresses, uint32_t mask) {
  int other = 0;
  for (int lane = 0; lane < LANES; lane++) other |= addresses[lane] >> RANK_SHIFT != t->meter_rank && mask >> lane & 1;
  return !other;
}

void meter_access(
    const Tables *t, const int64_t *addresses, uint32_t mask, int64_t instruction, int32_t shared, int32_t how,
    int64_t nbytes) {
  int own = !shared || how == METER_ATOMIC || of_own_cta(t, addresses, mask);
  Meter *meter = meter_of(t, instruction, !own ? METER_CLUSTER : shared ? METER_SHARED : METER_GLOBAL);
  meter->requests++;
  meter->bytes += nbytes * __builtin_popcount(mask);
  meter->width = nbytes;
  if (!own) return;
  if (shared) {
    int64_t cost[3];
    if (how == METER_ATOMIC) atomic_cost(addresses, mask, cost);
    else shared_cost(addresses, mask, nbytes, how == METER_LOAD, cost);
    meter->wavefronts += cost[0];
    meter->conflicts += cost[1];
    meter->ideal += cost[2];
    for (uint32_t left = mask; left; left &= left - 1) meter_span(meter, addresses[__builtin_ctz(left)], nbytes);
  } else {
    int64_t sectors = distinct_pieces(addresses, mask, SECTOR);
    meter->sectors += how == METER_ATOMIC ? atomic_sectors(addresses, mask) : sectors;
    meter->moved += SECTOR * sectors;
    meter->lines += distinct_pieces(addresses, mask, LINE);
  }
}

// The eight rows of a matrix are served together.
void meter_matrices(const Tables *t, const int64_t *addresses, int32_t count, int64_t instruction) {
  int counted[METERS] = {0};
  for (int32_t i = 0; i < count; i++) {
    const int64_t *rows = addresses + MATRIX_ROWS * i;
    int64_t cost[3], all[LANES] = {0};
    memcpy(all, rows, MATRIX_ROWS * sizeof *rows);
    int own = of_own_cta(t, all, (1u << MATRIX_ROWS) - 1), which = own ? METER_SHARED : METER_CLUSTER;
    Meter *meter = meter_of(t, instruction, which);
    meter->requests += !counted[which]++;
    meter->bytes += MATRIX_ROWS * MATRIX_ROW;
    meter->width = MATRIX_ROW;
    if (!own) continue;
    for (int row = 0; row < MATRIX_ROWS; row++) meter_span(meter, rows[row], MATRIX_ROW);
    shared_cost(all, (1u << MATRIX_ROWS) - 1, MATRIX_ROW, 0, cost);
    meter->wavefronts += cost[0];
    meter->conflicts += cost[1];
    meter->ideal += cost[2];
  }
}

void meter_mma(
    const Tables *t, int64_t instruction, int64_t operand_bytes, int64_t tensor_read, int64_t tensor_written) {
  Meter *meter = meter_of(t, instruction, METER_UNIT);
  meter->requests++;
  meter->wavefronts += (operand_bytes + WAVEFRONT - 1) / WAVEFRONT;
  meter->tensor_read += tensor_read;
  meter->tensor_written += tensor_written;
}
