/* Columns of a SQLite table, taken from the leaves of its B-tree: whole numbers, doubles, texts and BLOBs as Arrow stores them.

   The format is SQLite's own (https://www.sqlite.org/fileformat2.html). Pages are untrusted: every read is inside its page, every
   write inside what the caller has allocated for `rows_max` rows. The caller is `leaf_columns.py`.

   A page that is not a leaf, or whose cells do not fit into it, ends the call: SQLite shall say what it is. A row that is not
   plain is marked, and the caller asks SQLite for it: a value that is not of its column's type, is not in the page (overflow),
   or is missing in the record and has a default; a record that is damaged.

   Threads: any; nothing is kept. */

#include <stdint.h>
#include <string.h>

#define LEAVES_VERSION 1
#define LEAF_TABLE 13
#define LEAF_HEADER 8

enum { WHOLE, DOUBLE, TEXT, BLOB };
enum { NONE, REAL = 7, ZERO, ONE, FIRST_BLOB = 12 }; /* serial types */

typedef struct {
  int64_t place;          /* of its value in a record; below 0: it is the rowid */
  int64_t kind;           /* WHOLE, … */
  int64_t is_null_absent; /* whether a record that ends before it means NULL */
  int64_t nulls;          /* out: how many there are */
  uint8_t *valid;         /* out: a bit for each row, 0 at first */
  int64_t *values;        /* out, of numbers; doubles by their bits */
  int32_t *offsets;       /* out, of texts: where each begins, and where the last one ends; the first is 0 */
  int32_t *positions;     /* out, of texts: where each is in the pages */
} Column;

static const uint8_t WIDTHS[FIRST_BLOB] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0};

int quire_leaves_version(void) { return LEAVES_VERSION; }

static int64_t u16(const uint8_t *at) { return (int64_t)at[0] << 8 | at[1]; }

/* The bytes that a varint takes; 0 if it does not end before `end`. */
static int varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
  uint64_t sum = 0;
  for (int n = 0; n < 9; n++) {
    if (at + n >= end) return 0;
    if (n == 8) {
      *value = sum << 8 | at[8];
      return 9;
    }
    sum = sum << 7 | (at[n] & 0x7f);
    if (at[n] < 0x80) {
      *value = sum;
      return n + 1;
    }
  }
  return 0;
}

/* A big-endian number of `width` bytes, at most 8. */
static int64_t whole(const uint8_t *at, int64_t width) {
  uint64_t value = width && at[0] & 0x80 ? ~(uint64_t)0 : 0;
  for (int64_t n = 0; n < width; n++) value = value << 8 | at[n];
  return (int64_t)value;
}

/* How much of a payload is in its cell. */
static int64_t local_bytes(int64_t size, int64_t usable) {
  int64_t most = usable - 35, least = (usable - 12) * 32 / 255 - 23, rest;
  if (size <= most) return size;
  rest = least + (size - least) % (usable - 4);
  return rest <= most ? rest : least;
}

static void set_valid(Column *c, int64_t row) { c->valid[row >> 3] |= (uint8_t)(1 << (row & 7)); }

static void set_number(Column *c, int64_t row, int64_t value) {
  if (c->kind == DOUBLE) {
    double real = (double)value;
    memcpy(&c->values[row], &real, 8);
  } else
    c->values[row] = value;
  set_valid(c, row);
}

/* Take a value of this serial type, which is at `at`; whether it is of the column's type. */
static int take(Column *c, int64_t row, uint64_t type, const uint8_t *at, int64_t width, const uint8_t *pages) {
  if (type == NONE) {
    c->nulls++;
    if (c->kind < TEXT) c->values[row] = 0;
    return 1;
  }
  if (c->kind >= TEXT) {
    if (type < FIRST_BLOB || (type & 1) != (c->kind == TEXT)) return 0;
    c->positions[row] = (int32_t)(at - pages);
    c->offsets[row + 1] = c->offsets[row] + (int32_t)width;
    set_valid(c, row);
    return 1;
  }
  if (type == REAL) {
    int64_t bits = whole(at, 8);
    double value;
    memcpy(&value, &bits, 8);
    if (c->kind != DOUBLE || value != value) return 0; /* SQLite reads NaN as NULL */
    c->values[row] = bits;
    set_valid(c, row);
    return 1;
  }
  if (type == ZERO || type == ONE)
    set_number(c, row, (int64_t)type - ZERO);
  else if (type < REAL)
    set_number(c, row, whole(at, width));
  else
    return 0;
  return 1;
}

/* Take the columns of a record, of which `local` bytes are here; whether all of it is plain. Columns are in the order of their
   places. */
static int record(const uint8_t *at, int64_t size, int64_t local, int64_t rowid, int64_t row, Column *columns, int64_t count,
                  const uint8_t *pages) {
  uint64_t header, type = NONE;
  int length = varint(at, at + local, &header);
  if (!length || header < (uint64_t)length || header > (uint64_t)local) return 0;
  const uint8_t *next = at + length, *stop = at + header;
  int64_t c = 0, position = (int64_t)header;
  for (; c < count && columns[c].place < 0; c++) set_number(&columns[c], row, rowid);
  for (int64_t place = 0; c < count; place++) {
    if (next >= stop) { /* columns that were added later */
      for (; c < count; c++)
        if (!columns[c].is_null_absent || !take(&columns[c], row, NONE, at, 0, pages)) return 0;
      break;
    }
    if (*next < 0x80)
      type = *next++;
    else {
      length = varint(next, stop, &type);
      if (!length || type > INT32_MAX) return 0;
      next += length;
    }
    int64_t width = type < FIRST_BLOB ? WIDTHS[type] : (int64_t)(type - FIRST_BLOB) / 2;
    for (; c < count && columns[c].place == place; c++)
      if (position + width > local || !take(&columns[c], row, type, at + position, width, pages)) return 0;
    position += width;
    if (position > size) return 0;
  }
  return next < stop || position == size; /* SQLite calls a record damaged that is longer than its values */
}

/* Take the rows of `page_count` leaves. Returns how many there are; -1 - n if page n is not a leaf that this can read. */
int64_t quire_leaf_columns(const uint8_t *pages, int64_t page_count, int64_t page_size, int64_t usable, Column *columns,
                           int64_t column_count, int64_t rows_max, int64_t *rowids, uint8_t *is_odd) {
  int64_t row = 0;
  for (int64_t number = 0; number < page_count; number++) {
    const uint8_t *page = pages + number * page_size, *end = page + usable;
    int64_t count = u16(page + 3), used = LEAF_HEADER + 2 * count;
    if (page[0] != LEAF_TABLE || !count || used > usable || row + count > rows_max) return -1 - number;
    for (int64_t cell = 0; cell < count; cell++, row++) {
      int64_t start = u16(page + LEAF_HEADER + 2 * cell);
      uint64_t size, rowid;
      int length;
      if (start < LEAF_HEADER + 2 * count || start > usable - 4) return -1 - number;
      const uint8_t *at = page + start;
      if (!(length = varint(at, end, &size)) || size > INT32_MAX) return -1 - number;
      at += length;
      if (!(length = varint(at, end, &rowid))) return -1 - number;
      at += length;
      int64_t local = local_bytes((int64_t)size, usable);
      used += at - page - start + local;
      /* Cells that overlap could make more of a page than it has bytes. */
      if (local > end - at || used > usable) return -1 - number;
      rowids[row] = (int64_t)rowid;
      for (int64_t c = 0; c < column_count; c++) /* empty, unless a text is found */
        if (columns[c].kind >= TEXT) columns[c].offsets[row + 1] = columns[c].offsets[row];
      is_odd[row] = !record(at, (int64_t)size, local, (int64_t)rowid, row, columns, column_count, pages);
    }
  }
  return row;
}

/* Put the texts of a column one behind the other; `to` has room for offsets[rows] bytes. */
void quire_leaf_texts(const uint8_t *pages, const int32_t *positions, const int32_t *offsets, int64_t rows, uint8_t *to) {
  for (int64_t row = 0; row < rows; row++) {
    int32_t width = offsets[row + 1] - offsets[row];
    if (width) memcpy(to + offsets[row], pages + positions[row], (size_t)width);
  }
}
