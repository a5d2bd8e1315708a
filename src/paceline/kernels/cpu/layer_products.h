/* Products of a decoder layer joined with what follows them, so that outputs stay with the thread that computed them. The bits
 * are those of the single kernels. */
#pragma once
#include "decoder.h"
#include "int_product.h"

/* Whether `product_heads` can take the place of a product, norms of heads and the rotation */
int joins_heads(const decoder_t *d, const layer_t *l);
/* Rotated queries of all heads to `query` [T, H, hd]; keys and values to the cache */
void product_heads(const decoder_t *d, const layer_t *l, const pass_t *p, const int_input *in, float *query);

/* Whether `product_gated` can take the place of a product, the activation and the rounding for the product after it */
int joins_gate(const decoder_t *d, const layer_t *l);
void product_gated(const decoder_t *d, const layer_t *l, const int_input *in, const int_input *next);
