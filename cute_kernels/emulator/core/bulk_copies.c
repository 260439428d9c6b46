// Bulk copies: cp.async.bulk and cp.reduce.async.bulk, of ranges of bytes and through tensor maps, between global memory and
// the shared memories of a cluster; multicast.
//
// What a copy asks for is checked when it is issued. A load or a send takes effect at once and counts its bytes on an
// mbarrier; a store first reads its source, then writes. boxes.c has where the bytes are, bulk.py words what is wrong.
#include <stdlib.h>
#include <string.h>

#include "accesses.h"
#include "bulk_copies.h"
#include "meter.h"

enum { SHARED_ALIGNMENT = 128, UNIT = 128, CTA_MASK = 65535, FOUR_ROWS = 4 };  // of a box; packed elements with padding
enum { WIDE_PIXELS = 128, MOST_HALO = 512, MOST_HALO_128 = 32, MOST_WIDE_OFFSET = 32 };  // of copies along W

static int breaks(Tables *t, const BulkCopy *copy, int rule) { return asks(t, BULK_REFUSED, copy, .bulk.rule = rule); }

// --- what is asked for -----------------------------------------------------------------------------------------------

// The rule that operands of a tensor copy break; -1: none.
static int broken_rule(const BulkCopy *copy) {
  static const int offset_bits[] = {16, 8, 5};  // by spatial dimensions
  const TensorMap *map = &copy->map;
  const int64_t *at = copy->coordinates;
  int store = copy->kind == BULK_STORE, negative = 0, spatial = (int)map->rank - 2;
  for (int d = 0; d < map->rank + (copy->mode == MODE_FOURS ? FOUR_ROWS - 1 : 0); d++) negative |= at[d] < 0;
  if (map->im2col != is_of_pixels(copy)) return RULE_MODE;
  if (map->rank != copy->rank) return RULE_RANK;
  if (copy->mode == MODE_FOURS && map->rows != FOUR_ROWS) return RULE_FOURS;
  if (is_wide(copy)) {
    int many = copy->halo >= (copy->mode == MODE_W ? MOST_HALO : MOST_HALO_128);
    if (many || copy->offsets[0] >= MOST_WIDE_OFFSET) return RULE_HALO;
    if (!map->mask) return RULE_SWIZZLE;
    if (at[1] >= map->lower[0] + map->sizes[0]) return RULE_BOX;  // left of the box is legal
    if (copy->mode == MODE_W_128 && copy->halo) return RULE_HALO_128;
    if (halo_is_unclear(copy)) return RULE_BEHIND;
  } else if (map->im2col) {
    if (store && negative) return RULE_NEGATIVE;
    for (int d = 0; store && d < spatial; d++)
      if (map->lower[d] < 0) return RULE_CORNER;
    for (int d = 0; d < spatial; d++)
      if (copy->offsets[d] >> offset_bits[spatial - 1]) return RULE_OFFSETS;
    for (int d = 0; d < spatial; d++)
      if (at[d + 1] < map->lower[d] || at[d + 1] >= map->lower[d] + map->sizes[d]) return RULE_BOX;
  }
  if (at[0] * map->bits % (8 * CHUNK)) return RULE_FIRST;
  if (map->group != CHUNK && at[0] % UNIT) return RULE_UNIT;
  if (store && negative) return RULE_NEGATIVE;
  if (copy->shared % SHARED_ALIGNMENT) return RULE_SHARED;
  if (store && !map->stores) return RULE_LOADS_ONLY;
  return copy->reduction && !(map->reductions >> copy->reduction & 1) ? RULE_REDUCTION : -1;
}

// Of the operands of a copy of a range.
static int broken_rule_of_range(const BulkCopy *copy) {
  int64_t source = copy->other, target = copy->shared;
  if (copy->kind == BULK_STORE) source = copy->shared, target = copy->other;
  if (source % CHUNK) return RULE_SOURCE;
  if (source < 0) return RULE_SOURCE_BEYOND;
  if (target % CHUNK) return RULE_TARGET;
  if (target < 0) return RULE_TARGET_BEYOND;
  return copy->nbytes % CHUNK ? RULE_SIZE : -1;
}

static void set_rows(TensorMap *map, int64_t rows) {
  map->box_bytes = map->box_bytes / map->rows * rows;
  map->shared_bytes = map->shared_bytes / map->rows * rows;
  map->rows = rows;
}

// Decodes the tensor map.
static int take_map(Tables *t, BulkCopy *copy) {
  const TensorMap *map = t->maps, *end = t->maps + MAPS;
  // A kernel may have rewritten it (tensormap.replace).
  while (map < end && (!map->host || map->key != copy->other || memcmp(map->host, map->content, sizeof map->content)))
    map++;
  if (map == end) {
    if (asks(t, BULK_MAP, copy)) return 1;
    map = &t->maps[t->fault.bulk.number];
  }
  copy->map = *map;
  if (copy->mode == MODE_FOURS) set_rows(&copy->map, FOUR_ROWS * map->rows);
  if (is_wide(copy)) set_rows(&copy->map, copy->mode == MODE_W ? map->rows + copy->halo : WIDE_PIXELS);
  copy->nbytes = copy->map.box_bytes;
  return 0;
}

static int has_no_cta(Tables *t, int64_t address) {
  int64_t rank = address >> RANK_SHIFT;
  return (rank < 0 || rank >= t->ranks) && stops(t, ACCESS_NO_CTA, .access = {SPACE_SHARED, address});
}

int leaves_cta(Tables *t, int64_t address, int64_t nbytes) {
  if (has_no_cta(t, address)) return 1;
  const Cta *cta = &t->ctas[address >> RANK_SHIFT];
  if (cta->exited && t->flags & STATES) return stops(t, ACCESS_EXITED, .access = {SPACE_SHARED, address, nbytes});
  return (address & OFFSET_MASK) + nbytes > cta->size &&
         stops(t, ACCESS_OUTSIDE, .access = {SPACE_SHARED, address, nbytes});
}

static int leaves_region(Tables *t, uint64_t start, uint64_t nbytes, int write) {
  for (int64_t i = 0; i < t->regions; i++) {
    const Region *region = &t->region_table[i];
    if ((region->writable || !write) && is_within(start, nbytes, region->start, region->end)) return 0;
  }
  int64_t operation = SPACE_GLOBAL | ACCESS_TOGETHER | (write ? ACCESS_WRITE : 0);
  return stops(t, ACCESS_UNREGISTERED, .access = {operation, (int64_t)start, (int64_t)nbytes});
}

enum { ADDRESS_BITS = 48 };
int leaves_global(Tables *t, const BulkCopy *copy, const Rows *rows, int write) {
  uint64_t row = (uint64_t)(rows->end - rows->first);
  if (!rows->count) return 0;
  int wraps = rows->span >> ADDRESS_BITS != 0;  // within the box: its rows may be near each other all the same
  if (copy->mode == MODE_TILED && !wraps) return leaves_region(t, rows->low, rows->span, write);
  for (int64_t i = 0; i < rows->count; i++)
    if (leaves_region(t, (uint64_t)rows->starts[i], row, write)) return 1;
  return 0;
}

// Pieces of shared memory hold data, or may be written.
static int refused_pieces(Tables *t, const Pieces *pieces, int64_t address, int write) {
  int64_t rank = address >> RANK_SHIFT, high = 0;
  if (!pieces->count) return 0;
  if (has_no_cta(t, address)) return 1;
  const Cta *cta = &t->ctas[rank];
  int wrong = cta->exited != 0;
  for (int64_t i = 0; i < pieces->count; i++) high = pieces->offsets[i] > high ? pieces->offsets[i] : high;
  wrong |= high + pieces->nbytes > cta->size;
  for (int64_t i = 0; i < pieces->count && t->flags & STATES && !wrong; i++) {
    const uint8_t *states = cta->states + pieces->offsets[i];
    for (int64_t k = 0; k < pieces->nbytes; k++) wrong |= write ? states[k] == barrier_state : states[k] != data_state;
  }
  int64_t operation = SPACE_SHARED | (write ? ACCESS_WRITE : 0) | (pieces->range ? ACCESS_TOGETHER : 0);
  return wrong && refused_by_cta(t, operation, pieces->nbytes, pieces->offsets, pieces->count, rank);
}

static void mark_pieces(const Tables *t, const BulkCopy *copy, const Pieces *pieces) {
  uint8_t *states = t->ctas[copy->shared >> RANK_SHIFT].states;
  int64_t group = copy->rank ? copy->map.group : CHUNK;
  if (!(t->flags & STATES)) return;
  for (int64_t i = 0; i < pieces->count; i++) memset(states + pieces->offsets[i], data_state, (size_t)pieces->nbytes);
  for (int64_t at = 0; group < CHUNK && at < pieces->nbytes; at += CHUNK)  // behind packed elements nothing is
    memset(states + pieces->offsets[0] + at + group, 0, (size_t)(CHUNK - group));
}

// --- effects ---------------------------------------------------------------------------------------------------------

static int combines(Tables *t, const BulkCopy *copy, uint8_t *cells, const uint8_t *more, int64_t nbytes) {
  return asks(t, BULK_COMBINE, copy, .bulk.nbytes = nbytes, .bulk.cells = WHERE(cells), .bulk.more = WHERE(more));
}

static int load(Tables *t, const BulkCopy *copy) {
  int64_t offset = copy->shared & OFFSET_MASK;
  Rows rows = rows_of(copy, 0);
  Pieces pieces = pieces_of(copy, offset, NULL);
  int wrong = leaves_global(t, copy, &rows, 0) || refused_pieces(t, &pieces, copy->shared, 1);
  if (!wrong) {
    mark_pieces(t, copy, &pieces);
    box_load(copy, &rows, t->ctas[copy->shared >> RANK_SHIFT].data, offset);
  }
  rows_free(&rows);
  free(pieces.offsets);
  return wrong;
}

static int send(Tables *t, const BulkCopy *copy) {
  int64_t place = copy->shared & OFFSET_MASK, origin = copy->other & OFFSET_MASK;
  const Pieces from = {1, copy->nbytes, 1, &origin}, to = {1, copy->nbytes, 1, &place};
  if (refused_pieces(t, &from, copy->other, 0) || refused_pieces(t, &to, copy->shared, !copy->reduction)) return 1;
  uint8_t *target = t->ctas[copy->shared >> RANK_SHIFT].data + place;
  const uint8_t *source = t->ctas[copy->other >> RANK_SHIFT].data + origin;
  if (copy->reduction) return combines(t, copy, target, source, copy->nbytes);
  mark_pieces(t, copy, &to);
  memmove(target, source, (size_t)copy->nbytes);
  return 0;
}

int32_t bulk_load_run(WorkQueues *all, BulkCopy *copy) {
  Tables *t = all->tables;
  if ((copy->kind == BULK_SEND ? send(t, copy) : load(t, copy)) || pass_on(t, copy)) return 1;
  return mbarrier_by(t, COMPLETE_TX, copy->signal, copy->nbytes, 0, copy->work.place, copy->work.warp) < 0;
}

int32_t bulk_read_run(WorkQueues *all, BulkCopy *copy) {
  Tables *t = all->tables;
  int64_t offset = copy->shared & OFFSET_MASK;
  Rows rows = rows_of(copy, 0);
  Pieces pieces = pieces_of(copy, offset, &rows);
  int wrong = refused_pieces(t, &pieces, copy->shared, 0);
  if (!wrong) box_read(copy, t->ctas[copy->shared >> RANK_SHIFT].data, offset, copy->box);
  rows_free(&rows);
  free(pieces.offsets);
  return wrong;
}

// What is to be written is combined with what is there, of rows that overlap (a stride may be 0) with what the one before
// has left: as many rows at a time as follow each other in memory.
static int reduce(Tables *t, const BulkCopy *copy, const Rows *rows) {
  int64_t row = rows->end - rows->first, count = rows->count, wrong = 0;
  uint8_t *old = malloc(2 * (size_t)(count * row) + 1), *more = old + count * row;
  for (int64_t i = 0, n; i < count && !wrong; i += n) {
    for (n = 0; i + n < count && (!n || rows->starts[i + n] >= rows->starts[i + n - 1] + row); n++) {
      memcpy(old + n * row, (const void *)(uintptr_t)rows->starts[i + n], (size_t)row);
      memcpy(more + n * row, copy->box + rows->numbers[i + n] * copy->map.row_bytes + rows->first, (size_t)row);
    }
    wrong = combines(t, copy, old, more, n * row);
    for (int64_t k = 0; k < n && !wrong; k++) memcpy((void *)(uintptr_t)rows->starts[i + k], old + k * row, (size_t)row);
  }
  free(old);
  return wrong != 0;
}

int32_t bulk_write_run(WorkQueues *all, BulkCopy *copy) {
  Tables *t = all->tables;
  Rows rows = rows_of(copy, 1);
  int wrong = leaves_global(t, copy, &rows, 1) || (copy->reduction && reduce(t, copy, &rows));
  if (!wrong && !copy->reduction) box_write(copy, &rows, copy->box);
  rows_free(&rows);
  free(copy->box);
  return wrong;
}

// --- issue -----------------------------------------------------------------------------------------------------------

static void meter(const Tables *t, const BulkCopy *copy, int64_t ctas) {
  if (!t->meter) return;
  Meter *meter = meter_of(t, copy->work.place, METER_UNIT);
  int64_t nbytes = copy->nbytes * ctas;
  meter->requests++;
  meter->bytes += nbytes;
  meter->wavefronts += (nbytes + WAVEFRONT - 1) / WAVEFRONT;
  if (copy->kind == BULK_SEND) return;
  meter_span(meter, copy->shared, copy->nbytes);
  Rows rows = rows_of(copy, copy->kind == BULK_STORE);
  meter->moved += SECTOR * rows_sectors(&rows);
  rows_free(&rows);
}

// With detectors the record ends with what is known to be over when the copy is.
static int issue_to_cta(Tables *t, BulkCopy *given, int64_t target, int64_t signal, int first) {
  int64_t width = t->context ? t->context->agent->width : 0, size = (int64_t)sizeof *given + width * (int64_t)sizeof(int32_t);
  if (!given->rank && target >> RANK_SHIFT != signal >> RANK_SHIFT) return breaks(t, given, RULE_SIGNAL);
  BulkCopy *copy = given;
  given->shared = target;
  given->signal = signal;
  given->width = width;
  if (width) {
    copy = malloc((size_t)size);
    *copy = *given;
  }
  int wrong = has_no_cta(t, target);
  t->loaded += copy->kind == BULK_LOAD ? copy->nbytes : 0;
  wrong = wrong || (t->context && races_to_cta(t, copy, first));
  if (!wrong && first && copy->rank && copy->map.changes) {
    wrong = asks(t, BULK_MAP_READ, copy);
    given->map_column = copy->map_column = t->fault.bulk.column;
    given->map_clock = copy->map_clock = t->fault.bulk.clock;
  }
  wrong = wrong || work_submit(t->work, &copy->work, size);
  if (width) free(copy);
  return wrong;
}

// To the CTAs of a mask. With .cta_group::2 the parity of the given mbarrier's CTA says which CTA of each pair is signalled.
static int issue_loads(Tables *t, BulkCopy *copy) {
  int64_t shared = copy->shared & OFFSET_MASK, barrier = copy->signal & OFFSET_MASK;
  int64_t rank = copy->shared >> RANK_SHIFT, signal = copy->signal >> RANK_SHIFT;
  if (copy->rank && (has_no_cta(t, copy->shared) || has_no_cta(t, copy->signal))) return 1;
  if (copy->mask < 0) {
    if (copy->rank && (rank ^ signal) > (copy->pair != 0)) return breaks(t, copy, RULE_SIGNAL);
    meter(t, copy, 1);
    return issue_to_cta(t, copy, copy->shared, copy->signal, 1);
  }
  uint64_t mask = (uint64_t)copy->mask;
  if (!mask || mask >> t->ranks) return breaks(t, copy, RULE_MASK);
  meter(t, copy, __builtin_popcountll(mask));
  for (int first = 1; mask; mask &= mask - 1, first = 0) {
    int64_t to = __builtin_ctzll(mask), of = copy->pair ? (to & ~(int64_t)1) | (signal & 1) : to;
    if (issue_to_cta(t, copy, to << RANK_SHIFT | shared, of << RANK_SHIFT | barrier, first)) return 1;
  }
  return 0;
}

static int issue_store(Tables *t, BulkCopy *copy) {
  BulkThread *thread = copy->thread;
  int64_t offset = copy->shared & OFFSET_MASK;
  copy->group = thread->committed + 1;
  if (has_no_cta(t, copy->shared)) return 1;
  if ((copy->rank || t->context) && leaves_cta(t, copy->shared, pieces_span(copy, offset))) return 1;
  if (t->context) {
    Rows inside = rows_of(copy, 0), written = rows_of(copy, 1);
    Pieces pieces = pieces_of(copy, offset, &inside);
    int wrong = races_of_store(t, copy, &pieces, &written);
    rows_free(&inside);
    rows_free(&written);
    free(pieces.offsets);
    if (wrong) return 1;
  }
  thread->stored = copy->group;
  thread->nbytes = copy->nbytes;
  thread->shared = copy->shared;
  thread->mapped = copy->rank != 0;
  thread->place = copy->work.place;
  t->stored += copy->nbytes;
  meter(t, copy, 1);
  copy->box = malloc((size_t)copy->nbytes + 1);
  copy->work.kind = WORK_BULK_READ;
  copy->work.queue = STORE_QUEUE - t->work->issued;
  if (work_submit(t->work, &copy->work, sizeof *copy)) {
    free(copy->box);
    return 1;
  }
  copy->work.kind = WORK_BULK_WRITE;
  return work_submit(t->work, &copy->work, sizeof *copy);
}

// Issues a copy; its record is used up.
static int issue(Tables *t, BulkCopy *copy) {
  copy->work.kind = WORK_BULK_LOAD;
  copy->map_column = -1;
  copy->identity = 0;
  if (copy->rank && take_map(t, copy)) return 1;
  int rule = copy->rank ? broken_rule(copy) : broken_rule_of_range(copy);
  if (rule >= 0) return breaks(t, copy, rule);
  if (copy->kind == BULK_STORE) return issue_store(t, copy);
  if (copy->kind == BULK_LOAD) return issue_loads(t, copy);
  if (copy->shared >> RANK_SHIFT == copy->signal >> RANK_SHIFT) meter(t, copy, 1);
  return issue_to_cta(t, copy, copy->shared, copy->signal, 1);
}

int32_t bulk_copy(Tables *t, const BulkCopy *given) {
  BulkCopy copy = *given;
  return issue(t, &copy);
}

// --- in bytecode -----------------------------------------------------------------------------------------------------

enum { FACTS = 6, ITEMS = 5 + RANKS + SPATIAL };

static void take_operands(BulkCopy *copy, const uint8_t *s, const uint32_t *list, int lane) {
  const uint32_t *item = list + FACTS;
  copy->lane = lane;
  copy->shared = listed(s, *item++, lane, 0);
  copy->other = listed(s, *item++, lane, 0);
  copy->signal = listed(s, *item++, lane, -1);
  copy->nbytes = listed(s, *item++, lane, 0);
  copy->mask = listed(s, *item, lane, -1);
  if (*item++) copy->mask &= CTA_MASK;
  for (int i = 0; i < RANKS; i++) copy->coordinates[i] = (int32_t)listed(s, *item++, lane, 0);
  for (int i = 0; i < SPATIAL; i++) copy->offsets[i] = listed(s, *item++, lane, 0) & 0xFFFF;
  if (!is_wide(copy)) return;
  copy->halo = copy->offsets[0];
  copy->offsets[0] = copy->offsets[1];
  copy->offsets[1] = 0;
}

// Of lanes that store the same bytes to the same place one does it for all: CuTe DSL lets whole warps execute stores, and
// the hardware's instruction is one per warp as well.
typedef struct Stored {
  int64_t shared, other, coordinates[RANKS];
} Stored;

static int as_before(const BulkCopy *copy, Stored done[], int *count) {
  Stored stored = {.shared = copy->shared, .other = copy->other};
  memcpy(stored.coordinates, copy->coordinates, sizeof stored.coordinates);
  for (int i = 0; i < *count; i++)
    if (!memcmp(&stored, &done[i], sizeof stored)) return 1;
  done[(*count)++] = stored;
  return 0;
}

// Whether operands of lanes differ.
static int varies(const uint32_t *list) {
  uint32_t found = 0;
  for (int i = 0; i < ITEMS; i++) found |= list[FACTS + i] & (LISTED - 1);
  return found != 0;
}

// The list b: kind, dimensions, mode, pair, reduction, type, and the operands of `take_operands`.
static const Instruction *run_bulk_copy(const Instruction *i, uint8_t *s, Machine *m) {
  Tables *t = m->tables;
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  const uint32_t *list = m->program->lists + i->b;
  t->place = place_of(i);
  t->progress++;
  if (!takes_logs(t)) return leave(m, ERROR);
  BulkCopy copy = {
      .work = {.place = t->place, .warp = header->number}, .kind = list[0], .rank = list[1], .mode = list[2],
      .pair = list[3], .reduction = list[4], .type = list[5],
  };
  int once = copy.kind == BULK_STORE && copy.rank && !copy.reduction, count = 0;
  Stored done[LANES];
  for (uint32_t left = once && !varies(list) ? m->active & -m->active : m->active; left; left &= left - 1) {
    int lane = __builtin_ctz(left);
    take_operands(&copy, s, list, lane);
    if (once && as_before(&copy, done, &count)) continue;
    if (copy.kind == BULK_STORE) {
      if (!(header->storing >> lane & 1) && stops(t, BULK_GROUPS, .bulk.lane = lane)) return leave(m, ERROR);
      copy.thread = bulk_thread(header, lane);
    }
    if (issue(t, &copy)) return leave(m, ERROR);
  }
  return i + 1;
}

const Operation bulk_operations[] = {{"bulk_copy", run_bulk_copy, 0}, {0, 0, 0}};
