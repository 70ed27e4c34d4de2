/* What is shared by the kernels that multiply pairs of bfloat16: how the weights of a product lie, who multiplies one panel of
 * them, and who may use AMX's tiles.
 *
 * Weights lie as [panel of 32 outputs][pair of inputs][output][input of the pair]: two vectors for a pair of inputs, and, 16
 * pairs taken together, two of the tiles that AMX multiplies by.
 */
#pragma once
#include "vectors.h"

typedef struct {
    int64_t num_in, num_out; /* num_in is even */
    const elem *weights;     /* outputs filled up to whole panels */
    const float *bias;       /* the same; may be null */
} Bf16Product;

enum { PAIR = 2, PANEL = 32, PARTS = PANEL / LANES, LINE = 64, PAIR_BYTES = PANEL * PAIR * (int)sizeof(elem) };
enum { AMX_ROWS = 16, AMX_DEPTH = 32 }; /* rows of a tile at most; inputs that one instruction adds up */

/* Bias and the choice of a type for LANES sums from output ``first`` on; only those that there are. */
static inline void put_sums(const Bf16Product *p, elem *out_row, int64_t first, vf sums) {
    const int64_t num = p->num_out - first;
    if (p->bias) sums += loadf(p->bias + first);
    if (num >= LANES) store_elems(out_row + first, sums);
    else
        for (int64_t i = 0; i < num; i++) out_row[first + i] = store1(sums[i]);
}

/* tiles.c. Whether this CPU has AMX and this process may use it; and whether it multiplies so many inputs. */
int has_tiles(void);
int takes_tiles(const Bf16Product *p);
/* Around all that a thread does with tiles (tile_panel; attention_tiles.c). Of sums, 0 to 3, and of first factors, 4 and 5, a
 * tile has ``rows`` rows, 16 at most; of second factors, 6 and 7, it has 16, of a pair each. */
void begin_tiles(int64_t rows);
void end_tiles(void);
/* One panel times all rows. ``is_read``: the thread has just multiplied the panel before, and read this one meanwhile. */
void tile_panel(const Bf16Product *p, int64_t panel, const elem *x, elem *out, int64_t rows, int is_read);
