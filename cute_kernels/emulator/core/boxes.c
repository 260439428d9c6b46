// Boxes of tensors, tiled and in im2col mode, and plain ranges of bytes: which bytes a bulk copy reads or writes.
//
// What the PTX ISA leaves open follows an H200 (tests/emulator/data): TF32 tensors are rounded on the way to shared memory,
// F32_FTZ tensors are not flushed, the NaN fill is 0x7FF7 in every 16 bits, a store clips its rows at whole chunks (so that
// an extent that is no multiple of 16 bytes does not protect what follows it), and the rows of a swizzled box lie one span
// apart even when they are shorter. Positions of an im2col box are as CUTLASS computes the coordinates of convolutions: a
// first position plus a whole number of element strides, the upper corner included. Along W alone the box has one position
// in H and D, that of the coordinates.
#include "boxes.h"

#include <stdlib.h>
#include <string.h>

#include "meter.h"

enum { WIDEST_ROW = 128, AHEAD = 8 };  // bytes; rows

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
// Divided, rounded up; 0 below.
static int64_t parts(int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : 0; }
static int64_t bytes_of(const TensorMap *map, int64_t elements) { return elements * map->bits / 8; }
// Addresses are sums modulo 2^64: strides of ragged tensors cancel so.
static uint64_t scaled(int64_t count, int64_t stride) { return (uint64_t)count * (uint64_t)stride; }

// --- global memory ---------------------------------------------------------------------------------------------------

static void tile_rows(const TensorMap *map, const int64_t *at, Rows *rows) {
  int64_t from[RANKS] = {0}, count[RANKS] = {1, 1, 1, 1, 1}, n = 0;
  uint64_t pitch[RANKS] = {0}, start = rows->low, span = (uint64_t)(rows->end - rows->first);
  for (int d = 1; d < map->rank; d++) {
    int64_t step = map->steps[d];
    from[d] = parts(-at[d], step);
    count[d] = least(map->tile[d], parts(map->extents[d] - at[d], step)) - from[d];
    if (count[d] <= 0) return;
    pitch[d] = (uint64_t)(step * map->strides[d]);
    start += scaled(at[d] + from[d] * step, map->strides[d]);
    span += scaled(count[d] - 1, (int64_t)pitch[d]);
  }
  const int64_t *tile = map->tile;
  for (int64_t i4 = 0; i4 < count[4]; i4++)
    for (int64_t i3 = 0; i3 < count[3]; i3++)
      for (int64_t i2 = 0; i2 < count[2]; i2++) {
        uint64_t row = start + (uint64_t)i4 * pitch[4] + (uint64_t)i3 * pitch[3] + (uint64_t)i2 * pitch[2];
        int64_t number = ((from[4] + i4) * tile[3] + from[3] + i3) * tile[2] + from[2] + i2;
        for (int64_t i1 = 0; i1 < count[1]; i1++, row += pitch[1]) {
          rows->starts[n] = (int64_t)row;
          rows->numbers[n++] = number * tile[1] + from[1] + i1;
        }
      }
  rows->count = n;
  rows->low = start;
  rows->span = span;
}

// Whether a pixel is inside of the tensor; its address is added.
static int place_of_pixel(const BulkCopy *copy, const int64_t *at, uint64_t *address) {
  const TensorMap *map = &copy->map;
  for (int64_t d = 1; d < map->rank; d++) {
    int64_t place = at[d] + (d < map->rank - 1 ? copy->offsets[d - 1] : 0);
    if (place < 0 || place >= map->extents[d]) return 0;
    *address += scaled(place, map->strides[d]);
  }
  return 1;
}

// To the next one: along W, H and D, or W alone, then of the next image.
static void step(const BulkCopy *copy, int64_t *at) {
  const TensorMap *map = &copy->map;
  int64_t spatial = map->rank - 2;
  for (int64_t d = 1; d <= spatial; d = is_wide(copy) ? spatial + 1 : d + 1) {
    at[d] += map->steps[d];
    if (at[d] < map->lower[d - 1] + map->sizes[d - 1]) return;
    at[d] = map->lower[d - 1];
  }
  at[spatial + 1] += map->steps[spatial + 1];
}

int halo_is_unclear(const BulkCopy *copy) {
  int64_t behind[RANKS], same[RANKS];
  uint64_t address = 0;
  memcpy(behind, copy->coordinates, sizeof behind);
  for (int64_t n = 1; n < copy->map.rows - copy->halo; n++) step(copy, behind);
  memcpy(same, behind, sizeof same);
  for (int64_t i = 0; i < copy->halo; i++) {
    step(copy, behind);
    same[1] += copy->map.steps[1];
    if (!memcmp(same, behind, sizeof same)) continue;
    if (place_of_pixel(copy, same, &address) || place_of_pixel(copy, behind, &address)) return 1;
  }
  return 0;
}

static void pixel_rows(const BulkCopy *copy, Rows *rows) {
  int64_t at[RANKS];
  uint64_t high = 0, base = rows->low;
  memcpy(at, copy->coordinates, sizeof at);
  rows->low = UINT64_MAX;
  for (int64_t n = 0; n < copy->map.rows; n++, step(copy, at)) {
    uint64_t start = base;
    if (!place_of_pixel(copy, at, &start)) continue;
    rows->starts[rows->count] = (int64_t)start;
    rows->numbers[rows->count++] = n;
    rows->low = start < rows->low ? start : rows->low;
    high = start > high ? start : high;
  }
  rows->span = high - rows->low + (uint64_t)(rows->end - rows->first);
}

// The rows that coordinates name, of a tensor of two dimensions.
static void picked_rows(const BulkCopy *copy, Rows *rows) {
  const TensorMap *map = &copy->map;
  uint64_t base = rows->low, high = 0;
  rows->low = UINT64_MAX;
  for (int64_t n = 0; n < map->rows; n++) {
    int64_t row = copy->coordinates[1 + n];
    if (row < 0 || row >= map->extents[1]) continue;
    uint64_t start = base + scaled(row, map->strides[1]);
    rows->starts[rows->count] = (int64_t)start;
    rows->numbers[rows->count++] = n;
    rows->low = start < rows->low ? start : rows->low;
    high = start > high ? start : high;
  }
  rows->span = high - rows->low + (uint64_t)(rows->end - rows->first);
}

Rows rows_of(const BulkCopy *copy, int whole) {
  const TensorMap *map = &copy->map;
  int64_t room = copy->rank ? map->rows : 1;
  Rows rows = {.starts = malloc(2 * (size_t)room * sizeof(int64_t))};
  rows.numbers = rows.starts + room;
  if (!copy->rank) {
    rows.count = 1;
    rows.end = copy->nbytes;
    rows.starts[0] = copy->other;
    rows.numbers[0] = 0;
    rows.low = (uint64_t)copy->other;
    rows.span = (uint64_t)copy->nbytes;
    return rows;
  }
  int64_t byte = bytes_of(map, copy->coordinates[0]), inside = bytes_of(map, map->extents[0]) - byte;
  if (whole && !map->im2col) inside = parts(inside, CHUNK) * CHUNK;
  rows.first = most(-byte, 0);
  rows.end = least(map->row_bytes, inside);
  if (rows.end <= rows.first) return rows;
  rows.low = (uint64_t)(map->base + byte + rows.first);
  if (map->im2col) pixel_rows(copy, &rows);
  else if (copy->mode == MODE_FOURS) picked_rows(copy, &rows);
  else tile_rows(map, copy->coordinates, &rows);
  return rows;
}

void rows_free(Rows *rows) { free(rows->starts); }

int64_t rows_sectors(const Rows *rows) {
  int64_t sectors = 0, nbytes = rows->end - rows->first;
  for (int64_t i = 0; i < rows->count && nbytes; i++)
    sectors += (int64_t)(((uint64_t)rows->starts[i] % SECTOR + (uint64_t)nbytes + SECTOR - 1) / SECTOR);
  return sectors;
}

// --- shared memory ---------------------------------------------------------------------------------------------------

// Where a chunk of a row is. The rows begin at multiples of the span, within which the swizzle exchanges chunks.
static inline int64_t place_of_chunk(const TensorMap *map, int64_t offset, int64_t row, int64_t chunk) {
  int64_t at = offset + row * map->pitch;
  return at + (chunk * CHUNK ^ (at >> map->shift & map->mask));
}

static Pieces one_piece(int64_t offset, int64_t nbytes) {
  Pieces pieces = {1, nbytes, 1, malloc(sizeof(int64_t))};
  pieces.offsets[0] = offset;
  return pieces;
}

int64_t pieces_span(const BulkCopy *copy, int64_t offset) {
  const TensorMap *map = &copy->map;
  if (!copy->rank) return copy->nbytes;
  if (map->contiguous) return map->shared_bytes;
  int64_t last = 0, chunks = map->row_bytes / CHUNK;
  for (int64_t n = 0; n < map->rows; n++)
    for (int64_t c = 0; c < chunks; c++) last = most(last, place_of_chunk(map, offset, n, c));
  return last + CHUNK - offset;
}

Pieces pieces_of(const BulkCopy *copy, int64_t offset, const Rows *inside) {
  const TensorMap *map = &copy->map;
  if (!copy->rank) return one_piece(offset, copy->nbytes);
  int64_t first = 0, end = map->row_bytes, group = map->group, rows = map->rows, n = 0;
  if (inside) {
    first = inside->first;
    end = inside->end;
    rows = inside->count;
  }
  int all = rows == map->rows && !first && end == map->row_bytes, cut = rows && (first % group || end % group);
  if (all && map->contiguous) return one_piece(offset, map->shared_bytes);
  int64_t of_row = cut ? end - first : rows ? (end - first) / group : 0;
  Pieces pieces = {.nbytes = cut ? 1 : CHUNK, .offsets = malloc((size_t)(rows * of_row + 1) * sizeof(int64_t))};
  for (int64_t i = 0; i < rows; i++) {
    int64_t row = inside ? inside->numbers[i] : i;
    for (int64_t at = first; at < end; at += cut ? 1 : group)
      pieces.offsets[n++] = place_of_chunk(map, offset, row, at / group) + (cut ? at % group : 0);
  }
  pieces.count = n;
  return pieces;
}

// --- moves -----------------------------------------------------------------------------------------------------------

// A row whose chunks the swizzle exchanges among each other, where it goes or where it comes from.
static inline void move_row(uint8_t *to, const uint8_t *from, int64_t turn_to, int64_t turn_from, int64_t nbytes) {
  if (nbytes == WIDEST_ROW)  // a count that the compiler knows: no loop
    for (int c = 0; c < WIDEST_ROW; c += CHUNK) memcpy(to + (c ^ turn_to), from + (c ^ turn_from), CHUNK);
  else
    for (int64_t c = 0; c < nbytes; c += CHUNK) memcpy(to + (c ^ turn_to), from + (c ^ turn_from), CHUNK);
}

// FP32 bit patterns to nearest even TF32 (10 fraction bits); NaN becomes 0x7FFFE000.
static void round_words(uint8_t *bytes, int64_t nbytes) {
  for (int64_t at = 0; at < nbytes; at += 4) {
    uint32_t bits;
    memcpy(&bits, bytes + at, sizeof bits);
    uint32_t rounded = (bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000u;
    if ((bits & 0x7FFFFFFF) > 0x7F800000) rounded = 0x7FFFE000;
    memcpy(bytes + at, &rounded, sizeof rounded);
  }
}

// What lies out of bounds.
static void fill(const TensorMap *map, uint8_t *data, int64_t offset) {
  static const uint8_t zeros[CHUNK];
  uint8_t pattern[CHUNK];
  for (int i = 0; i < CHUNK; i++) pattern[i] = i % 2 ? 0x7F : 0xF7;
  for (int64_t n = 0; n < map->rows; n++)
    for (int64_t c = 0; c * map->group < map->row_bytes; c++)
      memcpy(data + place_of_chunk(map, offset, n, c), map->not_a_number ? pattern : zeros, CHUNK);
}

void box_load(const BulkCopy *copy, const Rows *rows, uint8_t *data, int64_t offset) {
  const TensorMap *map = &copy->map;
  if (!copy->rank) {
    memcpy(data + offset, (const void *)(uintptr_t)copy->other, (size_t)copy->nbytes);
    return;
  }
  int64_t first = rows->first, end = rows->end, group = map->group;
  int whole = !first && end == map->row_bytes;
  if (rows->count < map->rows || !whole) fill(map, data, offset);
  for (int64_t i = 0; i < rows->count; i++) {
    const uint8_t *from = (const uint8_t *)(uintptr_t)rows->starts[i];
    // Rows are far apart: a processor does not expect them by itself.
    if (i + AHEAD < rows->count) __builtin_prefetch((const uint8_t *)(uintptr_t)rows->starts[i + AHEAD]);
    if (whole && group == CHUNK && !map->rounds) {
      int64_t at = offset + rows->numbers[i] * map->pitch;
      move_row(data + at, from, at >> map->shift & map->mask, 0, map->row_bytes);
      continue;
    }
    for (int64_t at = first; at < end; at += group) {
      uint8_t *chunk = data + place_of_chunk(map, offset, rows->numbers[i], at / group);
      int64_t count = least(group, end - at);
      memcpy(chunk, from + at - first, (size_t)count);
      memset(chunk + group, 0, (size_t)(CHUNK - group));
      if (map->rounds) round_words(chunk, count);
    }
  }
}

// 16 bytes of six bits each side by side, the first one lowest.
static void pack_sixes(const uint8_t *chunk, uint8_t *packed) {
  for (int i = 0; i < CHUNK / 4; i++, chunk += 4, packed += 3) {
    uint32_t bits = 0;
    for (int k = 0; k < 4; k++) bits |= (uint32_t)(chunk[k] & 63) << 6 * k;
    for (int k = 0; k < 3; k++) packed[k] = (uint8_t)(bits >> 8 * k);
  }
}

void box_read(const BulkCopy *copy, const uint8_t *data, int64_t offset, uint8_t *box) {
  const TensorMap *map = &copy->map;
  if (!copy->rank) {
    memcpy(box, data + offset, (size_t)copy->nbytes);
    return;
  }
  for (int64_t n = 0; n < map->rows && map->group == CHUNK; n++, box += map->row_bytes) {
    int64_t at = offset + n * map->pitch;
    move_row(box, data + at, 0, at >> map->shift & map->mask, map->row_bytes);
  }
  if (map->group == CHUNK) return;
  for (int64_t n = 0; n < map->rows; n++)
    for (int64_t at = 0; at < map->row_bytes; at += map->group, box += map->group) {
      const uint8_t *chunk = data + place_of_chunk(map, offset, n, at / map->group);
      pack_sixes(chunk, box);
    }
}

void box_write(const BulkCopy *copy, const Rows *rows, const uint8_t *box) {
  size_t nbytes = (size_t)(rows->end - rows->first);
  for (int64_t i = 0; i < rows->count; i++) {
    uint8_t *row = (uint8_t *)(uintptr_t)rows->starts[i];
    const uint8_t *from = box + rows->numbers[i] * copy->map.row_bytes + rows->first;
    if (copy->rank || copy->mask < 0) memcpy(row, from, nbytes);
    else
      for (size_t k = 0; k < nbytes; k++)
        if (copy->mask >> k % CHUNK & 1) row[k] = from[k];
  }
}
