/* How many kinds of AMX tiles the CPU tells of: CPUID leaf 0x1D. */
#if __x86_64__
#include <cpuid.h>

int num_tile_palettes(void) {
    unsigned num = 0, b, c, d;
    return __get_cpuid_count(0x1D, 0, &num, &b, &c, &d) ? (int)num : 0;
}
#else
int num_tile_palettes(void) { return 0; }
#endif
