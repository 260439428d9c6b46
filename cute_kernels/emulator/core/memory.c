// Loads and stores by the lanes of a warp.
//
// What is legal is performed and nothing else: an access that any check stops, for whatever reason, is left to the
// Python function of the instruction, which decides again and words the error. All lanes are checked before the first
// byte moves.
#include "accesses.h"
#include "meter.h"

// Elements between registers and memory, those of a lane side by side there.
INLINE void move_elements(const Lanes *lanes, uint8_t *const *elements, int write, int64_t size, int64_t count) {
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < lanes->count; i++) {
      uint8_t *memory = lanes->data[i] + k * size, *element = elements[k] + lanes->lanes[i] * size;
      if (write) memcpy(memory, element, (size_t)size);
      else memcpy(element, memory, (size_t)size);
    }
}

INLINE int32_t access(
    Tables *t, uint8_t *const *elements, uint32_t mask, int32_t instruction, int shared, int write, int64_t size,
    int64_t count, Lanes *lanes, const int64_t addresses[LANES]) {
  int64_t nbytes = size * count;
  int writable = 1;
  if (shared ? !find_shared(t, lanes, write, nbytes) : !find_global(t, lanes, write, nbytes, &writable)) return 0;
  int32_t kind = shared ? (write ? LOG_SHARED_WRITE : LOG_SHARED_READ) : (write ? LOG_GLOBAL_WRITE : LOG_GLOBAL_READ);
  if (t->flags & kind && writable) {  // reads of memory that nobody may write do not race
    int64_t *logged = log_entry(t, kind, mask, (int32_t)nbytes, instruction);
    if (!logged) return 0;
    memcpy(logged, addresses, LANES * sizeof *addresses);
  }
  t->progress += write;
  move_elements(lanes, elements, write, size, count);
  if (shared && write && t->flags & STATES) mark_data(lanes, nbytes);
  return 1;
}

// What every lane accesses lies behind what the lane before it does: one range is looked at and moved, in place of 32.
// 0: nothing is done, for whatever reason.
INLINE int32_t access_range(
    Tables *t, uint8_t *const *elements, int32_t instruction, int shared, int write, int64_t size, int64_t count,
    const int64_t addresses[LANES]) {
  uint64_t start = (uint64_t)addresses[0];
  int64_t nbytes = size * count, all = LANES * nbytes;
  uint8_t *data, *states = NULL;
  int writable = 1;
  if (start & (uint64_t)(nbytes - 1)) return 0;
  if (shared) {
    int64_t offset = start & OFFSET_MASK;
    if (start >> RANK_SHIFT >= (uint64_t)t->ranks) return 0;
    const Cta *cta = &t->ctas[start >> RANK_SHIFT];
    if (offset + all > cta->size) return 0;
    data = cta->data + offset;
    if (t->flags & STATES) {
      states = cta->states + offset;
      int wrong = 0;
      for (int64_t byte = 0; byte < all; byte++)
        wrong |= write ? states[byte] == barrier_state : states[byte] != data_state;
      if (wrong) return 0;
    }
  } else {
    const Region *region = region_of(t, start, start + (uint64_t)all, write);
    if (!region) return 0;
    writable = region->writable != 0;
    data = (uint8_t *)(uintptr_t)start;
  }
  int32_t kind = shared ? (write ? LOG_SHARED_WRITE : LOG_SHARED_READ) : (write ? LOG_GLOBAL_WRITE : LOG_GLOBAL_READ);
  if (t->flags & kind && writable) {
    int64_t *logged = log_entry(t, kind, UINT32_MAX, (int32_t)nbytes, instruction);
    if (!logged) return 0;
    memcpy(logged, addresses, LANES * sizeof *addresses);
  }
  t->progress += write;
  for (int64_t k = 0; k < count; k++)
    for (int lane = 0; lane < LANES; lane++) {
      uint8_t *memory = data + (lane * count + k) * size, *element = elements[k] + lane * size;
      if (write) memcpy(memory, element, (size_t)size);
      else memcpy(element, memory, (size_t)size);
    }
  if (states && write) memset(states, data_state, (size_t)all);
  return 1;
}

// An access to another CTA's memory goes another way, and Python counts it.
static int of_own_cta(const Tables *t, const int64_t addresses[LANES], uint32_t mask) {
  int other = 0;
  for (int lane = 0; lane < LANES; lane++) other |= addresses[lane] >> RANK_SHIFT != t->meter_rank && mask >> lane & 1;
  return !other;
}

// Local memory is a thread's own: nobody looks for races, and no unit is asked that is counted. Addresses at and beyond
// `window`.
static int32_t local_access(
    Tables *t, const int64_t *addresses, uint8_t *const *elements, uint32_t mask, uint64_t window, int32_t write,
    int32_t size, int32_t count) {
  Lanes lanes;
  uint64_t nbytes = (uint64_t)size * (uint64_t)count, held = (uint64_t)t->local_bytes;
  lanes.count = take_lanes(mask, addresses, lanes.addresses, lanes.lanes);
  for (int i = 0; i < lanes.count; i++) {
    uint64_t at = (uint64_t)lanes.addresses[i] - window;
    if (at & (nbytes - 1) || held < nbytes || at > held - nbytes) return 0;
    lanes.data[i] = t->local + (uint64_t)lanes.lanes[i] * held + at;
  }
  t->progress += write;
  move_elements(&lanes, elements, write, size, count);
  return 1;
}

static int in_a_row(const int64_t addresses[LANES], int64_t nbytes) {
  int64_t wrong = 0;
  for (int lane = 0; lane < LANES; lane++) wrong |= addresses[lane] ^ (addresses[0] + lane * nbytes);
  return !wrong;
}

int32_t warp_access(
    Tables *t, const int64_t *addresses, uint8_t *const *elements, uint32_t mask, int32_t instruction, int32_t space,
    int32_t write, int32_t size, int32_t count) {
  int64_t moved[LANES];
  Lanes lanes;
  if (space == SPACE_NONE) return 0;
  if (!mask) return 1;
  int shared = space == SPACE_SHARED;
  uint64_t generic = space == SPACE_GENERIC ? (uint64_t)addresses[__builtin_ctz(mask)] : 0;
  // Windows above every host address; lanes that do not agree are found out of bounds.
  if (space == SPACE_LOCAL) return local_access(t, addresses, elements, mask, 0, write, size, count);
  if (generic >= LOCAL_WINDOW) return local_access(t, addresses, elements, mask, LOCAL_WINDOW, write, size, count);
  if (generic >= SHARED_WINDOW) {
    for (int lane = 0; lane < LANES; lane++) moved[lane] = addresses[lane] - (int64_t)SHARED_WINDOW;
    addresses = moved;
    shared = 1;
  }
  if (shared && t->meter && !of_own_cta(t, addresses, mask)) return 0;
  int row = mask == UINT32_MAX && in_a_row(addresses, (int64_t)size * count);
#define RANGE_OF_SIZE(bytes, n)                                                                                     \
  if (row && size == bytes && count == n) {                                                                         \
    int32_t done = shared ? access_range(t, elements, instruction, 1, write != 0, bytes, n, addresses)               \
                          : access_range(t, elements, instruction, 0, write != 0, bytes, n, addresses);              \
    if (done) {                                                                                                     \
      if (t->meter) meter_access(t, addresses, mask, instruction, shared, write, bytes * n);                        \
      return 1;                                                                                                     \
    }                                                                                                               \
  }
  RANGE_OF_SIZE(4, 1) RANGE_OF_SIZE(4, 2) RANGE_OF_SIZE(4, 4) RANGE_OF_SIZE(8, 1) RANGE_OF_SIZE(8, 2)
  RANGE_OF_SIZE(2, 1)
#undef RANGE_OF_SIZE
  lanes.count = take_lanes(mask, addresses, lanes.addresses, lanes.lanes);
  int32_t done = 0;
#define OF_SIZE(bytes)                                                                                              \
  case bytes:                                                                                                       \
    done = shared ? access(t, elements, mask, instruction, 1, write != 0, bytes, count, &lanes, addresses)           \
                  : access(t, elements, mask, instruction, 0, write != 0, bytes, count, &lanes, addresses);          \
    break
  switch (size) {
    OF_SIZE(1);
    OF_SIZE(2);
    OF_SIZE(4);
    OF_SIZE(8);
    default: return 0;
  }
#undef OF_SIZE
  if (done && t->meter) meter_access(t, addresses, mask, instruction, shared, write, (int64_t)size * count);
  return done;
}

int32_t warp_load_together(
    Tables *t, int64_t address, uint64_t *const *elements, uint32_t mask, int32_t instruction, int32_t space,
    int32_t size, int32_t count) {
  int64_t nbytes = (int64_t)size * count, at = address;
  if (!mask || space == SPACE_NONE || address & (nbytes - 1)) return 0;
  int shared = space == SPACE_SHARED;
  if (space == SPACE_GENERIC && (uint64_t)address >= SHARED_WINDOW) {
    at -= (int64_t)SHARED_WINDOW;
    shared = 1;
  }
  const uint8_t *data;
  int writable = 1;
  if (shared) {
    int64_t rank = at >> RANK_SHIFT, offset = at & OFFSET_MASK;
    if (rank < 0 || rank >= t->ranks || offset + nbytes > t->ctas[rank].size) return 0;
    if (t->meter && rank != t->meter_rank) return 0;
    data = t->ctas[rank].data + offset;
    if (t->flags & STATES)
      for (int64_t byte = 0; byte < nbytes; byte++)
        if (t->ctas[rank].states[offset + byte] != data_state) return 0;
  } else {
    const Region *region = region_of(t, (uint64_t)at, (uint64_t)(at + nbytes), 0);
    if (!region) return 0;
    writable = region->writable != 0;
    data = (const uint8_t *)(uintptr_t)at;
  }
  int32_t kind = shared ? LOG_SHARED_READ : LOG_GLOBAL_READ;
  if (t->flags & kind && writable) {
    int64_t *logged = log_entry(t, kind | LOG_TOGETHER, mask, (int32_t)nbytes, instruction);
    if (!logged) return 0;
    logged[__builtin_ctz(mask)] = at;
  }
  for (int32_t k = 0; k < count; k++) {
    *elements[k] = 0;
    memcpy(elements[k], data + k * size, (size_t)size);
  }
  if (t->meter) {
    int64_t addresses[LANES];
    for (int lane = 0; lane < LANES; lane++) addresses[lane] = at;
    meter_access(t, addresses, mask, instruction, shared, 0, nbytes);
  }
  return 1;
}

// Row r of a matrix in memory, and its elements in a register of all lanes: those of lane l are 2 (l % 4) and the next
// one of row l / 4, or, transposed, of column l / 4.
INLINE void move_row(uint8_t *memory, uint8_t *registers, int r, int transposed, int write) {
  if (!transposed) {
    if (write) memcpy(memory, registers + MATRIX_ROW * r, MATRIX_ROW);
    else memcpy(registers + MATRIX_ROW * r, memory, MATRIX_ROW);
    return;
  }
  for (int column = 0; column < MATRIX_ROWS; column++) {
    uint8_t *element = memory + 2 * column, *held = registers + MATRIX_ROW * column + 2 * r;
    if (write) memcpy(element, held, 2);
    else memcpy(held, element, 2);
  }
}

int32_t warp_matrices(
    Tables *t, const int64_t *addresses, uint8_t *const *registers, int32_t count, int32_t transposed, int32_t write,
    int32_t instruction) {
  Lanes lanes;
  uint32_t mask = (uint32_t)((1ull << MATRIX_ROWS * count) - 1);
  if (t->meter && !of_own_cta(t, addresses, mask)) return 0;
  lanes.count = take_lanes(mask, addresses, lanes.addresses, lanes.lanes);
  if (!find_shared(t, &lanes, write != 0, MATRIX_ROW)) return 0;
  int32_t kind = write ? LOG_SHARED_WRITE : LOG_SHARED_READ;
  if (t->flags & kind) {
    int64_t *logged = log_entry(t, kind, mask, MATRIX_ROW, instruction);
    if (!logged) return 0;
    memcpy(logged, addresses, LANES * sizeof *addresses);
  }
  t->progress += write;
  for (int i = 0; i < lanes.count; i++)
    move_row(lanes.data[i], registers[i / MATRIX_ROWS], i % MATRIX_ROWS, transposed, write);
  if (write && t->flags & STATES) mark_data(&lanes, MATRIX_ROW);
  if (t->meter) meter_matrices(t, addresses, count, instruction);
  return 1;
}
