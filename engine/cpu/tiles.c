/* Products with bfloat16 weights by AMX: 16 rows times 16 outputs over 32 inputs with one instruction.
 *
 * A row's sum is made in the same order whatever else is in its tile. The sums of AVX-512 are made in another order, so
 * products of one matrix are made by the one or the other, never by both.
 */
#include "bf16.h"
#if KV_BF16 && __AMX_BF16__ && __linux__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* AHEAD: bytes, further than memory answers while a step's tiles are multiplied. */
enum { STEP_BYTES = AMX_DEPTH / PAIR * PAIR_BYTES, AHEAD = 4 * STEP_BYTES };

/* Linux keeps no tiles for a process that has not asked for it; those of all its threads. */
int has_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int known = 0; /* 1: yes, -1: no; who asks twice is told the same */
    int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (answer == 0) {
        answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 1 : -1;
        __atomic_store_n(&known, answer, __ATOMIC_RELAXED);
    }
    return answer > 0;
}

int takes_tiles(const Bf16Product *p) { return p->num_in % AMX_DEPTH == 0 && has_tiles(); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void begin_tiles(int64_t rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(LINE))) = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = LINE;
        config.rows[tile] = (uint8_t)(tile < 6 ? least(rows, AMX_ROWS) : AMX_DEPTH / PAIR);
    }
    __asm__ volatile("" ::"r"(&config) : "memory"); /* the intrinsic does not say that it reads all of it */
    _tile_loadconfig(&config);
}

void end_tiles(void) { _tile_release(); }

/* What is read from memory while a group is multiplied: ``num_lines`` of them at each step. */
typedef struct {
    const char *from;
    int num_lines;
} Ahead;

/* Tiles 0 to 3: sums of two groups of rows times two parts of a panel. 4, 5: the groups' inputs. 6, 7: the parts. ``first``,
 * and ``second`` if any, point to 16 rows each, or as many as the tiles were made for. */
static inline __attribute__((always_inline)) void multiply(const int has_second, const Bf16Product *p, const elem *weights,
                                                           const elem *first, const elem *second, Ahead ahead) {
    const int64_t row_bytes = p->num_in * (int64_t)sizeof(elem);
    _tile_zero(0);
    _tile_zero(1);
    if (has_second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < p->num_in; i += AMX_DEPTH, weights += AMX_DEPTH * PANEL) {
        for (int line = 0; line < ahead.num_lines; line++, ahead.from += LINE) __builtin_prefetch(ahead.from, 0, 3);
        _tile_loadd(6, weights, PAIR_BYTES);
        _tile_loadd(4, first + i, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + LANES * PAIR, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (has_second) {
            _tile_loadd(5, second + i, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

static void put_group(const Bf16Product *p, int64_t column, const float sums[AMX_ROWS][PANEL], elem *out, int64_t num) {
    for (int64_t row = 0; row < num; row++)
        for (int part = 0; part < PARTS && column + part * LANES < p->num_out; part++)
            put_sums(p, out + row * p->num_out, column + part * LANES, loadf(&sums[row][part * LANES]));
}

/* All groups have as many rows; the last begins where it ends with the last row, and some are multiplied twice. */
void tile_panel(const Bf16Product *p, int64_t panel, const elem *x, elem *out, int64_t rows, int is_read) {
    const int64_t column = panel * PANEL, num = least(rows, AMX_ROWS), num_groups = (rows + AMX_ROWS - 1) / AMX_ROWS;
    const int64_t num_turns = (num_groups + 1) / 2, size = p->num_in / PAIR * PAIR_BYTES;
    const elem *weights = p->weights + column * p->num_in;
    for (int64_t turn = 0; turn < num_turns; turn++) {
        const int64_t row = least(2 * turn * AMX_ROWS, rows - num), next = least((2 * turn + 1) * AMX_ROWS, rows - num);
        const int has_second = 2 * turn + 1 < num_groups;
        Ahead ahead = {(const char *)weights + AHEAD, STEP_BYTES / LINE};
        if (num_turns > 1 && (is_read || turn))
            ahead = (Ahead){(const char *)weights + size + size * turn / num_turns,
                            (int)((STEP_BYTES / LINE + num_turns - 1) / num_turns)};
        float sums[2][AMX_ROWS][PANEL] __attribute__((aligned(LINE)));
        if (has_second) {
            multiply(1, p, weights, x + row * p->num_in, x + next * p->num_in, ahead);
            _tile_stored(2, &sums[1][0][0], sizeof sums[1][0]);
            _tile_stored(3, &sums[1][0][LANES], sizeof sums[1][0]);
        } else {
            multiply(0, p, weights, x + row * p->num_in, NULL, ahead);
        }
        _tile_stored(0, &sums[0][0][0], sizeof sums[0][0]);
        _tile_stored(1, &sums[0][0][LANES], sizeof sums[0][0]);
        put_group(p, column, sums[0], out + row * p->num_out, num);
        if (has_second) put_group(p, column, sums[1], out + next * p->num_out, num);
    }
}
#else
int has_tiles(void) { return 0; }
int takes_tiles(const Bf16Product *p) { return (void)p, 0; }
void begin_tiles(int64_t rows) { (void)rows; }
void end_tiles(void) {}
void tile_panel(const Bf16Product *p, int64_t panel, const elem *x, elem *out, int64_t rows, int is_read) {
    (void)p, (void)panel, (void)x, (void)out, (void)rows, (void)is_read;
}
#endif
