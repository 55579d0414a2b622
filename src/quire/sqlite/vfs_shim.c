/* What SQLite asks a database file at the start and end of every read transaction, answered without Python.

   A shim lies over a VFS of `vfs.py`. A file of it has a cell (see vfs_shim.py), in which Python leaves the version that the
   connection has just read: its lsn, its size and its stamp. As long as the database's newest lsn is that one, the next read
   transaction takes that version again, here; the interpreter is not entered. Everything else is passed on, after Python was
   told of the lock that it has not seen (`settle`).

   A cell's state, and who may change it:
     PLAIN    → PARKED   Python, at the end of a transaction
     PARKED   → READING  here, in xLock;   → PLAIN here, when the version is not the newest any more
     READING  → PARKED   here, in xUnlock; → OLD by the keeper; → PLAIN by Python, in the next xLock
     OLD      → PLAIN    by Python, in the next xLock, or in xUnlock
     PLAIN, PARKED → KEEPER → PLAIN   the keeper, while it closes versions that nobody reads

   Threads: a file belongs to its connection, and that to one thread at a time; the keeper's changes states only. */

#include <stdint.h>
#include <string.h>
#include "sqlite3ext.h"
SQLITE_EXTENSION_INIT1

#define SHIM_VERSION 1
#define FCNTL_CELL 0x51554952 /* below 100 are SQLite's own */
#define STAMP_OFFSET 24
#define STAMP_BYTES 16

enum { PLAIN, PARKED, READING, OLD, KEEPER };

typedef struct {
  int64_t state, lsn, size_bytes;
  char stamp[STAMP_BYTES];
  const int64_t *newest; /* the database's: the lsn of what was written last, -1 if it has failed or is closed */
} Cell;

typedef struct {
  sqlite3_vfs base;
  sqlite3_vfs *python, *machine; /* `machine` is the default VFS */
} Shim;

typedef struct {
  sqlite3_file base;
  Cell *cell; /* none for a file that is always Python's */
  int level, characteristics, sector_bytes;
  sqlite3_file inner[]; /* as large as the inner VFS says */
} File;

#define INNER(f) ((f)->inner->pMethods)

int quire_shim_swap(int64_t address, int before, int after) {
  int64_t expected = before;
  int64_t *state = &((Cell *)(intptr_t)address)->state;
  return __atomic_compare_exchange_n(state, &expected, after, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static int swap(Cell *cell, int before, int after) { return quire_shim_swap((intptr_t)cell, before, after); }

static int is_fast(const File *f) {
  int64_t state = f->cell ? __atomic_load_n(&f->cell->state, __ATOMIC_ACQUIRE) : PLAIN;
  return state == READING || state == OLD;
}

/* Let Python know what it has not seen, before it is called. */
static int settle(File *f) {
  if (is_fast(f)) return INNER(f)->xLock(f->inner, SQLITE_LOCK_SHARED);
  /* Python may move or close the parked version from here on. */
  if (f->cell) swap(f->cell, PARKED, PLAIN);
  return SQLITE_OK;
}

#define SETTLED(f, call) (settle(f) == SQLITE_OK ? (call) : SQLITE_IOERR)

static int xClose(sqlite3_file *file) {
  File *f = (File *)file;
  int rc = INNER(f)->xClose(f->inner); /* frees the cell */
  f->cell = 0;
  return rc;
}

static int xRead(sqlite3_file *file, void *to, int amount, sqlite3_int64 offset) {
  File *f = (File *)file;
  if (amount == STAMP_BYTES && offset == STAMP_OFFSET && is_fast(f)) {
    memcpy(to, f->cell->stamp, STAMP_BYTES);
    return SQLITE_OK;
  }
  return SETTLED(f, INNER(f)->xRead(f->inner, to, amount, offset));
}

static int xWrite(sqlite3_file *file, const void *from, int amount, sqlite3_int64 offset) {
  File *f = (File *)file;
  return SETTLED(f, INNER(f)->xWrite(f->inner, from, amount, offset));
}

static int xTruncate(sqlite3_file *file, sqlite3_int64 size) {
  File *f = (File *)file;
  return SETTLED(f, INNER(f)->xTruncate(f->inner, size));
}

static int xSync(sqlite3_file *file, int flags) {
  (void)file, (void)flags; /* a commit is made in COMMIT_PHASETWO: SQLite may still roll back after a sync */
  return SQLITE_OK;
}

static int xFileSize(sqlite3_file *file, sqlite3_int64 *size) {
  File *f = (File *)file;
  if (is_fast(f)) {
    *size = f->cell->size_bytes;
    return SQLITE_OK;
  }
  return SETTLED(f, INNER(f)->xFileSize(f->inner, size));
}

static int xLock(sqlite3_file *file, int level) {
  File *f = (File *)file;
  Cell *cell = f->cell;
  int rc;
  /* If a commit lands between the comparison and the swap, this transaction reads the version before it, as if it had
     begun a moment earlier. Only the keeper can interfere, and then the swap fails. */
  if (level == SQLITE_LOCK_SHARED && cell && __atomic_load_n(&cell->state, __ATOMIC_ACQUIRE) == PARKED
      && __atomic_load_n(cell->newest, __ATOMIC_ACQUIRE) == cell->lsn && swap(cell, PARKED, READING)) {
    f->level = level;
    return SQLITE_OK;
  }
  if (f->level >= SQLITE_LOCK_RESERVED && level > f->level) { /* readers are never in a writer's way */
    f->level = level;
    return SQLITE_OK;
  }
  if (level > SQLITE_LOCK_SHARED && is_fast(f)) { /* Python takes both locks in one call */
    rc = SQLITE_OK;
  } else {
    rc = settle(f);
  }
  if (rc == SQLITE_OK) rc = INNER(f)->xLock(f->inner, level);
  if (rc == SQLITE_OK) f->level = level;
  return rc;
}

static int xUnlock(sqlite3_file *file, int level) {
  File *f = (File *)file;
  f->level = level;
  /* The swap fails if the keeper has marked the version OLD: then Python must close it. */
  if (level == SQLITE_LOCK_NONE && f->cell && swap(f->cell, READING, PARKED)) return SQLITE_OK;
  if (!is_fast(f)) settle(f);
  return INNER(f)->xUnlock(f->inner, level); /* if the version is OLD, Python closes it */
}

static int xCheckReservedLock(sqlite3_file *file, int *taken) {
  File *f = (File *)file;
  return INNER(f)->xCheckReservedLock(f->inner, taken);
}

static int xFileControl(sqlite3_file *file, int operation, void *argument) {
  File *f = (File *)file;
  if (operation != SQLITE_FCNTL_PRAGMA && operation != SQLITE_FCNTL_COMMIT_PHASETWO && operation != SQLITE_FCNTL_VFSNAME)
    return SQLITE_NOTFOUND;
  return SETTLED(f, INNER(f)->xFileControl(f->inner, operation, argument));
}

static int xSectorSize(sqlite3_file *file) { return ((File *)file)->sector_bytes; }
static int xDeviceCharacteristics(sqlite3_file *file) { return ((File *)file)->characteristics; }

static const sqlite3_io_methods METHODS = {
  1, xClose, xRead, xWrite, xTruncate, xSync, xFileSize, xLock, xUnlock, xCheckReservedLock, xFileControl, xSectorSize,
  xDeviceCharacteristics, 0, 0, 0, 0, 0, 0};

#define PYTHON(vfs) ((Shim *)(vfs))->python
#define MACHINE(vfs) ((Shim *)(vfs))->machine
/* As in vfs.py: a name without a slash is a database of quire, everything else the machine's. */
#define IS_OURS(name) ((name) && !strchr((name), '/'))

static int xOpen(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out) {
  File *f = (File *)file;
  int64_t cell = 0;
  int rc;
  if (!IS_OURS(name) || !(flags & SQLITE_OPEN_MAIN_DB)) {
    if (IS_OURS(name)) { /* the journal of an attached database: temporary */
      name = 0;
      flags = SQLITE_OPEN_TEMP_JOURNAL | SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_EXCLUSIVE
            | SQLITE_OPEN_DELETEONCLOSE;
    }
    return MACHINE(vfs)->xOpen(MACHINE(vfs), name, file, flags, out);
  }
  memset(f, 0, vfs->szOsFile);
  rc = PYTHON(vfs)->xOpen(PYTHON(vfs), name, f->inner, flags, out);
  if (rc != SQLITE_OK) return rc;
  if (INNER(f)->xFileControl(f->inner, FCNTL_CELL, &cell) == SQLITE_OK) f->cell = (Cell *)(intptr_t)cell;
  f->characteristics = INNER(f)->xDeviceCharacteristics(f->inner);
  f->sector_bytes = INNER(f)->xSectorSize(f->inner);
  f->base.pMethods = &METHODS;
  return SQLITE_OK;
}

static int xAccess(sqlite3_vfs *vfs, const char *name, int flags, int *there) {
  if (!IS_OURS(name)) return MACHINE(vfs)->xAccess(MACHINE(vfs), name, flags, there);
  *there = 0; /* no journal ever is */
  return SQLITE_OK;
}

static int xDelete(sqlite3_vfs *vfs, const char *name, int sync) {
  return IS_OURS(name) ? SQLITE_OK : MACHINE(vfs)->xDelete(MACHINE(vfs), name, sync);
}

static int xFullPathname(sqlite3_vfs *vfs, const char *name, int room, char *to) {
  size_t size = strlen(name) + 1;
  if (!IS_OURS(name)) return MACHINE(vfs)->xFullPathname(MACHINE(vfs), name, room, to);
  if (size > (size_t)room) return SQLITE_CANTOPEN;
  memcpy(to, name, size);
  return SQLITE_OK;
}

static int xSleep(sqlite3_vfs *vfs, int microseconds) { return PYTHON(vfs)->xSleep(PYTHON(vfs), microseconds); }

/* Lay a shim over a registered VFS; its address, 0 if that is not possible. It is never freed: SQLite has no word for "no
   connection uses this VFS any more". */
int64_t quire_shim_register(const char *python_name, const char *name) {
  sqlite3_vfs *python = sqlite3_vfs_find(python_name), *machine = sqlite3_vfs_find(0);
  size_t name_bytes = strlen(name) + 1;
  Shim *shim = python && machine ? sqlite3_malloc64(sizeof *shim + name_bytes) : 0;
  int size = (int)sizeof(File) + (python ? python->szOsFile : 0);
  if (!shim) return 0;
  shim->python = python;
  shim->machine = machine;
  shim->base = *machine; /* its time, randomness and extensions */
  if (machine->iVersion > 2) shim->base.iVersion = 2; /* without system calls to replace */
  shim->base.pNext = 0;
  shim->base.szOsFile = size > machine->szOsFile ? size : machine->szOsFile;
  shim->base.mxPathname = python->mxPathname;
  shim->base.zName = memcpy(shim + 1, name, name_bytes);
  shim->base.xOpen = xOpen;
  shim->base.xDelete = xDelete;
  shim->base.xAccess = xAccess;
  shim->base.xFullPathname = xFullPathname;
  shim->base.xSleep = xSleep;
  if (sqlite3_vfs_register(&shim->base, 0) == SQLITE_OK) return (intptr_t)shim;
  sqlite3_free(shim);
  return 0;
}

void quire_shim_unregister(int64_t shim) { sqlite3_vfs_unregister((sqlite3_vfs *)(intptr_t)shim); }

int quire_shim_version(void) { return SHIM_VERSION; }

int sqlite3_vfsshim_init(sqlite3 *db, char **error, const sqlite3_api_routines *api) {
  SQLITE_EXTENSION_INIT2(api);
  (void)db, (void)error;
  return SQLITE_OK_LOAD_PERMANENTLY; /* files and VFSs outlive the connection that has loaded this */
}
