/* Prints the instructions and a checksum of integer products: 4 and 8 bits, groups of 16 and 32, with and without offsets, 1 to 37
 * rows each. */
#include "int_product.h"
#include "linear.h"
#include <stdio.h>

const char *paceline_instructions(void);
void int_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows);

enum { OUTPUTS = 200, PADDED_OUTPUTS = 256, INPUTS = 576, MAX_ROWS = 37 };
static uint8_t codes[PADDED_OUTPUTS * INPUTS];
static float scales[PADDED_OUTPUTS * INPUTS / 16], x[MAX_ROWS * INPUTS], out[MAX_ROWS * OUTPUTS];

static uint32_t next_random(void) {
    static uint32_t state = 3;
    return (state = state * 1664525u + 1013904223u) >> 8;
}

int main(void) {
    for (int i = 0; i < PADDED_OUTPUTS * INPUTS; i++) codes[i] = (uint8_t)next_random();
    for (int i = 0; i < PADDED_OUTPUTS * INPUTS / 16; i++) scales[i] = (float)(int)(next_random() % 1000 - 500) / 640.0f;
    for (int i = 0; i < MAX_ROWS * INPUTS; i++) x[i] = (float)(int)(next_random() % 20001 - 10000) / 3200.0f;
    printf("%s", paceline_instructions());
    for (int kind = 0; kind < 8; kind++) {
        const int format = kind & 1 ? CODES8 : CODES4, group = kind & 2 ? 32 : 16;
        const weight_t w = {OUTPUTS, INPUTS, format, group, 0, 1, codes, scales, kind & 4 ? scales : NULL};
        uint64_t sum = 5381;
        for (int rows = 1; rows <= MAX_ROWS; rows++) {
            int_linear(&w, x, NULL, out, rows);
            for (int i = 0; i < rows * OUTPUTS; i++) {
                uint32_t bits;
                memcpy(&bits, out + i, sizeof bits);
                sum = sum * 33 + bits;
            }
        }
        printf(" %016llx", (unsigned long long)sum);
    }
    puts("");
    return 0;
}
