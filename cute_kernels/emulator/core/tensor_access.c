// tcgen05.ld and st: cells of tensor memory that the registers of a warp hold (PTX ISA, "tcgen05 data movement shapes").
// tmem.py words what is wrong.
#include <string.h>

#include "bytecode.h"
#include "meter.h"
#include "tensor_memory.h"

enum { HALF = 16, QUARTERS = 4 };
static const int64_t widths[] = {1, 2, 4, 8, 1};  // columns of a repetition of each shape

// What an access touches; how many rectangles.
static int rectangles(const TensorAccess *access, Rectangle found[2]) {
  int64_t lane = access->lane, column = access->column, columns = widths[access->shape] * access->repeat;
  int64_t lanes = access->shape == SHAPE_32X32B ? LANES : HALF;
  int64_t next = access->pack ? columns : access->split;
  found[0] = (Rectangle){lane, lanes, column, columns};
  found[1] = (Rectangle){lane, lanes, column + next, columns};
  return access->pack || access->shape == SHAPE_HALVES ? 2 : 1;
}

int cells_allowed(const TensorCells *memory, const Rectangle *part, int read) {
  if (part->lane < 0 || part->lane + part->lanes > TENSOR_LANES) return 0;
  if (part->column < 0 || part->column + part->columns > TENSOR_COLUMNS) return 0;
  if (memchr(memory->allocated + part->column, 0, (size_t)part->columns)) return 0;
  if (!read || !memchr(memory->full + part->column, 0, (size_t)part->columns)) return 1;
  for (int64_t column = part->column; column < part->column + part->columns; column++) {
    if (memory->full[column]) continue;
    if (memchr(memory->written + column * TENSOR_LANES + part->lane, 0, (size_t)part->lanes)) return 0;
  }
  return 1;
}

void cells_mark_written(const TensorCells *memory, const Rectangle *part) {
  if (!memchr(memory->full + part->column, 0, (size_t)part->columns)) return;
  for (int64_t column = part->column; column < part->column + part->columns; column++) {
    if (memory->full[column]) continue;
    memset(memory->written + column * TENSOR_LANES + part->lane, 1, (size_t)part->lanes);
    memory->full[column] = part->lanes == TENSOR_LANES;
  }
}

// The cell of register r of a thread, relative to the first one: as many columns and lanes further on.
static int64_t cell_of(const TensorAccess *access, int64_t r, int64_t thread) {
  int64_t column, lane = thread / 4;
  switch (access->shape) {
    case SHAPE_16X64B:
      column = 2 * r + thread / 2 % 2;
      lane += 8 * (thread % 2);
      break;
    case SHAPE_16X128B:
      column = 4 * (r / 2) + thread % 4;
      lane += 8 * (r % 2);
      break;
    case SHAPE_16X256B:
      column = 8 * (r / 4) + 2 * (thread % 4) + r % 2;
      lane += 8 * (r / 2 % 2);
      break;
    default:  // SHAPE_HALVES
      column = r + thread / HALF * access->split;
      lane = thread % HALF;
  }
  return column * TENSOR_LANES + lane;
}

static void move(uint32_t *cells, const TensorAccess *access, int64_t r) {
  uint32_t *row = (uint32_t *)(void *)access->registers[r];
  if (access->pack) {
    const uint32_t *pair = cells + 2 * r * TENSOR_LANES;
    for (int lane = 0; lane < LANES; lane++) row[lane] = (pair[lane] & 0xFFFF) | pair[TENSOR_LANES + lane] << 16;
  } else if (access->shape == SHAPE_32X32B) {
    uint32_t *column = cells + r * TENSOR_LANES;
    memcpy(access->write ? column : row, access->write ? row : column, LANES * sizeof *row);
  } else {
    for (int64_t thread = 0; thread < LANES; thread++) {
      uint32_t *cell = cells + cell_of(access, r, thread);
      if (access->write) *cell = row[thread];
      else row[thread] = *cell;
    }
  }
}

int32_t tensor_access(const TensorCells *memory, const TensorAccess *access, int32_t unwritten) {
  Rectangle parts[2];
  int count = rectangles(access, parts);
  for (int i = 0; i < count; i++)
    if (!cells_allowed(memory, &parts[i], !access->write && !unwritten)) return 0;
  for (int i = 0; i < count && access->write; i++) cells_mark_written(memory, &parts[i]);
  uint32_t *cells = memory->cells + access->column * TENSOR_LANES + access->lane;
  for (int64_t r = 0; r < access->count; r++) move(cells, access, r);
  return 1;
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

// What the race detector hears: the log has the most frequent kind.
static int watch(Tables *t, const TensorAccess *access, uint32_t active, int64_t index) {
  int64_t address = access->lane << 16 | access->column;
  int32_t columns = (int32_t)access->repeat, instruction = (int32_t)t->place;
  if (!access->write && access->shape == SHAPE_32X32B && !access->pack &&
      log_tensor_load(t, active, columns, instruction, address, index))
    return 1;
  return takes_logs(t) && !stops(t, TENSOR_ORDER, .tensor = {.record = WHERE(access), .index = index});
}

// At the address in the word a. The list b: instruction, shape, repetitions, columns between halves, number of the load,
// whether it packs pairs of 16 bits, and registers, ended by 0.
static const Instruction *run_access(const Instruction *i, uint8_t *s, Machine *m, int write) {
  enum { HEAD = 6 };
  const uint32_t *list = m->program->lists + i->b, *registers = list + HEAD;
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  Tables *t = m->tables;
  const TensorCells *memory = &t->tensor_cells[header->rank];
  int64_t address = AT(u32, i->a), first = header->index % QUARTERS * LANES;
  t->place = list[0];
  if (m->active != header->live) {
    stops(t, WRONG_LANES, .lanes.mask = m->active);
    return leave(m, ERROR);
  }
  TensorAccess access = {
      .write = write, .shape = list[1], .repeat = list[2], .split = (int32_t)list[3], .pack = list[5],
      .lane = address >> 16, .column = address & 0xFFFF,
  };
  if (!memory->own_lanes) access.lane = first + access.lane % LANES;
  for (; registers[access.count]; access.count++) access.registers[access.count] = s + registers[access.count];
  int own = access.lane == first || (access.lane == first + HALF && access.shape != SHAPE_32X32B);
  if (!own || !tensor_access(memory, &access, 0)) {
    if (stops(t, TENSOR_REFUSED, .tensor.record = WHERE(&access))) return leave(m, ERROR);
    tensor_access(memory, &access, 1);
  }
  t->progress += write;
  if (t->context && !watch(t, &access, m->active, list[4])) return leave(m, ERROR);
  if (t->meter) {
    Meter *meter = meter_of(t, t->place, METER_UNIT);
    meter->requests++;
    meter->bytes += access.count * LANES * (int64_t)sizeof(uint32_t);
  }
  return i + 1;
}
static const Instruction *run_tensor_load(const Instruction *i, uint8_t *s, Machine *m) {
  return run_access(i, s, m, 0);
}
static const Instruction *run_tensor_store(const Instruction *i, uint8_t *s, Machine *m) {
  return run_access(i, s, m, 1);
}

const Operation tensor_operations[] = {
    {"tensor_load", run_tensor_load, 0}, {"tensor_store", run_tensor_store, 0}, {0, 0, 0},
};
