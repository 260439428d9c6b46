// A warp's registers in kernels that touch accumulators of wgmmas in flight.
//
// In most kernels a wgmma reads and writes the registers that it names, when it completes. Where instructions other than
// wgmmas touch them before, it fills what then *holds* its results: a copy holds what the original holds, and a register
// that was overwritten holds nothing of it any more. Whoever reads a register in flight, which only kernels do that no
// detector looks at, finds PENDING.
//
// All registers that hold one result were filled by the same operations before and will be by the same ones after, so that
// an operation may take its old accumulator from any of them.
#include <stdlib.h>
#include <string.h>

#include "wgmma.h"

enum { REGISTER_BYTES = LANES * sizeof(u32) };

// --- of an operation -------------------------------------------------------------------------------------------------

void registers_hold(const Tables *t, const Warpgroup *group, int member, int64_t number) {
  const Wgmma *operation = &group->operations[number % group->room];
  int16_t *held = held_of(t, group, &group->warps[member], number);
  for (int64_t j = 0; j < t->wgmma_forms[operation->form].registers; j++)
    held[operation->parts[member].registers[j] / REGISTER_CELL] = (int16_t)(j + 1);
}

void registers_locate(const Tables *t, const Warpgroup *group, int member, int64_t number, uint32_t *offsets) {
  const Wgmma *operation = &group->operations[number % group->room];
  const int16_t *held = held_of(t, group, &group->warps[member], number);
  for (int64_t j = 0; j < t->wgmma_forms[operation->form].registers; j++) offsets[j] = (uint32_t)t->spare_register;
  for (int64_t cell = 0; cell < t->register_cells; cell++)
    if (held[cell]) offsets[held[cell] - 1] = (uint32_t)cell * REGISTER_CELL;
}

void registers_fill(const Tables *t, const Warpgroup *group, int member, int64_t number, const uint32_t *offsets) {
  uint8_t *state = group->operations[number % group->room].parts[member].state;
  int16_t *held = held_of(t, group, &group->warps[member], number);
  for (int64_t cell = 0; cell < t->register_cells; cell++) {
    if (!held[cell]) continue;
    uint32_t home = offsets[held[cell] - 1];
    if (home != cell * REGISTER_CELL) memcpy(state + cell * REGISTER_CELL, state + home, REGISTER_BYTES);
    held[cell] = 0;
  }
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// The operations of a warp that are in flight: from `first` up to `end`.
typedef struct Flight {
  const Tables *t;
  const Warpgroup *group;
  const WgmmaWarp *warp;
  int64_t first, end;
} Flight;

static Flight flight_of(const uint8_t *s, const Machine *m) {
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  const Warpgroup *group = warpgroup_of(m->tables, header);
  const WgmmaWarp *warp = &group->warps[header->index % WGMMA_WARPS];
  return (Flight){m->tables, group, warp, group->complete, warp->issued};
}

static int is_pending(const Flight *flight, uint32_t offset) {
  for (int64_t n = flight->first; n < flight->end; n++)
    if (held_of(flight->t, flight->group, flight->warp, n)[offset / REGISTER_CELL]) return 1;
  return 0;
}

// What instructions find in a register.
static void find(const Flight *flight, const uint8_t *s, uint32_t offset, u32 *found) {
  memcpy(found, s + offset, REGISTER_BYTES);
  for (int lane = 0; is_pending(flight, offset) && lane < LANES; lane++) found[lane] = PENDING;
}

// A register will be written, perhaps not in all lanes: what it waited for is lost.
static void overwrite(const Flight *flight, uint8_t *s, uint32_t offset) {
  u32 found[LANES];
  find(flight, s, offset, found);
  memcpy(s + offset, found, sizeof found);
  for (int64_t n = flight->first; n < flight->end; n++)
    held_of(flight->t, flight->group, flight->warp, n)[offset / REGISTER_CELL] = 0;
}

// Copies registers, all at once, with what they will be filled with.
static void move(const Flight *flight, uint8_t *s, const uint32_t *sources, const uint32_t *targets, uint32_t count) {
  u32 (*values)[LANES] = malloc(count * sizeof *values);
  int16_t *held = malloc(count * sizeof *held);
  for (uint32_t k = 0; k < count; k++) memcpy(values[k], s + sources[k], sizeof values[k]);
  for (uint32_t k = 0; k < count; k++) memcpy(s + targets[k], values[k], sizeof values[k]);
  for (int64_t n = flight->first; n < flight->end; n++) {
    int16_t *cells = held_of(flight->t, flight->group, flight->warp, n);
    for (uint32_t k = 0; k < count; k++) held[k] = cells[sources[k] / REGISTER_CELL];
    for (uint32_t k = 0; k < count; k++) cells[targets[k] / REGISTER_CELL] = held[k];
  }
  free(values);
  free(held);
}

// Copies what can be read to some lanes of registers, all at once.
static void move_lanes(
    const Flight *flight, uint8_t *s, const uint32_t *sources, const uint32_t *targets, uint32_t count, uint32_t mask) {
  u32 (*values)[LANES] = malloc(count * sizeof *values);
  for (uint32_t k = 0; k < count; k++) find(flight, s, sources[k], values[k]);
  for (uint32_t k = 0; k < count; k++) {
    u32 *target = (u32 *)(void *)(s + targets[k]);
    overwrite(flight, s, targets[k]);
    for (int lane = 0; lane < LANES; lane++) target[lane] = mask >> lane & 1 ? values[k][lane] : target[lane];
  }
  free(values);
}

// The list b: how many, sources, targets. FLAG: for a wgmma, which asks for the whole warp itself; else the program copies.
static const Instruction *run_registers_move(const Instruction *i, uint8_t *s, Machine *m) {
  const uint32_t *list = m->program->lists + i->b, count = list[0];
  const Flight flight = flight_of(s, m);
  m->tables->place = place_of(i);
  if (i->c & FLAG || m->active == ((const WarpHeader *)(const void *)s)->live) {
    move(&flight, s, list + 1, list + 1 + count, count);
    return i + 1;
  }
  if (stops(m->tables, WGMMA_COPIED, .lanes.mask = m->active)) return leave(m, ERROR);
  move_lanes(&flight, s, list + 1, list + 1 + count, count, m->active);
  return i + 1;
}

static const Instruction *run_registers_read(const Instruction *i, uint8_t *s, Machine *m) {  // of a, to d
  const Flight flight = flight_of(s, m);
  find(&flight, s, i->a, (u32 *)(void *)(s + i->d));
  return i + 1;
}

static const Instruction *run_registers_overwrite(const Instruction *i, uint8_t *s, Machine *m) {  // the list b, likewise
  const uint32_t *list = m->program->lists + i->b;
  const Flight flight = flight_of(s, m);
  for (uint32_t k = 0; k < list[0]; k++) overwrite(&flight, s, list[1 + k]);
  return i + 1;
}

const Operation register_operations[] = {
    {"registers_move", run_registers_move, 0}, {"registers_read", run_registers_read, 0},
    {"registers_overwrite", run_registers_overwrite, 0}, {0, 0, 0},
};
