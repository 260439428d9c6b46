// Where a bulk copy's bytes are, in global and in shared memory.
#pragma once
#include "core.h"

enum { CHUNK = 16 };  // bytes that a swizzle moves as one

static inline int is_wide(const BulkCopy *copy) { return copy->mode == MODE_W || copy->mode == MODE_W_128; }
static inline int is_of_pixels(const BulkCopy *copy) { return copy->mode == MODE_PIXELS || is_wide(copy); }
// Pixels behind the last position of the box: are they those of the next image, or of this one? The PTX ISA shows it in a
// figure alone. Whether that decides about bytes.
int halo_is_unclear(const BulkCopy *copy);

// Rows of global memory: addresses of those in bounds and their numbers in the box. Of each the bytes from `first` to `end`
// are in bounds, and there the address is. All are among the `span` bytes from `low` on.
typedef struct Rows {
  int64_t count, first, end;
  uint64_t low, span;
  int64_t *starts, *numbers;
} Rows;
// A store writes each CHUNK whole of which one byte is in bounds (`whole`).
Rows rows_of(const BulkCopy *copy, int whole);
void rows_free(Rows *rows);
int64_t rows_sectors(const Rows *rows);

// Pieces of shared memory, or one `range`.
typedef struct Pieces {
  int64_t count, nbytes, range;
  int64_t *offsets;
} Pieces;
// At an offset all of a box, or (`inside`) what these rows hold: chunks, or bytes where a chunk is cut.
Pieces pieces_of(const BulkCopy *copy, int64_t offset, const Rows *inside);
// From the first to the last of a whole box.
int64_t pieces_span(const BulkCopy *copy, int64_t offset);

// From rows to shared memory; the other way, in two steps: `box` has all bytes in order.
void box_load(const BulkCopy *copy, const Rows *rows, uint8_t *data, int64_t offset);
void box_read(const BulkCopy *copy, const uint8_t *data, int64_t offset, uint8_t *box);
void box_write(const BulkCopy *copy, const Rows *rows, const uint8_t *box);
