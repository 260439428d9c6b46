// What bytecode of warps logs for the race detector, in program order, and what the detector makes of it.
//
// Most entries are in order at once (shadow.c, lanes.c); all others, and strong accesses, are for conflicts.c.
#include <stddef.h>
#include <string.h>

#include "lanes.h"
#include "races.h"

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

// Without `ask` an access that is not in order at once, or is strong, is left: 0. Else 0: Python has raised.
static int observe(const Context *context, const LogEntry *entry, Ask *ask) {
  if (entry->kind & LOG_TENSOR_LOAD) return tensor_load_logged(context, entry);
  int together = (entry->kind & LOG_TOGETHER) != 0;
  uint32_t mask = together ? entry->mask & -entry->mask : entry->mask;
  GenericAccess generic;
  generic.write = (entry->kind & (LOG_SHARED_WRITE | LOG_GLOBAL_WRITE)) != 0;
  generic.strong = (entry->kind & LOG_STRONG) != 0;
  generic.of_global = (entry->kind & (LOG_GLOBAL_READ | LOG_GLOBAL_WRITE)) != 0;
  generic.nbytes = entry->argument & 255;
  generic.instruction = entry->instruction;
  generic.identity = 0;
  generic.lane = mask == entry->mask ? __builtin_ctz(mask) : -1;
  generic.each = !together;
  generic.mask = entry->mask;
  generic.count = take_lanes(mask, entry->addresses, generic.addresses, generic.lanes);
  if (!generic_whole(context, &generic, ask, entry)) return 0;
  Conflict conflict = {.entry = entry};
  return !generic.strong || !ask(RACE_STRONG, &conflict);
}

int64_t log_observe(const Context *context, const LogEntry *log, int64_t first, int64_t end, void *callback) {
  Ask *ask = NULL;
  memcpy(&ask, &callback, sizeof ask);
  for (; first < end; first++) {
    if (observe(context, &log[first], ask)) continue;
    if (!ask || log[first].kind & LOG_TENSOR_LOAD) break;
    return -1;
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
  entry->kept = 0;
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
