// settings: writes hyperparameters that the host has changed (learning rate, betas, max_norm, ...)
// to device memory. They are passed by value as kernel arguments, so no copy to the device is
// needed. The launch is not part of a captured step; the step's kernels read what it has written.

#ifndef MAX_VALUES
#define MAX_VALUES 256       // values in one launch
#endif

struct Values { double value[MAX_VALUES]; };

extern "C" __global__ void settings_write(double* settings, int count, Values values) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) settings[i] = values.value[i];
}
