// mma.sync: a warp multiplies what lies in its registers.
#include "bytecode.h"
#include "fragments.h"

int32_t warp_mma(const WarpMma *form, uint8_t *state, const uint32_t *registers) {
  _Alignas(64) uint8_t a[MMA_SYNC_ROWS * K_BYTES] = {0}, b[MMA_SYNC_COLUMNS * K_BYTES] = {0};
  _Alignas(64) uint32_t cells[MMA_SYNC_COLUMNS * MMA_SYNC_ROWS] = {0};
  int64_t places[MMA_SYNC_ROWS * CHUNKS];
  if (form->mma.fraction == UNKNOWN_SUMS) return 0;
  int64_t eights = form->rows / ROWS_OF_REGISTER, chunks = form->k_bytes / CHUNK;
  const uint32_t *of_b = registers + eights * chunks, *of_c = of_b + chunks;
  int halves = form->mma.d == SUM_F16;
  int64_t accumulators = eights * (halves ? 1 : 2);
#define VALUES(offset) ((const uint32_t *)(void *)(state + (offset)))
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    for (int64_t eight = 0; eight < eights; eight++) {
      uint8_t *first = a + eight * ROWS_OF_REGISTER * K_BYTES + CHUNK * chunk;
      take_chunks(VALUES(registers[eights * chunk + eight]), first);
    }
    take_chunks(VALUES(of_b[chunk]), b + CHUNK * chunk);
  }
#undef VALUES
  move_accumulators(state, of_c, accumulators, cells, MMA_SYNC_ROWS, halves, 0);
  for (int i = 0; i < MMA_SYNC_ROWS * CHUNKS; i++) places[i] = i;
  Mma mma = form->mma;
  mma.parts[0] = (MmaPart){{a, NULL, places}, {b, NULL, places}, cells};
  mma_execute(&mma);
  move_accumulators(state, of_c + accumulators, accumulators, cells, MMA_SYNC_ROWS, halves, 1);
  return 1;
}

// The list b: number of the form, registers of A, B, C and D.
static const Instruction *run_warp_mma(const Instruction *i, uint8_t *s, Machine *m) {
  const uint32_t *list = m->program->lists + i->b;
  int whole = m->active == ((const WarpHeader *)s)->live;
  if (whole && warp_mma(&m->tables->warp_mmas[list[0]], s, list + 1)) return i + 1;
  m->tables->place = place_of(i);
  stops(m->tables, whole ? UNKNOWN_MMA : WRONG_LANES, .lanes.mask = m->active);
  return leave(m, ERROR);
}

// Other instructions that a whole warp executes.
static const Instruction *run_whole_warp(const Instruction *i, uint8_t *s, Machine *m) {
  if (m->active == ((const WarpHeader *)s)->live) return i + 1;
  m->tables->place = place_of(i);
  stops(m->tables, WRONG_LANES, .lanes.mask = m->active);
  return leave(m, ERROR);
}

const Operation warp_mma_operations[] = {{"warp_mma", run_warp_mma, 0}, {"whole_warp", run_whole_warp, 0}, {0, 0, 0}};
