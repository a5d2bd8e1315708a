/* Blocks of AMX_ROWS rows times one tile with AMX, which multiplies 16 rows, one group of inputs and 16 outputs at once. The
 * arithmetic is that of int_rows.h, and so are the bits. */
#pragma once
#include "int_product.h"

#if defined(__AMX_INT8__) && LANES == 16
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#elif !defined(HAS_AMX) /* tests define it, with the instructions in software */
#define HAS_AMX 0
#endif

#if HAS_AMX
/* The compiler does not know what memory the instructions read. */
#define MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

/* Whether the system lets this process use the tile registers. Threads that start later may use them too. */
static int amx_permitted(void) {
#ifdef __AMX_INT8__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 1;
#endif
}

/* Tiles of this thread: 0 and 1 sums [16, 16] int32, 2 activations [16, group], 3 and 4 codes [group / 4, 16, 4] */
static void amx_configure(int64_t group) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    const int inputs = (int)group;
    const int rows[] = {16, 16, 16, inputs / 4, inputs / 4}, bytes[] = {64, 64, inputs, 64, 64};
    for (int i = 0; i < 5; i++) config.rows[i] = (uint8_t)rows[i], config.bytes_per_row[i] = (uint16_t)bytes[i];
    MEMORY_BARRIER();
    _tile_loadconfig(&config);
}

/* 4-bit codes of a tile as int8 [K/4, TILE, 4], the format of CODES8 */
static void amx_widen(const weight_t *w, int64_t tile, int8_t *to) {
    const int64_t octets = blocks_of(w) * 4;
    const uint8_t *codes = w->codes + tile * bytes_of(CODES4, octets * 8);
    for (int64_t octet = 0; octet < octets; octet++)
        for (int lane = 0; lane < TILE; lane += LANES) {
            vb quads[2];
            codes_of(CODES4, codes, octet, lane, quads);
            for (int quad = 0; quad < 2; quad++)
                memcpy(to + ((octet * 2 + quad) * TILE + lane) * 4, &quads[quad], sizeof(vb));
        }
}

/* a->x.codes is [AMX_ROWS, K] here. codes: int8 [K/4, TILE, 4] of the tile; rows: at most AMX_ROWS */
static void amx_rows(const int_args *a, int64_t rows, const int8_t *codes) {
    const weight_t *w = a->w;
    const int64_t blocks = blocks_of(w), inputs = blocks * BLOCK, groups = inputs / w->group;
    const float *x_scales = a->x.scales, *x_sums = a->x.sums;
    int32_t sums[AMX_ROWS * TILE] __attribute__((aligned(64)));
    memset(a->acc, 0, (size_t)(rows * TILE) * sizeof(float));
    MEMORY_BARRIER();
    for (int64_t g = 0; g < groups; g++, x_scales += rows, x_sums += rows) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(2, a->x.codes + g * w->group, inputs);
        _tile_loadd(3, codes, TILE * 4);
        _tile_loadd(4, codes + 64, TILE * 4);
        _tile_dpbssd(0, 2, 3);
        _tile_dpbssd(1, 2, 4);
        _tile_stored(0, sums, TILE * 4);
        _tile_stored(1, sums + 16, TILE * 4);
        MEMORY_BARRIER();
        codes += w->group * TILE;
        for (int lane = 0; lane < TILE; lane += LANES) {
            const int64_t at = (a->tile * groups + g) * TILE + lane;
            const vf scale = scale_at(w, at), offset = w->offsets ? offset_at(w, at) : vf_of(0.0f);
            for (int64_t r = 0; r < rows; r++) {
                float *to = a->acc + r * TILE + lane;
                const vi sum = (vi)vu_load((const uint32_t *)sums + r * TILE + lane);
                vf acc = vf_fma(scale * x_scales[r], vf_of_ints(sum), vf_load(to));
                if (w->offsets) acc = vf_fma(offset, vf_of(x_sums[r]), acc);
                vf_store(to, acc);
            }
        }
    }
}
#endif
