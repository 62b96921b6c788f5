// The kernels for every processor of the architecture.

#define CLDETR_ISA cpu::baseline
#include "ms_deform_attn_body.h"
