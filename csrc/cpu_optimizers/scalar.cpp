// The kernels for any processor.
#define KERNELS scalar_kernels
#include "kernels.h"
