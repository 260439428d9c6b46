// Loads and stores by the lanes of a warp, ldmatrix, stmatrix and movmatrix: checks, effects, what observers hear of.
//
// All lanes are checked before the first byte moves. Where a check fails, it is looked for what is wrong, which
// access_faults.py words.
#include "accesses.h"
#include "bytecode.h"
#include "meter.h"

#define FORM(name) \
  static const Instruction *run_##name(const Instruction *i, uint8_t *s, __attribute__((unused)) Machine *m)
#define HEADER ((const WarpHeader *)s)
#define DONE(done) return (done) ? i + 1 : leave(m, ERROR)

// What an instruction asks for: `count` elements of `size` bytes, by each lane of a mask or by all of them together.
typedef struct {
  int32_t instruction, space, size, count;
  int32_t strength;  // see STRENGTH_ACQUIRE; 0: it is weak
  int32_t write, together, own;  // own: at addresses of this CTA alone
  uint32_t mask;
} Request;

static int64_t bytes_of(const Request *r) { return (int64_t)r->size * r->count; }

// --- what is wrong ---------------------------------------------------------------------------------------------------

static int64_t operation_of(const Request *r, int32_t space) {
  return space | (r->write ? ACCESS_WRITE : 0) | (r->together ? ACCESS_TOGETHER : 0);
}

// Whether execution ends here.
static int refuse(Tables *t, const Request *r, int32_t what, int32_t space, int64_t address) {
  t->place = r->instruction;
  return stops(t, what, .access = {operation_of(r, space), address, bytes_of(r), r->mask});
}

// Whether some byte of an access to a CTA's memory is such that this is wrong.
static int touches(const Cta *cta, int64_t offset, int64_t nbytes, int32_t what) {
  for (int64_t at = offset; at < offset + nbytes; at++) {
    int32_t found = cta->states[at] == data_state ? -1 : ACCESS_UNINITIALISED;
    if (cta->states[at] == barrier_state) found = cta->slots[at >> 3] ? ACCESS_BARRIER : ACCESS_UNNAMED;
    if (found == what) return 1;
  }
  return 0;
}

int refused_by_cta(Tables *t, int64_t operation, int64_t nbytes, const int64_t *offsets, int64_t count, int64_t rank) {
  static const int32_t kinds[] = {ACCESS_UNNAMED, ACCESS_BARRIER, ACCESS_UNINITIALISED};
  const Cta *cta = &t->ctas[rank];
  int64_t base = rank << RANK_SHIFT, most = 0;
  for (int64_t i = 0; i < count; i++) most = offsets[i] > most ? offsets[i] : most;
  if (t->flags & STATES && cta->exited) return stops(t, ACCESS_EXITED, .access = {operation, base, nbytes});
  if (most + nbytes > cta->size) return stops(t, ACCESS_OUTSIDE, .access = {operation, base | most, nbytes});
  if (!(t->flags & STATES)) return 0;
  Repeat *repeat = &t->uninitialised[(uint64_t)t->place % REPEATS];
  int told = repeat->count && repeat->key == (uint64_t)t->place;
  for (int k = 0; k < 3 - (operation & ACCESS_WRITE || told ? 1 : 0); k++)
    for (int64_t i = 0; i < count; i++) {
      if (!touches(cta, offsets[i], nbytes, kinds[k])) continue;
      if (kinds[k] == ACCESS_UNINITIALISED) *repeat = (Repeat){(uint64_t)t->place, t->place >= 0};
      return stops(t, kinds[k], .access = {operation, base | offsets[i], nbytes});
    }
  return 0;
}

// Lanes that address one CTA.
static int refused_by_rank(Tables *t, const Request *r, const Lanes *lanes, int64_t rank) {
  int64_t offsets[LANES], count = 0;
  for (int i = 0; i < lanes->count; i++) {
    if (lanes->addresses[i] >> RANK_SHIFT != rank) continue;
    if (rank < 0 || rank >= t->ranks) return refuse(t, r, ACCESS_NO_CTA, SPACE_SHARED, lanes->addresses[i]);
    offsets[count++] = lanes->addresses[i] & OFFSET_MASK;
  }
  t->place = r->instruction;
  return refused_by_cta(t, operation_of(r, SPACE_SHARED), bytes_of(r), offsets, count, rank);
}

// Likewise of memory of a space; CTA after CTA, in order of their ranks.
static int refused_by_memory(Tables *t, const Request *r, const Lanes *lanes, int32_t space) {
  int64_t nbytes = bytes_of(r), last = INT64_MIN;
  for (int i = 0; i < lanes->count; i++)
    if (lanes->addresses[i] & (nbytes - 1)) return refuse(t, r, ACCESS_MISALIGNED, space, lanes->addresses[i]);
  for (int i = 0; i < lanes->count && space == SPACE_GLOBAL; i++) {
    uint64_t start = (uint64_t)lanes->addresses[i];
    if (!region_of(t, start, start + (uint64_t)nbytes, r->write))
      return refuse(t, r, ACCESS_UNREGISTERED, space, lanes->addresses[i]);
  }
  for (int more = space == SPACE_SHARED; more;) {
    int64_t rank = INT64_MAX;
    for (int i = 0; i < lanes->count; i++) {
      int64_t of_lane = lanes->addresses[i] >> RANK_SHIFT;
      if (of_lane > last && of_lane < rank) rank = of_lane;
    }
    more = rank != INT64_MAX;
    if (more && refused_by_rank(t, r, lanes, rank)) return 1;
    last = rank;
  }
  return 0;
}

static int32_t space_at(int64_t address) {
  uint64_t at = (uint64_t)address;
  if (at < SHARED_WINDOW) return SPACE_GLOBAL;
  return at < LOCAL_WINDOW ? SPACE_SHARED : at < PARAM_WINDOW ? SPACE_LOCAL : SPACE_PARAM;
}

// Generic addresses of lanes, counted from a window on, have to be of one space, but not of parameters.
static int refused_spaces(Tables *t, const Request *r, const int64_t addresses[LANES], int64_t window) {
  int32_t space = space_at(addresses[__builtin_ctz(r->mask)] + window), wrong = space == SPACE_PARAM;
  for (uint32_t left = r->mask; left; left &= left - 1)
    wrong |= space_at(addresses[__builtin_ctz(left)] + window) != space;
  return r->space == SPACE_GENERIC && wrong && refuse(t, r, ACCESS_MIXED, SPACE_GENERIC, 0);
}

// --- by each lane ----------------------------------------------------------------------------------------------------

// An access that observers hear of: where its addresses go. Null: execution ends.
static int64_t *log_of(Tables *t, const Request *r, int32_t kind, int64_t nbytes) {
  if (t->log_used == t->log_size && !log_flush(t)) {
    t->place = r->instruction;
    if (stops(t, TAKE_LOGS)) return NULL;
  }
  kind |= (r->strength ? LOG_STRONG : 0) | (r->together ? LOG_TOGETHER : 0);
  return log_entry(t, kind, r->mask, (int32_t)nbytes | r->strength, r->instruction);
}

// Whether the race detector hears of it: what nobody may write does not race, but strong reads of it order.
INLINE int is_logged(const Tables *t, const Request *r, int shared, int write, int writable) {
  int32_t kind = shared ? (write ? LOG_SHARED_WRITE : LOG_SHARED_READ) : (write ? LOG_GLOBAL_WRITE : LOG_GLOBAL_READ);
  return t->flags & kind && (writable || r->strength) ? kind : 0;
}

// Elements between registers and memory, those of a lane side by side there.
INLINE void move_elements(const Lanes *lanes, uint8_t *const *elements, int write, int64_t size, int64_t count) {
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < lanes->count; i++) {
      uint8_t *memory = lanes->data[i] + k * size, *element = elements[k] + lanes->lanes[i] * size;
      if (write) memcpy(memory, element, (size_t)size);
      else memcpy(element, memory, (size_t)size);
    }
}

// The store that was logged last leaves memory as it was: for reports of races.
static void keep_value(Tables *t, const uint8_t *memory, int64_t size) {
  LogEntry *entry = &t->log[t->log_used - 1];
  entry->kept = size;
  memcpy(entry->value, memory, (size_t)size);
}

static int stores_the_same(const Lanes *lanes, uint8_t *const *elements, int64_t size, int64_t count) {
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < lanes->count; i++)
      if (memcmp(lanes->data[i] + k * size, elements[k] + lanes->lanes[i] * size, (size_t)size)) return 0;
  return 1;
}

// 0: execution ends, as of every access below.
INLINE int32_t access(
    Tables *t, uint8_t *const *elements, const Request *r, int shared, int write, int64_t size, int64_t count,
    Lanes *lanes, const int64_t addresses[LANES]) {
  int64_t nbytes = size * count;
  int writable = 1;
  if (shared ? !find_shared(t, lanes, write, nbytes) : !find_global(t, lanes, write, nbytes, &writable)) {
    if (refused_spaces(t, r, addresses, shared ? (int64_t)SHARED_WINDOW : 0)) return 0;
    if (refused_by_memory(t, r, lanes, shared ? SPACE_SHARED : SPACE_GLOBAL)) return 0;
  }
  int32_t kind = is_logged(t, r, shared, write, writable);
  if (kind) {
    int64_t *logged = log_of(t, r, kind, nbytes);
    if (!logged) return 0;
    memcpy(logged, addresses, LANES * sizeof *addresses);
    if (write && stores_the_same(lanes, elements, size, count)) keep_value(t, lanes->data[0], size);
  }
  move_elements(lanes, elements, write, size, count);
  if (shared && write && t->flags & STATES) mark_data(lanes, nbytes);
  return 1;
}

// What every lane accesses lies behind what the lane before it does: one range is looked at and moved, in place of 32.
// -1: nothing is done, and lanes have to be looked at one by one.
INLINE int32_t access_range(
    Tables *t, uint8_t *const *elements, const Request *r, int shared, int write, int64_t size, int64_t count,
    const int64_t addresses[LANES]) {
  uint64_t start = (uint64_t)addresses[0];
  int64_t nbytes = size * count, all = LANES * nbytes;
  uint8_t *data, *states = NULL;
  int writable = 1;
  if (start & (uint64_t)(nbytes - 1)) return -1;
  if (shared) {
    int64_t offset = start & OFFSET_MASK;
    if (start >> RANK_SHIFT >= (uint64_t)t->ranks) return -1;
    const Cta *cta = &t->ctas[start >> RANK_SHIFT];
    if (offset + all > cta->size) return -1;
    data = cta->data + offset;
    if (t->flags & STATES) {
      states = cta->states + offset;
      int wrong = 0;
      for (int64_t byte = 0; byte < all; byte++)
        wrong |= write ? states[byte] == barrier_state : states[byte] != data_state;
      if (wrong) return -1;
    }
  } else {
    const Region *region = region_of(t, start, start + (uint64_t)all, write);
    if (!region) return -1;
    writable = region->writable != 0;
    data = (uint8_t *)(uintptr_t)start;
  }
  int32_t kind = is_logged(t, r, shared, write, writable);
  if (kind) {
    int64_t *logged = log_of(t, r, kind, nbytes);
    if (!logged) return 0;
    memcpy(logged, addresses, LANES * sizeof *addresses);
    if (write) {
      int same = 1;
      for (int64_t k = 0; k < count && same; k++)
        for (int lane = 0; lane < LANES && same; lane++)
          same = !memcmp(data + (lane * count + k) * size, elements[k] + lane * size, (size_t)size);
      if (same) keep_value(t, data, size);
    }
  }
  for (int64_t k = 0; k < count; k++)
    for (int lane = 0; lane < LANES; lane++) {
      uint8_t *memory = data + (lane * count + k) * size, *element = elements[k] + lane * size;
      if (write) memcpy(memory, element, (size_t)size);
      else memcpy(element, memory, (size_t)size);
    }
  if (states && write) memset(states, data_state, (size_t)all);
  return 1;
}

void warp_looks(Tables *t, const int64_t *addresses, uint32_t mask, int64_t nbytes) {
  t->polls++;
  if (!t->gives_way) return;
  if (t->progress != t->look_progress) {
    t->look_progress = t->progress;
    t->look_count = 0;
  }
  for (; mask; mask &= mask - 1)
    t->looks[t->look_count++ % LOOKS] = (Look){addresses[__builtin_ctz(mask)], nbytes};
  if (t->look_count > MOST_LOOKS && t->budget && *t->budget > 1) *t->budget = 1;
}

// Local memory is a thread's own: nobody looks for races, and no unit is asked that is counted. Addresses at and beyond
// `window`.
static int32_t local_access(
    Tables *t, const int64_t *addresses, uint8_t *const *elements, const Request *r, uint64_t window) {
  Lanes lanes;
  uint64_t nbytes = (uint64_t)bytes_of(r), held = (uint64_t)t->local_bytes;
  lanes.count = take_lanes(r->mask, addresses, lanes.addresses, lanes.lanes);
  for (int i = 0; i < lanes.count; i++) {
    uint64_t at = (uint64_t)lanes.addresses[i] - window;
    if (at & (nbytes - 1) || held < nbytes || at > held - nbytes) {
      if (refused_spaces(t, r, addresses, 0)) return 0;
      for (int k = 0; k < lanes.count; k++) lanes.addresses[k] -= (int64_t)window;
      refuse(t, r, ACCESS_OUTSIDE, SPACE_LOCAL, (int64_t)(uintptr_t)lanes.addresses);
      return 0;
    }
    lanes.data[i] = t->local + (uint64_t)lanes.lanes[i] * held + at;
  }
  move_elements(&lanes, elements, r->write, r->size, r->count);
  return 1;
}

// Whether execution ends at an address that an instruction of the form .shared::cta may not have (PTX ISA, "State Spaces").
static int refused_elsewhere(Tables *t, const Request *r, int64_t rank, const int64_t *addresses) {
  for (uint32_t left = r->together ? 1 : r->mask; left; left &= left - 1) {
    int64_t address = addresses[__builtin_ctz(left)] & UINT32_MAX;
    if (address >> RANK_SHIFT != rank && address >> RANK_SHIFT < t->ranks)
      return refuse(t, r, ACCESS_OTHER_CTA, SPACE_SHARED, address);
  }
  return 0;
}
static int looks_elsewhere(const Tables *t) { return t->ranks > 1 && t->flags & STATES; }

static int in_a_row(const int64_t addresses[LANES], int64_t nbytes) {
  int64_t wrong = 0;
  for (int lane = 0; lane < LANES; lane++) wrong |= addresses[lane] ^ (addresses[0] + lane * nbytes);
  return !wrong;
}

static int32_t by_lanes(Tables *t, const int64_t *addresses, uint8_t *const *elements, const Request *r) {
  int64_t moved[LANES];
  Lanes lanes;
  int write = r->write != 0, shared = r->space == SPACE_SHARED;
  uint64_t generic = r->space == SPACE_GENERIC ? (uint64_t)addresses[__builtin_ctz(r->mask)] : 0;
  t->progress += write;
  if (r->strength && !write) warp_looks(t, addresses, r->mask, bytes_of(r));
  // Windows above every host address; lanes that do not agree are found out of bounds.
  if (r->space == SPACE_LOCAL) return local_access(t, addresses, elements, r, 0);
  if (generic >= LOCAL_WINDOW) return local_access(t, addresses, elements, r, LOCAL_WINDOW);
  if (generic >= SHARED_WINDOW) {
    for (int lane = 0; lane < LANES; lane++) moved[lane] = addresses[lane] - (int64_t)SHARED_WINDOW;
    addresses = moved;
    shared = 1;
  }
  int32_t done = -1;
  if (r->mask == UINT32_MAX && in_a_row(addresses, bytes_of(r))) {
#define RANGE_OF_SIZE(bytes, n)                                                                                     \
  if (r->size == bytes && r->count == n)                                                                            \
    done = shared ? access_range(t, elements, r, 1, write, bytes, n, addresses)                                     \
                  : access_range(t, elements, r, 0, write, bytes, n, addresses);
    RANGE_OF_SIZE(4, 1) RANGE_OF_SIZE(4, 2) RANGE_OF_SIZE(4, 4) RANGE_OF_SIZE(8, 1) RANGE_OF_SIZE(8, 2)
    RANGE_OF_SIZE(2, 1)
#undef RANGE_OF_SIZE
  }
  if (done < 0) {
    lanes.count = take_lanes(r->mask, addresses, lanes.addresses, lanes.lanes);
#define OF_SIZE(bytes)                                                                                              \
  case bytes:                                                                                                       \
    done = shared ? access(t, elements, r, 1, write, bytes, r->count, &lanes, addresses)                            \
                  : access(t, elements, r, 0, write, bytes, r->count, &lanes, addresses);                           \
    break
    switch (r->size) {
      OF_SIZE(1);
      OF_SIZE(2);
      OF_SIZE(4);
      OF_SIZE(8);
    }
#undef OF_SIZE
  }
  int32_t how = write ? METER_STORE : METER_LOAD;
  if (done && t->meter) meter_access(t, addresses, r->mask, r->instruction, shared, how, bytes_of(r));
  return done;
}

// The list b: instruction, space, size, strength, and offsets of the elements, ended by 0.
enum { REQUEST = 4 };
static Request request_of(const Instruction *i, const Machine *m, int write, int together) {
  const uint32_t *list = m->program->lists + i->b;
  int own = list[1] == SPACE_OWN;
  return (Request){
      .instruction = (int32_t)list[0], .space = own ? SPACE_SHARED : (int32_t)list[1], .size = (int32_t)list[2],
      .strength = (int32_t)list[3], .write = write, .together = together, .own = own, .mask = m->active,
  };
}

static int transfer(const Instruction *i, uint8_t *s, Machine *m, const int64_t addresses[LANES], int write) {
  Request request = request_of(i, m, write, 0);
  uint8_t *elements[LANES];
  for (const uint32_t *offset = m->program->lists + i->b + REQUEST; *offset; offset++)
    elements[request.count++] = s + *offset;
  if (request.own && looks_elsewhere(m->tables) && refused_elsewhere(m->tables, &request, HEADER->rank, addresses))
    return 0;
  return by_lanes(m->tables, addresses, elements, &request);
}

// Addresses of shared and local memory have 32 bits: registers and sums are truncated to them (PTX ISA, "Addresses as
// Operands"). imm is added to the addresses a.
static u64 address_bits(const Instruction *i, const Machine *m) {
  u32 space = m->program->lists[i->b + 1];
  return space == SPACE_SHARED || space == SPACE_OWN || space == SPACE_LOCAL ? UINT32_MAX : UINT64_MAX;
}
#define ADDRESSES(type)                                                                                               \
  int64_t addresses[LANES] __attribute__((aligned(64)));                                                              \
  const u64 bits = address_bits(i, m);                                                                                \
  const type *a = ROW_OF(type, i->a);                                                                                 \
  EACH_LANE addresses[lane] = (int64_t)(((u64)a[lane] + (u64)i->imm) & bits)
FORM(load_at_u32) { ADDRESSES(u32); DONE(transfer(i, s, m, addresses, 0)); }
FORM(load_at_u64) { ADDRESSES(u64); DONE(transfer(i, s, m, addresses, 0)); }
FORM(store_at_u32) { ADDRESSES(u32); DONE(transfer(i, s, m, addresses, 1)); }
FORM(store_at_u64) { ADDRESSES(u64); DONE(transfer(i, s, m, addresses, 1)); }

// --- one load for all lanes ------------------------------------------------------------------------------------------

FORM(own_addresses) {  // a: those of an operand of another instruction
  Tables *t = m->tables;
  if (!looks_elsewhere(t)) return i + 1;
  int64_t addresses[LANES];
  for (int lane = 0; lane < LANES; lane++) addresses[lane] = i->c & ROWS_A ? ROW_OF(u32, i->a)[lane] : AT(u32, i->a);
  Request request = {.instruction = (int32_t)place_of(i), .mask = m->active};
  DONE(!refused_elsewhere(t, &request, HEADER->rank, addresses));
}

// Kernel parameters, at an address of their window or, in a register of 32 bits, without it; null: execution ends.
static const uint8_t *parameters_at(Tables *t, const Request *r, int64_t address) {
  int64_t start = (uint64_t)address < LOCAL_WINDOW ? address : address - (int64_t)PARAM_WINDOW;
  if (start >= 0 && start <= t->param_bytes - bytes_of(r)) return t->params + start;
  refuse(t, r, ACCESS_OUTSIDE, SPACE_PARAM, address);
  return NULL;
}

// Memory that they load; null likewise.
static const uint8_t *memory_at(Tables *t, const Request *r, int64_t at, int shared, int *writable) {
  int64_t nbytes = bytes_of(r), rank = at >> RANK_SHIFT, offset = at & OFFSET_MASK;
  const uint8_t *data = NULL;
  int found = 0;
  if (shared && rank < t->ranks && offset + nbytes <= t->ctas[rank].size) {
    data = t->ctas[rank].data + offset;
    found = 1;
    for (int64_t byte = 0; t->flags & STATES && byte < nbytes; byte++)
      found &= t->ctas[rank].states[offset + byte] == data_state;
  } else if (!shared) {
    const Region *region = region_of(t, (uint64_t)at, (uint64_t)(at + nbytes), 0);
    data = (const uint8_t *)(uintptr_t)at;
    found = region != NULL;
    *writable = region && region->writable;
  }
  Lanes one = {.count = 1, .addresses = {at}};
  return !found && refused_by_memory(t, r, &one, shared ? SPACE_SHARED : SPACE_GLOBAL) ? NULL : data;
}

static int load_together(Tables *t, const Request *r, int64_t address, const uint32_t *results, uint8_t *s) {
  int32_t space = r->space == SPACE_GENERIC ? space_at(address) : r->space;
  int64_t nbytes = bytes_of(r), at = address;
  int writable = 1;
  if (r->strength) warp_looks(t, &address, 1, nbytes);
  if (address & (nbytes - 1)) return !refuse(t, r, ACCESS_MISALIGNED, r->space, address);
  if (space == SPACE_LOCAL) return !refuse(t, r, ACCESS_LOCAL, space, address);
  if (space == SPACE_SHARED) at = (uint32_t)address;  // the window has zeros there
  const uint8_t *data = space == SPACE_PARAM ? parameters_at(t, r, address)
                                             : memory_at(t, r, at, space == SPACE_SHARED, &writable);
  if (!data) return 0;
  if (space != SPACE_PARAM) {
    int32_t kind = is_logged(t, r, space == SPACE_SHARED, 0, writable);
    int64_t *logged = kind ? log_of(t, r, kind, nbytes) : NULL;
    if (kind && !logged) return 0;
    if (kind) logged[__builtin_ctz(r->mask)] = at;
  }
  for (int32_t k = 0; k < r->count; k++) {
    u64 value = 0;
    memcpy(&value, data + k * r->size, (size_t)r->size);
    AT(u64, results[k]) = value;
  }
  if (t->meter && space != SPACE_PARAM) {
    int64_t addresses[LANES];
    for (int lane = 0; lane < LANES; lane++) addresses[lane] = at;
    meter_access(t, addresses, r->mask, r->instruction, space == SPACE_SHARED, METER_LOAD, nbytes);
  }
  return 1;
}

FORM(load_together) {  // from the address in the word a, to words; the list b as above
  const uint32_t *results = m->program->lists + i->b + REQUEST;
  Request request = request_of(i, m, 0, 1);
  while (results[request.count]) request.count++;
  if (request.own && looks_elsewhere(m->tables) &&
      refused_elsewhere(m->tables, &request, HEADER->rank, (const int64_t *)(const void *)(s + i->a)))
    return leave(m, ERROR);
  DONE(load_together(m->tables, &request, AT(s64, i->a), results, s));
}

// Parameters at imm, which there are: `a` elements of b bytes, to the words of the list c.
FORM(parameters) {
  for (uint32_t k = 0; k < i->a; k++) {
    u64 value = 0;
    memcpy(&value, m->tables->params + i->imm + k * i->b, i->b);
    AT(u64, m->program->lists[i->c + k]) = value;
  }
  return i + 1;
}

// --- matrices --------------------------------------------------------------------------------------------------------

// Row r of matrices of 16-bit elements, eight rows each, and its elements in the registers of all lanes: those of lane l
// are 2 (l % 4) and the next one of row l / 4, or, transposed, of column l / 4.
INLINE void move_row(uint8_t *memory, uint8_t *const *registers, int r, int transposed, int write) {
  uint8_t *held = registers[r / MATRIX_ROWS];
  r %= MATRIX_ROWS;
  if (!transposed) {
    if (write) memcpy(memory, held + MATRIX_ROW * r, MATRIX_ROW);
    else memcpy(held + MATRIX_ROW * r, memory, MATRIX_ROW);
    return;
  }
  for (int column = 0; column < MATRIX_ROWS; column++) {
    uint8_t *element = memory + 2 * column, *other = held + MATRIX_ROW * column + 2 * r;
    if (write) memcpy(element, other, 2);
    else memcpy(other, element, 2);
  }
}

// Row r of matrices of 8-bit elements. Loaded ones have 16 rows, in two registers: the bytes of register k of lane l are
// four rows from 4 (l % 4) on of column l / 4 + 8 k. Stored ones have 8 rows, in one: two rows from 2 (l % 4) on of
// column l / 4, and of the one 8 behind it. (CUTLASS, copy_sm100.hpp and copy_traits_sm100.hpp)
static void move_row_of_bytes(uint8_t *memory, uint8_t *const *registers, int r, int write) {
  for (int column = 0; column < MATRIX_ROW; column++) {
    int lane = column % 8, high = column / 8;
    if (write) {
      int row = r % MATRIX_ROWS;
      memory[column] = registers[r / MATRIX_ROWS][4 * (4 * lane + row / 2) + 2 * high + row % 2];
    } else {
      int row = r % (2 * MATRIX_ROWS);
      registers[r / (2 * MATRIX_ROWS) * 2 + high][4 * (4 * lane + row / 4) + row % 4] = memory[column];
    }
  }
}

// 16 elements side by side, the first one lowest, to bytes.
static void spread(const uint8_t *packed, int bits, uint8_t row[MATRIX_ROW]) {
  for (int k = 0; k < MATRIX_ROW; k++) {
    int at = k * bits, pair = packed[at / 8] | (at % 8 + bits > 8 ? packed[at / 8 + 1] << 8 : 0);
    row[k] = (uint8_t)(pair >> at % 8 & ((1 << bits) - 1));
  }
}

// Rows of packed elements: what lies behind these is nobody's, though addresses are multiples of a whole row.
static int find_rows(Tables *t, const Request *r, Lanes *lanes, int64_t nbytes) {
  if (nbytes == MATRIX_ROW)
    return find_shared(t, lanes, r->write, MATRIX_ROW) || !refused_by_memory(t, r, lanes, SPACE_SHARED);
  for (int i = 0; i < lanes->count; i++)
    if (lanes->addresses[i] % MATRIX_ROW) return !refuse(t, r, ACCESS_MISALIGNED, SPACE_SHARED, lanes->addresses[i]);
  for (int64_t at = 0, found = 1; at < nbytes; at += 4) {
    for (int i = 0; i < lanes->count; i++) lanes->addresses[i] += 4 * (at > 0);
    found = find_shared(t, lanes, 0, 4);
    if (at + 4 < nbytes && found) continue;
    for (int i = 0; i < lanes->count; i++) lanes->addresses[i] -= at, lanes->data[i] -= at;
    return found || !refused_by_memory(t, r, lanes, SPACE_SHARED);
  }
  return 1;
}

static int matrices(
    Tables *t, const Request *r, const int64_t addresses[LANES], uint8_t *const *registers, int32_t kind) {
  Lanes lanes;
  int bits = kind & MATRICES_OF_FOURS ? 4 : kind & MATRICES_OF_SIXES ? 6 : 8;
  lanes.count = take_lanes(r->mask, addresses, lanes.addresses, lanes.lanes);
  if (!find_rows(t, r, &lanes, r->size)) return 0;
  int32_t logs = is_logged(t, r, 1, r->write, 1);
  if (logs) {
    int64_t *logged = log_of(t, r, logs, r->size);
    if (!logged) return 0;
    memcpy(logged, addresses, LANES * sizeof *addresses);
  }
  t->progress += r->write;
  for (int i = 0; i < lanes.count; i++) {
    uint8_t wide[MATRIX_ROW], *row = lanes.data[i];
    if (bits < 8) spread(row, bits, wide), row = wide;
    if (kind & MATRICES_OF_BYTES) move_row_of_bytes(row, registers, i, r->write);
    else move_row(row, registers, i, kind == MATRICES_TRANSPOSED, r->write);
  }
  if (r->write && t->flags & STATES) mark_data(&lanes, MATRIX_ROW);
  if (t->meter) meter_matrices(t, addresses, lanes.count / MATRIX_ROWS, r->instruction);
  return 1;
}

// A part of the warp executes what all of its lanes have to.
static const Instruction *part_of_a_warp(Machine *m, int64_t instruction) {
  m->tables->place = instruction;
  stops(m->tables, WRONG_LANES, .lanes.mask = m->active);
  return leave(m, ERROR);
}

// ldmatrix and stmatrix at the addresses a, of shared memory (32 bits) or generic (64), by the whole warp. The list b:
// instruction, MATRICES.., and offsets of the registers, ended by 0.
static const Instruction *run_matrices(
    const Instruction *i, uint8_t *s, Machine *m, int64_t addresses[LANES], int generic, int write) {
  const uint32_t *list = m->program->lists + i->b;
  uint8_t *registers[LANES];
  int32_t count = 0;
  if (m->active != ((WarpHeader *)s)->live) return part_of_a_warp(m, list[0]);
  for (const uint32_t *offset = list + 2; *offset; offset++) registers[count++] = s + *offset;
  uint32_t mask = (uint32_t)((1ull << MATRIX_ROWS * count) - 1);
  int32_t kind = (int32_t)list[1], nbytes = kind & MATRICES_OF_FOURS ? 8 : kind & MATRICES_OF_SIXES ? 12 : MATRIX_ROW;
  Request request = {(int32_t)list[0], SPACE_SHARED, nbytes, 1, 0, write, 0, 0, mask};
  for (int lane = 0; lane < MATRIX_ROWS * count && generic; lane++) {
    if (space_at(addresses[lane]) != SPACE_SHARED)
      DONE(!refuse(m->tables, &request, ACCESS_NOT_SHARED, SPACE_GENERIC, addresses[lane]));
    addresses[lane] -= (int64_t)SHARED_WINDOW;
  }
  DONE(matrices(m->tables, &request, addresses, registers, kind));
}
#define ROWS_AT(type)                                                                                                 \
  int64_t addresses[LANES];                                                                                           \
  const type *a = ROW_OF(type, i->a);                                                                                 \
  EACH_LANE addresses[lane] = (int64_t)a[lane]
FORM(load_matrix_at_u32) { ROWS_AT(u32); return run_matrices(i, s, m, addresses, 0, 0); }
FORM(load_matrix_at_u64) { ROWS_AT(u64); return run_matrices(i, s, m, addresses, 1, 0); }
FORM(store_matrix_at_u32) { ROWS_AT(u32); return run_matrices(i, s, m, addresses, 0, 1); }
FORM(store_matrix_at_u64) { ROWS_AT(u64); return run_matrices(i, s, m, addresses, 1, 1); }

FORM(transpose) {  // movmatrix, of the registers a: a word if they are the same in all lanes
  u32 given[LANES], result[LANES];
  uint8_t *to = (uint8_t *)result;
  if (m->active != ((WarpHeader *)s)->live) return part_of_a_warp(m, place_of(i));
  for (int lane = 0; lane < LANES; lane++) given[lane] = i->c & ROWS_A ? ROW_OF(u32, i->a)[lane] : AT(u32, i->a);
  for (int r = 0; r < MATRIX_ROWS; r++) move_row((uint8_t *)given + MATRIX_ROW * r, &to, r, 1, 0);
  memcpy(s + i->d, result, sizeof result);
  return i + 1;
}

#define ENTRY(name) {#name, run_##name, 0}
const Operation memory_operations[] = {
    ENTRY(load_at_u32), ENTRY(load_at_u64), ENTRY(store_at_u32), ENTRY(store_at_u64), ENTRY(load_together),
    ENTRY(parameters), ENTRY(own_addresses), ENTRY(load_matrix_at_u32), ENTRY(load_matrix_at_u64), ENTRY(store_matrix_at_u32),
    ENTRY(store_matrix_at_u64), ENTRY(transpose), {0, 0, 0},
};
