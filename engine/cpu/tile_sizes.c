/* Whether the CPU tells how large its AMX tiles are: CPUID leaf 0x1D has the number of palettes, and for palette 1 bytes of a
 * row, tiles and rows. */
#if __x86_64__
#include <cpuid.h>

int tells_tile_sizes(void) {
    unsigned num, sizes, tiles_and_bytes, rows, d;
    if (!__get_cpuid_count(0x1D, 0, &num, &sizes, &rows, &d) || !num) return 0;
    if (!__get_cpuid_count(0x1D, 1, &sizes, &tiles_and_bytes, &rows, &d)) return 0;
    return (tiles_and_bytes & 0xffff) && tiles_and_bytes >> 16 && (rows & 0xffff);
}
#else
int tells_tile_sizes(void) { return 0; }
#endif
