// What bytecode of warps logs for the race detector, in program order, and what the detector makes of it.
//
// Most entries are in order at once (shadow.c, lanes.c); all others, and strong accesses, are for conflicts.c.
#include <stddef.h>
#include <string.h>

#include "lanes.h"
#include "races.h"

// A load or store by lanes that is in order at once. Lanes that all store to one place are the warp's own affair.
// What they load together is the warp's, not a lane's, unless one lane is all that executes.
static int generic_access(const Context *context, const LogEntry *entry, int write, int global, int together) {
  Agent *agent = context->agent;
  Epochs *epochs = context->epochs;
  int64_t offsets[LANES], lanes[LANES], places[LANES], low = INT64_MAX, high = 0, differ = 0, elsewhere = 0;
  if (!has_room(epochs, 1)) return 0;
  uint32_t mask = together ? entry->mask & -entry->mask : entry->mask;
  int64_t count = take_lanes(mask, entry->addresses, offsets, lanes), own = agent->rank << RANK_SHIFT;
  for (int64_t i = 0; i < count; i++) {
    low = offsets[i] < low ? offsets[i] : low;
    high = offsets[i] > high ? offsets[i] : high;
    differ |= offsets[i] ^ offsets[0];
    elsewhere |= (offsets[i] ^ own) & ~(int64_t)OFFSET_MASK;
  }
  if ((!global && elsewhere) || (write && count > 1 && !differ)) return 0;
  int by_lanes = !write && (entry->mask & (entry->mask - 1));
  int64_t read_column = agent->base + (by_lanes ? COLUMN_LOADS : COLUMN_READ);
  Access access = {
      .write = write, .shadow = context->shadow, .grain = GRANULE, .offsets = offsets, .rows = count,
      .count = entry->argument, .known = agent_row(agent, ROW_VISIBLE), .width = agent->width, .own = agent->base,
      .lanes = together && mask != entry->mask ? NULL : lanes, .lane = -1, .exempt = agent->base + COLUMN_READ, .epochs = epochs, .add_lanes = write,
      .read_column = read_column,
  };
  if (global) {
    const LaunchRegion *region = context->launch->regions, *end = region + context->launch->count;
    while (region < end && !(low >= region->start && high + access.count <= region->end)) region++;
    if (region == end) return 0;
    if (!region->writable) return 1;  // nobody may write there
    if (!region->tracked) return 0;
    access.shadow = region->tracked;
    access.origin = region->origin;
    access.cluster = context->cluster;
    const uint8_t *non_coherent = context->launch->non_coherent;
    if (!write && non_coherent && non_coherent[entry->instruction]) access.unwritten = context->launch->first;
  } else {
    access.read_known = access.known;
    access.origin = own;
  }
  Plane *plane = mask == UINT32_MAX ? lanes_check(&access, places) : NULL;
  if (!plane && !access_check(&access)) return 0;
  if (by_lanes) agent_load_together(agent, entry->mask);
  int64_t *identity = write ? &agent->write_identity : by_lanes ? &agent->loads_identity : &agent->read_identity;
  if (!*identity) {
    int64_t column = write ? agent->base : read_column;
    *identity = new_epoch(epochs, column, agent->clock, agent->text + write, GENERIC, entry->instruction);
  }
  if (plane) {
    lanes_record(&access, plane, places, (int32_t)*identity);
  } else {
    access.identity = *identity;
    access_record(&access);
  }
  return 1;
}

// tcgen05.ld of columns of the warp's lanes of tensor memory.
static int tensor_load_logged(const Context *context, const LogEntry *entry) {
  enum { GROUPS = TENSOR_LANES / LANE_GROUP };
  Agent *agent = context->agent;
  Epochs *epochs = context->epochs;
  int64_t address = entry->addresses[0], index = entry->addresses[1];
  if (!has_room(epochs, 1) || index >= agent->load_count) return 0;
  int64_t column = agent->base + COLUMN_TENSOR_LOAD;
  const int32_t *known = agent_row(agent, ROW_TENSOR);
  Access access = {
      .shadow = context->tensor, .grain = 1, .rows = entry->argument,
      .base = (address & 0xFFFF) * GROUPS + (address >> 16) / LANE_GROUP, .stride = GROUPS, .count = 32 / LANE_GROUP,
      .known = known, .width = agent->width, .own = -1, .lane = -1, .exempt = -1, .epochs = epochs,
      .read_known = known, .read_column = column,
  };
  if (!access_check(&access)) return 0;
  int64_t clock = ++agent->load_clock;
  access.identity = new_epoch(epochs, column, clock, agent->text + 2, 0, entry->instruction);
  agent->load_identity = access.identity;
  agent->store_identity = 0;
  agent->loads[index] = (int32_t)clock;
  access_record(&access);
  return 1;
}

static int observe_one(const Context *context, const LogEntry *entry) {
  int together = (entry->kind & LOG_TOGETHER) != 0;
  switch (entry->kind & ~LOG_TOGETHER) {
    case LOG_SHARED_READ: return generic_access(context, entry, 0, 0, together);
    case LOG_SHARED_WRITE: return generic_access(context, entry, 1, 0, together);
    case LOG_GLOBAL_READ: return generic_access(context, entry, 0, 1, together);
    case LOG_GLOBAL_WRITE: return generic_access(context, entry, 1, 1, together);
    case LOG_TENSOR_LOAD: return tensor_load_logged(context, entry);
    default: return 0;
  }
}

// What is not in order at once, or strong.
static int observe_whole(const Context *context, const LogEntry *entry, Ask *ask) {
  int32_t kind = entry->kind & ~(LOG_TOGETHER | LOG_STRONG);
  int together = (entry->kind & LOG_TOGETHER) != 0;
  uint32_t mask = together ? entry->mask & -entry->mask : entry->mask;
  GenericAccess generic = {
      .write = kind == LOG_SHARED_WRITE || kind == LOG_GLOBAL_WRITE, .strong = (entry->kind & LOG_STRONG) != 0,
      .of_global = kind == LOG_GLOBAL_READ || kind == LOG_GLOBAL_WRITE, .nbytes = entry->argument & 255,
      .instruction = entry->instruction, .lane = mask == entry->mask ? __builtin_ctz(mask) : -1, .each = !together,
      .mask = entry->mask,
  };
  generic.count = take_lanes(mask, entry->addresses, generic.addresses, generic.lanes);
  if (!generic_whole(context, &generic, ask, entry)) return 0;
  Conflict conflict = {.entry = entry};
  return !generic.strong || !ask(RACE_STRONG, &conflict);
}

int64_t log_observe(const Context *context, const LogEntry *log, int64_t first, int64_t end, void *callback) {
  Ask *ask = NULL;
  memcpy(&ask, &callback, sizeof ask);
  for (; first < end; first++) {
    if (observe_one(context, &log[first])) continue;
    if (!ask || log[first].kind & LOG_TENSOR_LOAD) break;
    if (!observe_whole(context, &log[first], ask)) return -1;
  }
  return first;
}

int log_flush(Tables *t) {
  if (!t->context) return 0;
  t->log_done = log_observe(t->context, t->log, t->log_done, t->log_used, NULL);
  if (t->log_done != t->log_used) return 0;
  t->log_done = t->log_used = 0;
  return 1;
}

int64_t *log_entry(Tables *t, int32_t kind, uint32_t mask, int32_t argument, int32_t instruction) {
  if (t->log_used == t->log_size && !log_flush(t)) return NULL;
  LogEntry *entry = &t->log[t->log_used++];
  entry->kind = kind;
  entry->mask = mask;
  entry->argument = argument;
  entry->instruction = instruction;
  entry->steps = t->steps ? *t->steps : 0;
  return entry->addresses;
}

int32_t log_tensor_load(
    Tables *t, uint32_t mask, int32_t columns, int32_t instruction, int64_t address, int64_t index) {
  if (!(t->flags & LOG_TENSOR_LOAD)) return 0;
  int64_t *values = log_entry(t, LOG_TENSOR_LOAD, mask, columns, instruction);
  if (!values) return 0;
  values[0] = address;
  values[1] = index;
  return 1;
}
